"""The most that any cache of a capacity could have reused. Owns: `clairvoyant`.

Rule (Belady, MIN with bypass): after each request keep those units whose next use is nearest; nothing has to
be kept. Why it is a bound, and why the prefix rule costs nothing:
- Forget that a unit is worth nothing without those before it, and let units come one by one, in the order
  of the path. What a real cache holds when a request starts, and what it holds at its end, can be had in
  this freer world as well: hits are a prefix, so all misses follow them and change the content one by one.
- In the freer world MIN with bypass is optimal: all units have one size and one value.
- Its content keeps the prefix rule by itself: whoever uses a unit uses all before it, so no unit is used
  later than those below it; of equals we drop the deepest.
A unit that is generated again before its next use need not be kept until then; only there may the freer
world be better than any tree. More capacity never lowers the result: it holds a superset at every step.
Real runs add limits of their own: pages owned while running, pins, a request's pages all at once. With
requests that overlap, uses and publications interleave differently from the order of admission; see
docs/decisions/0013.

All units of a path with the same next use are one number, so a capacity costs O(requests log requests).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from hotprefix.lab.bound.paths import Bound, Paths

Uses = list[tuple[int, int]]


def clairvoyant(paths: Paths, capacities: Sequence[int]) -> list[Bound]:
    """One bound for each capacity (units, >= 0)."""
    uses = _next_uses(paths)
    return [paths.bound(capacity, _hits(uses, capacity)) for capacity in capacities]


def _next_uses(paths: Paths) -> list[Uses]:
    """For each request: (a later request, how many units of this path it is the next to use). Units that are
    generated anew before they could be reused are left out."""
    never = len(paths.units)
    next_use = np.full(paths.ids, never, dtype=np.int32)
    found: list[Uses] = []
    for request in range(never - 1, -1, -1):
        units = paths.units[request]
        when = next_use[units]
        next_use[units] = never
        next_use[units[: paths.counted[request]]] = request
        starts = [0, *(np.flatnonzero(when[1:] != when[:-1]) + 1).tolist(), len(units)]
        runs = pairwise(starts)
        found.append([(int(when[a]), b - a) for a, b in runs if a < b and when[a] != never])
    found.reverse()
    return found


def _hits(uses: Sequence[Uses], capacity: int) -> list[int]:
    """Reused units of each request."""
    kept = [0] * len(uses)  # by the request that uses them next
    farthest: list[int] = []
    size = 0
    for request, later in enumerate(uses):
        size -= kept[request]
        for next_use, count in later:
            if not kept[next_use]:
                heapq.heappush(farthest, -next_use)
            kept[next_use] += count
            size += count
        while size > capacity:  # then something is kept for the future, so no past request is the farthest
            last = -farthest[0]
            drop = min(kept[last], size - capacity)
            kept[last] -= drop
            size -= drop
            if not kept[last]:
                heapq.heappop(farthest)
    return kept
