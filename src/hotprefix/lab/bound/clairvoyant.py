"""The most that any cache of a capacity could have reused. Owns: `clairvoyant`.

Rules (Belady's MIN with bypass): after each request, keep the units whose next use is nearest. A unit need
not be kept at all (bypass).

Why this is a bound, although real caches have the prefix rule (a unit is worth nothing without those before
it):
- Imagine a freer world without the prefix rule, in which units arrive one by one, in the order of a request's
path. Whatever a real cache holds at the start and at the end of a request, a cache in the freer world can
hold too: a request's hits are a prefix of its path, so its misses come after them and can change the content
one by one.
- In the freer world MIN with bypass is optimal, because all units have the same size and the same value.
- MIN's content keeps the prefix rule by itself. A request that uses a unit uses all units before it, so a
unit's next use is never later than that of a unit below it; of units with the same next use, the deepest is
dropped. The freer world may be better than any tree in one case only: a unit that is generated again before
its next use need not be kept until then. More capacity never lowers the result, because it holds a superset
at every step.

Real runs have further limits: pages owned while running, pins, a request's pages all at once. If requests
overlap, uses and publications interleave differently from the order of admission; see docs/decisions/0013.

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
    """For each request r, pairs (a later request, how many units of r's path it is the next to use). Units
    that are generated again before they could be reused are left out."""
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
    kept = [0] * len(uses)  # how many units are kept, by the request that uses them next
    farthest: list[int] = []
    size = 0
    for request, later in enumerate(uses):
        size -= kept[request]
        for next_use, count in later:
            if not kept[next_use]:
                heapq.heappush(farthest, -next_use)
            kept[next_use] += count
            size += count
        while size > capacity:  # something is kept for the future, so the farthest is no past request
            last = -farthest[0]
            drop = min(kept[last], size - capacity)
            kept[last] -= drop
            size -= drop
            if not kept[last]:
                heapq.heappop(farthest)
    return kept
