"""In which order waiting requests are tried. Owns: the pure order keys.

Rules: a key is a pure function of a read-only candidate. Ageing is one
rule for every order: a request that later arrivals have overtaken `max_overtakes` times goes before
all that have not, first come first served among such, and nobody overtakes it any more. So a cold
request's wait is bounded by a count, however deep the queue and however the arrivals are spaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hotprefix.kernel.config import Order

OrderKey = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting request as an order policy sees it. path: ids of the tree nodes its cached prefix ends
    in, from the root down; matched/remaining: tokens; serial: arrival order."""

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
    """Depth-first over the tree, the subtree with most waiting requests first: what shares a prefix is
    admitted together however its arrivals were interleaved (rule 22)."""
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
