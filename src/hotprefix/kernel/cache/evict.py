"""Which leaf loses its tail first. Owns: the pure sort keys and the lazy heap over evictable leaves.

Rules:
1. A key is a pure function of a read-only view of the leaf. The leaf with the smallest key is evicted first.
2. A touch or a use of a leaf makes its key grow, and leaves the heap alone. The leaf's entry is then too
   small: `pop` finds that out when the entry reaches the top, and queues the leaf again under its current
   key.
3. If a key shrinks (an expected use has been answered or has lapsed), the code that shrinks it calls `push`
   again. The leaf's older entry is void, and is dropped when it reaches the top.
4. Time is never part of a key: see expected_reuse.py.

Example (LRU): leaf a is queued under (5,), leaf b under (7,). A touch at tick 9 makes a's key (9,). `pop`
takes a's entry (5,), queues a again under (9,), and returns b.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hotprefix.kernel.cache.expected_reuse import Expected
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
    """Segmented LRU: leaves that were never used again go before those that were; LRU in each segment."""
    return (1 if leaf.hits > 0 else 0, leaf.last_access)


def fifo(leaf: LeafView) -> SortKey:
    return (leaf.created,)


def priority(leaf: LeafView) -> SortKey:
    """Pages of unimportant requests (large priority number) go first, LRU among equals."""
    return (-leaf.priority, leaf.last_access)


def sieve(leaf: LeafView) -> SortKey:
    """By the hand's round, and by creation within a round (SIEVE, NSDI'24)."""
    return (leaf.round, leaf.created)


def reuse(leaf: LeafView) -> SortKey:
    """Leaves without an expected use go first, LRU; then the leaf whose next use is due last."""
    if leaf.expected is None:
        return (0, leaf.last_access)
    return (1, -leaf.expected.due, leaf.last_access)


@dataclass(frozen=True, slots=True)
class Policy:
    """key: the leaf with the smallest goes first.
    second_chance: a leaf that was used since the hand last came by is spared for one round.
    """

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
    """A leaf as the heap sees it.

    queued: the key of the leaf's valid entry, None if it has none. Only the heap writes it.
    visited: whether the leaf was used since the hand last came by.
    round: the round of the hand in which the leaf's turn comes.
    """

    queued: SortKey | None
    visited: bool
    round: int

    @property
    def evictable(self) -> bool: ...


L = TypeVar("L", bound=Leaf)


class EvictionHeap(Generic[L]):
    """Evictable leaves by sort key.

    round: the number of the hand's current round. The hand passes the leaves from the oldest to the newest;
    when it has passed them all, the next round begins with the oldest again.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[SortKey, int, L]] = []
        self._sequence = 0
        self.round = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, leaf: L) -> None:
        """Queue an evictable leaf under its current key. A leaf that is queued already under a smaller or
        equal key stays where it is: `pop` queues it again when it gets there."""
        key = self._policy.key(leaf)
        if leaf.queued is None or key < leaf.queued:
            self._sequence += 1
            self._add(key, self._sequence, leaf)

    def _add(self, key: SortKey, sequence: int, leaf: L) -> None:
        leaf.queued = key
        heapq.heappush(self._heap, (key, sequence, leaf))

    def pop(self) -> L | None:
        """Take the evictable leaf with the smallest current key off the heap; None if there is none.

        Void entries are dropped on the way, and so are leaves that are no longer evictable.
        """
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
        """Drop void entries and leaves that are not evictable now. Such a leaf is pushed again when it
        becomes evictable."""
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
