"""One tier of pages: the pool and the prefix tree over it (L1 on the device, L2 in host memory). Owns: the
one place where pages are allocated by evicting, and the conservation check.

Rules: free + owned + evictable + protected = total, at all times (rule 6); `check` verifies it page by page,
not only by counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hotprefix.errors import ProtocolError
from hotprefix.kernel.cache.evict import POLICIES
from hotprefix.kernel.cache.frames import Frames
from hotprefix.kernel.cache.node import Node
from hotprefix.kernel.cache.pages import PagePool, PageState
from hotprefix.kernel.cache.tree import PrefixTree
from hotprefix.kernel.config import Eviction, LayerGroup


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Pages of one tier by state."""

    total: int
    free: int
    owned: int
    evictable: int
    protected: int


class Tier:
    """`total` pages of `page_size` tokens.

    on_evict: called with the pages of each eviction, after they became free.
    groups: the layer groups, for layers that need less than the whole prefix.
    wanted: called at each allocation that must evict; for each node it returns, that many leading pages are
    taken only when nothing else is left.
    """

    def __init__(
        self,
        total: int,
        page_size: int,
        eviction: Eviction,
        on_evict: Callable[[list[int]], None],
        groups: Sequence[LayerGroup] = (),
    ) -> None:
        self.page_size = page_size
        self.groups = tuple(Frames(group, total, page_size) for group in groups)
        self.pool = PagePool(total, self.groups)
        self.tree = PrefixTree(page_size, POLICIES[eviction])
        self._on_evict = on_evict
        self.wanted: Callable[[], Mapping[Node, int]] = dict

    @property
    def vacant(self) -> int:
        """Pages that are free or evictable, whether or not the layer groups have frames for them."""
        return self.pool.free + self.tree.evictable_pages

    @property
    def available(self) -> int:
        """Pages that an allocation could get now."""
        vacant = self.vacant
        return min(vacant, *(group.spare for group in self.groups)) if self.groups else vacant

    def allocate(self, n: int) -> list[int] | None:
        """n owned pages; as many pages as are missing are evicted first. None (and nothing evicted) if too
        few are available."""
        if n > self.available:
            return None
        missing = n - self.pool.free
        if missing > 0:
            self._free(self.tree.evict(missing, self.wanted()))
        return self.pool.allocate(n)

    def flush(self) -> int:
        """Evict everything that is not protected, and make the rest invisible to lookups; returns the number
        of pages evicted."""
        pages = self.tree.evict(self.tree.evictable_pages, tell=False)
        self._free(pages)
        self.tree.retire()
        return len(pages)

    def _free(self, pages: list[int]) -> None:
        self.pool.unindex(pages)
        if pages:
            self._on_evict(pages)

    def occupancy(self) -> Occupancy:
        return Occupancy(
            self.pool.total, self.pool.free, self.pool.owned, self.tree.evictable_pages,
            self.tree.protected_pages,
        )  # fmt: skip

    def check(self, owned: Iterable[int]) -> None:
        """Raise ProtocolError unless every page is in exactly one place. owned: the pages that running
        requests own, each once."""
        seen = bytearray(self.pool.total)
        protected = 0
        for node in self.tree.walk_nodes():
            self._see(seen, node.pages, PageState.INDEXED)
            protected += len(node.pages) if node.pins else 0
            _check_node(node.pins, [c.pins for c in node.children.values()])
        self._see(seen, owned, PageState.OWNED)
        used = sum(seen)
        now = self.occupancy()
        if protected != now.protected or now.evictable < 0:
            raise ProtocolError(f"{protected} pages are protected, the count says {now}")
        if used + now.free != now.total or now.free + now.owned + now.evictable + now.protected != now.total:
            raise ProtocolError(f"pages leaked: {used} in use, {now}")

    def _see(self, seen: bytearray, pages: Iterable[int], state: PageState) -> None:
        for page in pages:
            if seen[page] or self.pool.state(page) is not state:
                raise ProtocolError(f"page {page} is held twice, or is not {state.name}")
            seen[page] = 1


def _check_node(pins: int, child_pins: list[int]) -> None:
    if pins < sum(1 for p in child_pins if p):
        raise ProtocolError("a protected page has an unprotected parent")
