"""How far predictions are off. Owns: `Ratio`, what corrects one worker's predictions, and `Errors`, what is
told of them.

Rules:
1. A worker's queue and compute are corrected apart, by the median of observed by predicted over the last
   observations. A median, because one stall must not count; each at most by `MOST`.
2. Predictions below a millisecond teach nothing: their ratios are noise.
3. Compute is learnt from requests that fill at least half of their steps. The step of one token lasts as long
   as the 8,000 tokens of others in it, and that says nothing about the worker's prices.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Final

MOST: Final = 8.0
LEAST_S: Final = 0.001
BOUNDS: Final = tuple(round(0.001 * 10 ** (step / 5), 6) for step in range(26))
"""Upper ends of the histogram's buckets: absolute errors in seconds, five to a decade, 1 ms to 100 s."""


class Ratio:
    """The median of observed / predicted over the last `window` observations; 1 without any."""

    __slots__ = ("_last", "_sorted", "_window", "value")

    def __init__(self, window: int) -> None:
        self._window = window
        self._last: deque[float] = deque()
        self._sorted: list[float] = []
        self.value = 1.0

    def learn(self, observed: float, predicted: float) -> None:
        """predicted: without this correction."""
        if observed < LEAST_S or predicted < LEAST_S:
            return
        ratio = min(max(observed / predicted, 1 / MOST), MOST)
        self._last.append(ratio)
        insort(self._sorted, ratio)
        if len(self._last) > self._window:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]
        n = len(self._sorted)
        self.value = (self._sorted[(n - 1) // 2] + self._sorted[n // 2]) / 2


class Errors:
    """Predicted against observed seconds to the first token.

    count: observations. histogram: absolute errors by bucket, the last without an upper end (BOUNDS).
    """

    __slots__ = ("_sum", "count", "histogram")

    def __init__(self) -> None:
        self.count = 0
        self.histogram = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def add(self, predicted: float, observed: float) -> None:
        """One request had its first token."""
        self.count += 1
        self._sum += predicted - observed
        self.histogram[bisect_left(BOUNDS, abs(predicted - observed))] += 1

    @property
    def bias(self) -> float | None:
        """Mean of predicted - observed; None without observations."""
        return self._sum / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The upper end of the bucket that holds this quantile of the absolute errors: at most 1.6 times the
        quantile itself. None without observations; beyond the last bucket infinity."""
        if not self.count:
            return None
        rank, seen = share * self.count, 0
        for bound, count in zip(BOUNDS, self.histogram, strict=False):
            seen += count
            if seen >= rank:
                return bound
        return float("inf")
