"""The tiers below L1 on the virtual clock. Owns: `Store`, a shared L3, and `HostSide`, one instance's links.

Rules:
1. Pages have names and sizes here, never contents.
2. A store is bounded, and each page in it can be reached from its prefix's first page.
3. A fetch moves the leading pages that are there when it begins. It is delivered between steps, as the engine
   does it.
4. Saves and puts go on in the background and take their wire's time. A step waits for its restores.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.plan import StepPlan
from hotprefix.lab.sim.wires import Wires


class _Stored:
    """A page in the store.

    parent: the page before it; None if it is a prefix's first.
    used: the number of its last use.
    children: how many pages come right after it.
    """

    __slots__ = ("children", "parent", "used")

    def __init__(self, parent: bytes | None, used: int) -> None:
        self.parent = parent
        self.used = used
        self.children = 0


class Store:
    """An external store of at most `pages` pages, shared by instances. It behaves as the engine's folder
    store:
    1. It takes no page whose parent it lacks.
    2. If it is full, it gives up a page behind which there is none: the one used longest ago, but never the
       parent of the page that needs the room.
    3. When a page goes, its last use passes to its parent.
    """

    def __init__(self, pages: int, gone: Callable[[bytes], None] | None = None) -> None:
        """gone: if given, is called with the key of each page that is given up."""
        self._limit, self._gone = pages, gone
        self._pages: dict[bytes, _Stored] = {}
        self._leaves: list[tuple[int, bytes]] = []
        self._uses = 0

    def __len__(self) -> int:
        return len(self._pages)

    def put(self, key: bytes, parent: bytes | None = None) -> bool:
        """Store a page behind its parent (None: it is a prefix's first), unless it is there, its parent is
        not, or no page can make room. Returns whether it was taken."""
        if key in self._pages or (parent is not None and parent not in self._pages):
            return False
        if len(self._pages) >= self._limit and not self._evict(parent):
            return False
        self._pages[key] = _Stored(parent, 0)
        if parent is not None:
            self._pages[parent].children += 1
        self._use(key)
        return True

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark a chain as just used. Only the last page that can be reached is marked; the pages before it
        get its use when it goes."""
        last = None
        for key in keys:
            if key not in self._pages:
                break
            last = key
        if last is not None:
            self._use(last)

    def leading(self, keys: tuple[bytes, ...]) -> int:
        """How many of these pages, from the first, are there."""
        found = 0
        for key in keys:
            if key not in self._pages:
                break
            found += 1
        return found

    def _use(self, key: bytes) -> None:
        self._uses += 1
        self._pages[key].used = self._uses
        self._push(key)

    def _push(self, key: bytes) -> None:
        page = self._pages[key]
        if not page.children:
            heapq.heappush(self._leaves, (page.used, key))
        if len(self._leaves) > 2 * len(self._pages) + 64:
            self._leaves = [entry for entry in set(self._leaves) if self._is_leaf(entry)]
            heapq.heapify(self._leaves)

    def _is_leaf(self, entry: tuple[int, bytes]) -> bool:
        page = self._pages.get(entry[1])
        return page is not None and page.used == entry[0] and not page.children

    def _evict(self, spared: bytes | None) -> bool:
        """Give up one page. False if there is none but the spared one."""
        victim = None
        aside: list[tuple[int, bytes]] = []
        while victim is None and self._leaves:
            entry = heapq.heappop(self._leaves)
            if self._is_leaf(entry):
                if entry[1] == spared:
                    aside.append(entry)
                else:
                    victim = entry[1]
        for entry in aside:
            heapq.heappush(self._leaves, entry)
        if victim is not None:
            self._remove(victim)
        return victim is not None

    def _remove(self, key: bytes) -> None:
        page = self._pages.pop(key)
        if self._gone is not None:
            self._gone(key)
        if page.parent is not None:
            parent = self._pages[page.parent]
            parent.children -= 1
            parent.used = max(parent.used, page.used)
            self._push(page.parent)


@dataclass(slots=True)
class _Pending:
    id: int
    pages: int
    begun: float
    arrives: float


class HostSide:
    """What one instance's plans ask of L2's and L3's links.

    wires: the instance's.
    page_bytes: size of one page.
    store: L3; None if there is none.
    disturb_at: disturb_at(when) has the instance look again at that time.
    stored: if given, stored(key, page) is called with each page of L2 that the store has taken.
    """

    def __init__(
        self, wires: Wires, page_bytes: int, store: Store | None, disturb_at: Callable[[float], None],
        stored: Callable[[bytes, int], None] | None = None,
    ) -> None:  # fmt: skip
        self.wires = wires
        self._stored = stored
        self._bytes, self._store, self._disturb_at = page_bytes, store, disturb_at
        self._pending: dict[int, _Pending] = {}

    @property
    def busy(self) -> bool:
        """True while pages are on their way from L3."""
        return bool(self._pending)

    def begin(self, plan: StepPlan, now: float) -> None:
        """Start the fetches, saves and puts of a plan, and give up its cancels."""
        if self.wires.fetch is not None:
            for fetch in plan.fetches:
                pages = self._store.leading(fetch.keys) if self._store is not None else 0
                arrives = self.wires.fetch.send(pages * self._bytes, now)
                self._pending[fetch.id] = _Pending(fetch.id, pages, now, arrives)
                self._disturb_at(arrives)
        for cancelled in plan.cancels:
            if self._pending.pop(cancelled, None) is not None and self.wires.fetch is not None:
                self.wires.fetch.cancels += 1
        if self.wires.save is not None and plan.saves:
            self.wires.save.send(len(plan.saves) * self._bytes, now)
        if self._store is not None and self.wires.put is not None:
            if plan.stores:
                self.wires.put.send(len(plan.stores) * self._bytes, now)
            for store in plan.stores:
                if self._store.put(store.key, store.parent) and self._stored is not None:
                    self._stored(store.key, store.page)
            for chain in plan.touches:
                self._store.touch(chain)

    def restore_s(self, plan: StepPlan, now: float) -> float:
        """Seconds that a plan's restores take, waiting for the wire included."""
        if self.wires.restore is None or not plan.restores:
            return 0.0
        return self.wires.restore.send(len(plan.restores) * self._bytes, now) - now

    def land(self, kernel: Kernel, now: float) -> None:
        """Hand the fetches that have arrived to the kernel."""
        for pending in [p for p in self._pending.values() if p.arrives <= now]:
            del self._pending[pending.id]
            kernel.transfer_done(pending.id, pending.pages, pending.arrives - pending.begun, now)
