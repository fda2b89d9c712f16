"""Which pages are cached where. Owns: `PageIndex`, a flat map from page key to those that hold the page.

Rules:
1. Holders are bit masks, one for each shelf. Keys with equal holders share one record, so an entry costs the
   same however many hold it.
2. `reach` looks at few keys. It relies on this: who holds a prefix's page holds the pages before it, as
   eviction takes tails first. Where a holder lacks pages in between, its reach may be too long, never too
   short: a worker that holds pages 0 and 2 of three reaches 1 or 3. That costs affinity, never text.
3. At most `limit` keys. When there are more, a sixteenth goes: the oldest that no recent request asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from hotprefix.fleet.records import Keys, Shelf

Reach = list[tuple[int, int]]
"""(mask of holders, leading pages that each of them holds), every holder once at most."""


class Holders:
    """Who holds a page. shelves: the masks of L1, L2 and L3. l1, l2, l3: of each of them and those above it.
    entries: how many keys share this record."""

    __slots__ = ("entries", "l1", "l2", "l3", "shelves")

    def __init__(self, shelves: tuple[int, int, int]) -> None:
        self.entries = 0
        self.set(shelves)

    def set(self, shelves: tuple[int, int, int]) -> None:
        """Take these masks."""
        self.shelves = shelves
        self.l1 = shelves[0]
        self.l2 = self.l1 | shelves[1]
        self.l3 = self.l2 | shelves[2]


NO_ONE = (0, 0, 0)


class PageIndex:
    """See the module's rules."""

    def __init__(self, limit: int) -> None:
        self._limit, self._spare = limit, max(1, limit // 16)
        self._holders: dict[int, Holders] = {}
        # The records by their masks. `_twins` became equal to another one when a holder was dropped.
        self._shared: dict[tuple[int, int, int], Holders] = {}
        self._twins: list[Holders] = []
        self._recent: deque[Keys] = deque()
        self._recent_keys = 0
        self.deepest = Shelf.L1
        self.forgotten = 0

    def __len__(self) -> int:
        empty = sum(h.entries for h in (*self._shared.values(), *self._twins) if not h.l3)
        return len(self._holders) - empty

    def holders(self, key: int) -> tuple[int, int, int]:
        """The masks of a key, by shelf."""
        found = self._holders.get(key)
        return NO_ONE if found is None else found.shelves

    # -- what changes -----------------------------------------------------------------------------

    def store(self, mask: int, shelf: Shelf, keys: Keys) -> None:
        """These holders have these pages."""
        holders = self._holders
        before: Holders | None = None
        after: Holders | None = None
        for key in keys:
            old = holders.get(key)
            if after is None or old is not before:
                before, after = old, self._changed(old, mask, shelf, True)
            if after is not None and after is not old:
                holders[key] = after
                after.entries += 1
                if old is not None:
                    self._release(old)
        if shelf > self.deepest:
            self.deepest = shelf
        if len(holders) > self._limit:
            self._shrink()

    def remove(self, mask: int, shelf: Shelf, keys: Keys) -> None:
        """These holders do not have these pages any more."""
        holders = self._holders
        before: Holders | None = None
        after: Holders | None = None
        for key in keys:
            old = holders.get(key)
            if old is None:
                continue
            if old is not before:
                before, after = old, self._changed(old, mask, shelf, False)
            if after is None:
                del holders[key]
                self._release(old)
            elif after is not old:
                holders[key] = after
                after.entries += 1
                self._release(old)

    def drop(self, mask: int, shelf: Shelf | None = None) -> None:
        """These holders have nothing any more; with `shelf`, nothing on it. It changes the shared records and
        not the entries, so it takes no longer for many keys; if half of them are empty then, they go."""
        everyone = [h for h in (*self._shared.values(), *self._twins) if h.entries]
        self._shared, self._twins = {}, []
        empty = 0
        for h in everyone:
            l1, l2, l3 = (m & ~mask if shelf is None or shelf == s else m for s, m in enumerate(h.shelves))
            h.set((l1, l2, l3))
            if self._shared.setdefault(h.shelves, h) is not h:
                self._twins.append(h)
            if not h.l3:
                empty += h.entries
        if empty * 2 >= len(self._holders):
            self._holders = {key: h for key, h in self._holders.items() if h.l3}
            self._shared.pop(NO_ONE, None)
            self._twins = [h for h in self._twins if h.l3]

    def _changed(self, old: Holders | None, mask: int, shelf: Shelf, more: bool) -> Holders | None:
        """The record of `old` with these holders more, or less; None if no holder is left."""
        l1, l2, l3 = NO_ONE if old is None else old.shelves
        if shelf == Shelf.L1:
            l1 = l1 | mask if more else l1 & ~mask
        elif shelf == Shelf.L2:
            l2 = l2 | mask if more else l2 & ~mask
        else:
            l3 = l3 | mask if more else l3 & ~mask
        shelves = (l1, l2, l3)
        if shelves == NO_ONE:
            return None
        if old is not None and old.shelves == shelves:
            return old
        found = self._shared.get(shelves)
        if found is None:
            found = self._shared[shelves] = Holders(shelves)
        return found

    def _release(self, old: Holders) -> None:
        old.entries -= 1
        if not old.entries and self._shared.get(old.shelves) is old:
            del self._shared[old.shelves]

    def _shrink(self) -> None:
        """Forget the oldest keys, except those that were asked for lately; these become the newest. Of three
        times as many keys as are to go two thirds at most were asked for (`asked`), so enough are found."""
        holders = self._holders
        over = len(holders) - self._limit + self._spare
        warm = set().union(*self._recent)
        for key in list(islice(holders, over + 2 * self._spare)):
            found = holders.pop(key)
            if key in warm or not over:
                holders[key] = found
                continue
            self._release(found)
            self.forgotten += 1
            over -= 1

    # -- what is asked ----------------------------------------------------------------------------

    def asked(self, keys: Keys) -> None:
        """A request asks for these keys: they are warm for a while."""
        room = 2 * self._spare
        if not keys:
            return  # nothing would ever push it out
        keys = keys[:room]
        self._recent.append(keys)
        self._recent_keys += len(keys)
        while self._recent_keys > room:
            self._recent_keys -= len(self._recent.popleft())

    @property
    def recent(self) -> Iterator[Keys]:
        """What was asked for lately, the last request first."""
        return reversed(self._recent)

    def reach(self, keys: Keys, shelf: Shelf) -> Reach:
        """How many leading pages each holder has on this shelf and those above it (rule 2)."""
        found: Reach = []
        if keys:
            depth, last = int(shelf), len(keys) - 1
            first = self._mask(keys[0], depth)
            to_the_end = first & self._mask(keys[last], depth) if first else 0
            to_the_end = self._split(keys, depth, 0, first, last, to_the_end, found)
            if to_the_end:
                found.append((to_the_end, last + 1))
        return found

    def _mask(self, key: int, depth: int) -> int:
        found = self._holders.get(key)
        if found is None:
            return 0
        return found.l1 if depth == 0 else found.l2 if depth == 1 else found.l3

    def _split(
        self, keys: Keys, depth: int, low: int, at_low: int, high: int, at_high: int, found: Reach
    ) -> int:
        """Find where those that hold page `low` end before page `high`. at_high: those that hold both.
        Returns those of them that do not end in between."""
        while at_low != at_high:
            if high == low + 1:
                found.append((at_low & ~at_high, high))
                break
            middle = (low + high) >> 1
            at_middle = at_low & self._mask(keys[middle], depth)
            if at_middle != at_low:
                at_middle = self._split(keys, depth, low, at_low, middle, at_middle, found)
            low, at_low, at_high = middle, at_middle, at_high & at_middle
        return at_high
