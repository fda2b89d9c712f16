"""In which order waiting requests are tried. Owns: the pure order keys.

Rules:
1. A key is a pure function of a read-only candidate.
2. Ageing is one rule for every cache-aware order. A request that later arrivals have overtaken
   `max_overtakes` times goes before all that have not been, first come first served among such, and no
   request overtakes it any more. So the wait of a cold request is bounded by a count, however deep the queue
   is and however the arrivals are spaced (rule 21).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hotprefix.kernel.config import Order

OrderKey = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting request as an order policy sees it.

    serial: its place in the order of arrival.
    priority: smaller is more important.
    overtaken: how often a later request was admitted before it.
    matched: leading tokens that are in the cache.
    remaining: the tokens that it has to compute.
    path: serials of the tree nodes on its cached prefix, from the root down; only order `dfs` fills it.
    """

    serial: int
    priority: int
    overtaken: int
    matched: int = 0
    remaining: int = 0
    path: tuple[int, ...] = ()


def by_arrival(c: Candidate) -> OrderKey:
    return (c.serial,)


def by_priority(c: Candidate) -> OrderKey:
    return (c.priority, c.serial)


def longest_prefix(c: Candidate) -> OrderKey:
    return (-c.matched, c.serial)


def shortest_prefill(c: Candidate) -> OrderKey:
    return (c.remaining, c.serial)


def subtree_weight(candidates: Iterable[Candidate]) -> Callable[[Candidate], OrderKey]:
    """A key that goes through the tree depth first, the subtree with the most waiting requests first. So
    requests that share a prefix are admitted together, however their arrivals were interleaved (rule 22)."""
    weight = Counter(node for c in candidates for node in c.path)

    def key(c: Candidate) -> OrderKey:
        steps = [value for node in c.path for value in (-weight[node], node)]
        return (*steps, 1, c.serial)

    return key


_KEYS: Mapping[Order, Callable[[Candidate], OrderKey]] = {
    Order.FCFS: by_arrival,
    Order.PRIORITY: by_priority,
    Order.LPM: longest_prefix,
    Order.SPF: shortest_prefill,
}

CACHE_AWARE = frozenset({Order.LPM, Order.SPF, Order.DFS})


def arranged(order: Order, candidates: Sequence[Candidate], max_overtakes: int) -> list[int]:
    """Indices into `candidates` in the order to try them."""
    key = subtree_weight(candidates) if order is Order.DFS else _KEYS[order]
    ages = order in CACHE_AWARE

    def with_ageing(i: int) -> tuple[int, OrderKey]:
        c = candidates[i]
        if ages and c.overtaken >= max_overtakes:
            return (0, (c.serial,))
        return (1, key(c))

    return sorted(range(len(candidates)), key=with_ageing)
