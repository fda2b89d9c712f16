"""Which leaf loses its tail first. Owns: the pure sort keys and the lazy heap over evictable leaves.

Rules: a key is a pure function of a read-only leaf view; smaller goes first. What a touch or a use does to a
leaf in the heap makes its key grow: the entry that is too small is pushed back when it surfaces, and
nothing is re-heapified. Where a key shrinks (an expected use is over) whoever shrinks it pushes the leaf
again; the entry it had is dropped when it surfaces. Time never enters a key: see `expect`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hotprefix.kernel.cache.expect import Expected
from hotprefix.kernel.config import Eviction

SortKey = tuple[float, ...]


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
    @property
    def round(self) -> int: ...
    @property
    def expected(self) -> Expected | None: ...


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


def sieve(leaf: LeafView) -> SortKey:
    """In the order of creation, round by round of the hand (SIEVE, NSDI'24)."""
    return (leaf.round, leaf.created)


def reuse(leaf: LeafView) -> SortKey:
    """What nobody is expected to use goes first, LRU; then what is expected last (issue 4)."""
    if leaf.expected is None:
        return (0, leaf.last_access)
    return (1, -leaf.expected.due, leaf.last_access)


@dataclass(frozen=True, slots=True)
class Policy:
    """key: smaller goes first. second_chance: a leaf that was used since the hand last came by is spared
    for one round."""

    key: Callable[[LeafView], SortKey]
    second_chance: bool = False


POLICIES: Mapping[Eviction, Policy] = {
    Eviction.LRU: Policy(lru),
    Eviction.LFU: Policy(lfu),
    Eviction.SLRU: Policy(slru),
    Eviction.FIFO: Policy(fifo),
    Eviction.PRIORITY: Policy(priority),
    Eviction.SIEVE: Policy(sieve, second_chance=True),
    Eviction.REUSE: Policy(reuse),
}


class Leaf(LeafView, Protocol):
    """A leaf as the heap sees it. queued: the key of its valid entry, the heap's own mark. visited: used
    since the hand last came by."""

    queued: SortKey | None
    visited: bool
    round: int

    @property
    def evictable(self) -> bool: ...


L = TypeVar("L", bound=Leaf)


class EvictionHeap(Generic[L]):
    """Evictable leaves by sort key. `pop` skips what is no longer evictable. round: of the hand, which starts
    anew with the oldest leaf each time it has passed them all."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[SortKey, int, L]] = []
        self._sequence = 0
        self.round = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, leaf: L) -> None:
        """Make sure that an evictable leaf is found at its place or before."""
        key = self._policy.key(leaf)
        if leaf.queued is None or key < leaf.queued:
            self._sequence += 1
            self._add(key, self._sequence, leaf)

    def _add(self, key: SortKey, sequence: int, leaf: L) -> None:
        leaf.queued = key
        heapq.heappush(self._heap, (key, sequence, leaf))

    def pop(self) -> L | None:
        """The evictable leaf with the smallest current key, or None; it leaves the heap."""
        while self._heap:
            key, sequence, leaf = heapq.heappop(self._heap)
            if leaf.queued is not key:
                continue
            leaf.queued = None
            if not leaf.evictable:
                continue
            self.round = max(self.round, leaf.round)
            if self._policy.second_chance and leaf.visited:
                leaf.visited = False
                leaf.round = self.round + 1
            current = self._policy.key(leaf)
            if current > key:
                self._add(current, sequence, leaf)
                continue
            return leaf
        return None

    def prune(self) -> None:
        """Drop entries that are void or no longer evictable; these leaves re-enter when they are again."""
        kept = []
        for entry in self._heap:
            key, _, leaf = entry
            if leaf.queued is not key:
                continue
            if leaf.evictable:
                kept.append(entry)
            else:
                leaf.queued = None
        heapq.heapify(kept)
        self._heap = kept
