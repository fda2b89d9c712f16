"""What LRU and FIFO reuse, block by block and one request at a time. Owns: `lru`, `fifo`.

Rules: to be read beside the clairvoyant bound and beside published simulators, not instead of a replay: no
queue, no pins, no concurrency. LRU: all units of a request are equally recent; the deepest goes first, so a
prefix never loses its root; the request itself goes last. FIFO: units leave in the order in which they came,
whatever hangs below them, so a prefix loses its root first and the rest is held for nothing (the rule of
the public simulator that we compare with; the engine's `fifo` evicts leaves and does better).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from hotprefix.lab.bound.paths import Bound, Paths, Units

Pieces = list[tuple[int, int, int]]


def lru(paths: Paths, capacity: int) -> Bound:
    """capacity: units, >= 1."""
    cache = _Recent(capacity)
    last_use = np.full(paths.ids, -1, dtype=np.int32)
    hits = []
    for request, units in enumerate(paths.units):
        pieces = _pieces(last_use[units])
        last_use[units] = request
        hits.append(min(cache.use(pieces, len(units)), int(paths.counted[request])))
    return paths.bound(capacity, hits)


def _pieces(last_use: Units) -> Pieces:
    """(an earlier request, first, stop): the positions of a path that it was the last to use, root first."""
    starts = [0, *(np.flatnonzero(last_use[1:] != last_use[:-1]) + 1).tolist(), len(last_use)]
    pieces: Pieces = []
    for start, stop in pairwise(starts):
        if start == stop or last_use[start] < 0:
            break
        pieces.append((int(last_use[start]), start, stop))
    return pieces


class _Recent:
    """Of each request's path, what nobody used after it is one run: [stop - count, stop) is still there."""

    def __init__(self, capacity: int) -> None:
        self._room = capacity
        self._stop: list[int] = []
        self._count: list[int] = []
        self._oldest = 0

    def use(self, pieces: Pieces, length: int) -> int:
        """The next request; returns the length of the prefix it finds."""
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
    """capacity: units, >= 1."""
    came = np.full(
        paths.ids, -capacity, dtype=np.int64
    )  # a unit is there as long as it is of the last so many
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
    """Take in what is missing, root first; it may push out what follows. Units that came one after the other,
    or never, share one fate."""
    together = (order[1:] - order[:-1] == 1) | (order[1:] == order[:-1])
    starts = [0, *(np.flatnonzero(~together) + 1).tolist(), len(units)]
    for start, stop in pairwise(starts):
        if start < stop and order[start] <= total - capacity:
            came[units[start:stop]] = np.arange(total + 1, total + 1 + stop - start)
            total += stop - start
    return total
