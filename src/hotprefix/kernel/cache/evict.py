"""Which leaf loses its tail first. Owns: the pure sort keys and the lazy heap over evictable leaves.

Rules: a key is a pure function of a read-only leaf view; smaller goes first. Keys may only grow while
a node lives (every touch moves towards "keep"), so one heap entry per node suffices: an entry that
is too small is pushed back when it surfaces, and nothing is re-heapified on a touch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from hotprefix.kernel.config import Eviction

SortKey = tuple[int, ...]


class LeafView(Protocol):
    """What an eviction policy may see of a leaf. Recency is a logical tick, not a time."""

    @property
    def last_access(self) -> int: ...
    @property
    def created(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def priority(self) -> int: ...


def lru(leaf: LeafView) -> SortKey:
    return (leaf.last_access,)


def lfu(leaf: LeafView) -> SortKey:
    return (leaf.hits, leaf.last_access)


def slru(leaf: LeafView) -> SortKey:
    """Segmented LRU: what nobody used again goes before what somebody did."""
    return (1 if leaf.hits > 0 else 0, leaf.last_access)


def fifo(leaf: LeafView) -> SortKey:
    return (leaf.created,)


def priority(leaf: LeafView) -> SortKey:
    """Pages of unimportant requests (large priority number) go first, LRU among equals."""
    return (-leaf.priority, leaf.last_access)


KEYS: Mapping[Eviction, Callable[[LeafView], SortKey]] = {
    Eviction.LRU: lru,
    Eviction.LFU: lfu,
    Eviction.SLRU: slru,
    Eviction.FIFO: fifo,
    Eviction.PRIORITY: priority,
}


class Leaf(LeafView, Protocol):
    """A leaf as the heap sees it: `in_heap` is the heap's own mark."""

    in_heap: bool

    @property
    def evictable(self) -> bool: ...


L = TypeVar("L", bound=Leaf)


class EvictionHeap(Generic[L]):
    """Evictable leaves by sort key. `push` is idempotent; `pop` skips what is no longer evictable."""

    def __init__(self, key: Callable[[LeafView], SortKey]) -> None:
        self._key = key
        self._heap: list[tuple[SortKey, int, L]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, leaf: L) -> None:
        if leaf.in_heap:
            return
        leaf.in_heap = True
        self._sequence += 1
        heapq.heappush(self._heap, (self._key(leaf), self._sequence, leaf))

    def pop(self) -> L | None:
        """The evictable leaf with the smallest current key, or None; it leaves the heap."""
        while self._heap:
            key, sequence, leaf = heapq.heappop(self._heap)
            leaf.in_heap = False
            if not leaf.evictable:
                continue
            current = self._key(leaf)
            if current > key:
                leaf.in_heap = True
                heapq.heappush(self._heap, (current, sequence, leaf))
                continue
            return leaf
        return None

    def prune(self) -> None:
        """Drop entries that are no longer evictable; they re-enter when they are again."""
        kept = []
        for entry in self._heap:
            if entry[2].evictable:
                kept.append(entry)
            else:
                entry[2].in_heap = False
        heapq.heapify(kept)
        self._heap = kept
