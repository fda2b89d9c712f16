"""The prefix tree, written as a dictionary of pages. Owns: `PageOracle`.

Rules: no runs, no splits, no laziness: one record for each indexed page, found by namespace and whole
prefix; a use writes every page of its path, except what belongs to the page where it ended (visited,
expected). Slow and plain, so that it can be believed.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotprefix.kernel.cache.evict import Policy
from hotprefix.kernel.cache.expected_reuse import Expected
from hotprefix.kernel.request import Namespace

Key = tuple[Namespace, bytes]


@dataclass
class Page:
    page: int
    last_access: int
    created: int
    hits: int = 0
    priority: int = 1 << 30
    pins: int = 0
    planned: bool = False
    visited: bool = False
    round: int = 0
    expected: Expected | None = None


class PageOracle:
    """See the module's rules."""

    def __init__(self, page_bytes: int, policy: Policy) -> None:
        self.width = page_bytes
        self._policy = policy
        self._round = 0
        self.pages: dict[Key, Page] = {}
        self._tick = 0

    def path(self, namespace: Namespace, key: bytes, pages: int) -> list[Key]:
        return [(namespace, key[: n * self.width]) for n in range(1, pages + 1)]

    def matched(self, namespace: Namespace, key: bytes, limit: int) -> list[Page]:
        found = []
        for place in self.path(namespace, key, min(limit, len(key) // self.width)):
            if place not in self.pages:
                break
            found.append(self.pages[place])
        return found

    def use(
        self, namespace: Namespace, key: bytes, pages: int, priority: int | None, counted: int | None
    ) -> None:
        """counted: the use is counted on pages after the first `counted` (None: nowhere)."""
        self._tick += 1
        for n, place in enumerate(self.path(namespace, key, pages)):
            page = self.pages[place]
            page.last_access = self._tick
            if priority is not None:
                page.priority = min(page.priority, priority)
            if counted is not None and n >= counted:
                page.hits += 1
        if counted is not None:
            self._ended_at(page)

    def _ended_at(self, page: Page) -> None:
        """A use by another than the publisher: it is what was expected."""
        page.visited = True
        page.expected = None

    def expect(self, namespace: Namespace, key: bytes, expected: Expected) -> None:
        page = self.pages.get((namespace, key))
        if page is not None:
            page.expected = expected.joined(page.expected)

    def lapse(self, now: float) -> None:
        for page in self.pages.values():
            if page.expected is not None and page.expected.lapses <= now:
                page.expected = None

    def remove(self, place: Key) -> Page:
        """Who is expected where a page goes, is expected on the page above, which is in no earlier round."""
        page = self.pages.pop(place)
        parent = self.pages.get((place[0], place[1][: -self.width]))
        if parent is not None:
            parent.round = max(parent.round, page.round)
            parent.expected = page.expected.joined(parent.expected) if page.expected else parent.expected
        return page

    def pin(self, namespace: Namespace, key: bytes, pages: int, by: int) -> None:
        for place in self.path(namespace, key, pages):
            self.pages[place].pins += by

    def insert(
        self, namespace: Namespace, key: bytes, above: int, fresh: list[int], priority: int, planned: bool
    ) -> tuple[list[int], int]:
        """Publish key's pages after the first `above`; returns the range's page ids and how many are new."""
        found = self.matched(namespace, key, len(key) // self.width)
        if not planned and any(p.planned for p in found):
            return [], 0
        kept, fresh = found[above:], fresh[len(found) - above :]
        for place, page in zip(
            self.path(namespace, key, len(key) // self.width)[len(found) :], fresh, strict=True
        ):
            self.pages[place] = Page(page, 0, self._tick + 1, planned=planned, round=self._round)
        if kept:
            for page in kept:
                page.hits += 1
            self._ended_at(kept[-1])
        self.use(namespace, key, len(key) // self.width, priority, None)
        return [p.page for p in kept] + fresh, len(fresh)

    def is_leaf(self, place: Key) -> bool:
        namespace, prefix = place
        longer = len(prefix) + self.width
        return not any(
            ns == namespace and len(other) == longer and other.startswith(prefix) for ns, other in self.pages
        )

    def evict(self, count: int, wanted: frozenset[Key] = frozenset()) -> list[int]:
        """Pages one by one: the least wanted unpinned leaf, those in `wanted` only when no other is left;
        with a second chance, what was visited since the last look is passed over once."""
        freed: list[int] = []
        aside: set[Key] = set()
        while len(freed) < count:
            leaves = [
                (k, p) for k, p in self.pages.items() if not p.pins and self.is_leaf(k) and k not in aside
            ]
            if not leaves:
                if not aside:
                    break
                aside, wanted = set(), frozenset()
                continue
            place, page = min(leaves, key=lambda kp: self._policy.key(kp[1]))
            self._round = max(self._round, page.round)
            if self._policy.second_chance and page.visited:
                page.visited, page.round = False, self._round + 1
            elif place in wanted:
                aside.add(place)
            else:
                freed.append(self.remove(place).page)
        return freed

    @property
    def protected(self) -> int:
        return sum(1 for p in self.pages.values() if p.pins)
