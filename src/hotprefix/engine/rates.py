"""Cached and uncached throughput. Owns: sums over the last seconds of numbers that only grow.

Rules (docs/terms.md): the rate of a window is what was added within it, divided by its length. Windows of 30
and 300 s always stand side by side. Time comes in as an argument. Sums are kept by the second, so a window's
edge is exact to a second and memory is bounded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOWS_S = (30, 300)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second in a window.

    cached: effective reuse.
    uncached: prompt tokens computed.
    """

    window_s: int
    cached_tps: float
    uncached_tps: float


class Rates:
    """Windowed rates of one engine."""

    def __init__(self) -> None:
        self._slots: deque[list[int]] = deque()
        self._seen = (0, 0)

    def note(self, now: float, cached: int, uncached: int) -> None:
        """The counters as they are now."""
        added = (cached - self._seen[0], uncached - self._seen[1])
        self._seen = (cached, uncached)
        if added == (0, 0):
            return
        second = int(now)
        if not self._slots or self._slots[-1][0] != second:
            self._slots.append([second, 0, 0])
        self._slots[-1][1] += added[0]
        self._slots[-1][2] += added[1]
        while self._slots[0][0] <= second - WINDOWS_S[-1]:
            self._slots.popleft()

    def throughput(self, now: float) -> tuple[Throughput, ...]:
        """One entry for each window that ends now."""
        found = []
        for window in WINDOWS_S:
            inside = [slot for slot in self._slots if slot[0] > int(now) - window]
            found.append(
                Throughput(window, sum(s[1] for s in inside) / window, sum(s[2] for s in inside) / window)
            )
        return tuple(found)
