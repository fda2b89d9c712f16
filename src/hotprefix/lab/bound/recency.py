"""What LRU and FIFO reuse, block by block and one request at a time. Owns: `lru`, `fifo`.

Rules: compare these figures with the clairvoyant bound and with published simulators. They do not replace a
replay: there is no queue, there are no pins, and requests do not overlap.
- LRU: all units of a request are equally recent, and of these the deepest is evicted first, so a prefix never
loses its root. The units of the request that is being handled are evicted last.
- FIFO: units are evicted in the order in which they came, whatever hangs below them. So a prefix loses its
root first, and its other units are held for nothing. This is the rule of the public simulator that we compare
with; the engine's `fifo` evicts leaves and does better.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from hotprefix.lab.bound.paths import Bound, Paths, Units

Pieces = list[tuple[int, int, int]]


def lru(paths: Paths, capacity: int) -> Bound:
    """What LRU reuses. capacity: units, >= 1."""
    cache = _Recent(capacity)
    last_use = np.full(paths.ids, -1, dtype=np.int32)
    hits = []
    for request, units in enumerate(paths.units):
        pieces = _pieces(last_use[units])
        last_use[units] = request
        hits.append(min(cache.use(pieces, len(units)), int(paths.counted[request])))
    return paths.bound(capacity, hits)


def _pieces(last_use: Units) -> Pieces:
    """Triples (an earlier request, first, stop), root first: that request was the last to use positions
    [first, stop) of the path."""
    starts = [0, *(np.flatnonzero(last_use[1:] != last_use[:-1]) + 1).tolist(), len(last_use)]
    pieces: Pieces = []
    for start, stop in pairwise(starts):
        if start == stop or last_use[start] < 0:
            break
        pieces.append((int(last_use[start]), start, stop))
    return pieces


class _Recent:
    """What LRU holds. The units of a request's path that no later request has used are one run of positions,
    of which [stop - count, stop) is still held; `_stop` and `_count` have an entry for each request."""

    def __init__(self, capacity: int) -> None:
        self._room = capacity
        self._stop: list[int] = []
        self._count: list[int] = []
        self._oldest = 0

    def use(self, pieces: Pieces, length: int) -> int:
        """Handle the next request; returns the length of the prefix that it finds."""
        found = 0
        for request, first, stop in pieces:
            here = max(0, min(stop, self._stop[request]) - first)
            self._count[request] -= here
            found += here
        self._stop.append(length)
        self._count.append(length)
        self._room -= length - found
        while self._room < 0:
            drop = min(self._count[self._oldest], -self._room)
            self._count[self._oldest] -= drop
            self._stop[self._oldest] -= drop
            self._room += drop
            self._oldest += not self._count[self._oldest]
        return found


def fifo(paths: Paths, capacity: int) -> Bound:
    """What FIFO reuses. capacity: units, >= 1."""
    came = np.full(
        paths.ids, -capacity, dtype=np.int64
    )  # a unit is held as long as it is among the last `capacity` that came
    total = 0
    hits = []
    for request, units in enumerate(paths.units):
        order = came[units]
        gone = order <= total - capacity
        found = int(gone.argmax()) if gone.any() else len(units)
        hits.append(min(found, int(paths.counted[request])))
        total = _come(came, units[found:], order[found:], total, capacity)
    return paths.bound(capacity, hits)


def _come(came: Units, units: Units, order: Units, total: int, capacity: int) -> int:
    """Take in the units of a path that are missing, root first. Each may push out units that come later in
    the path. Units that came one after the other, or never, are handled as one run: all of them are held or
    none is."""
    together = (order[1:] - order[:-1] == 1) | (order[1:] == order[:-1])
    starts = [0, *(np.flatnonzero(~together) + 1).tolist(), len(units)]
    for start, stop in pairwise(starts):
        if start < stop and order[start] <= total - capacity:
            came[units[start:stop]] = np.arange(total + 1, total + 1 + stop - start)
            total += stop - start
    return total
