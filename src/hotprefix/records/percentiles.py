"""Percentiles in bounded memory. Owns: `Sketch`, a histogram whose bins grow by a constant factor.

Rules:
1. A quantile is within 1 % of a value that has that rank. Count, mean, least and greatest are exact.
2. In quantiles values below 0.000001 count as zero.
3. There are at most a few thousand bins, however many values.
"""

from __future__ import annotations

import math
from collections import Counter

_GROWTH = 1.02
_LEAST = 1e-6


class Sketch:
    """A histogram of values >= 0."""

    def __init__(self) -> None:
        self._bins: Counter[int | None] = Counter()
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.most = 0.0

    def add(self, value: float) -> None:
        """Count a value. Raises ValueError if it is negative, which nothing measured here can be."""
        if value < 0:
            raise ValueError(f"{value} is negative")
        self._bins[math.floor(math.log(value / _LEAST, _GROWTH)) if value >= _LEAST else None] += 1
        self.count += 1
        self.total += value
        self.least, self.most = min(self.least, value), max(self.most, value)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The value at rank ceil(share * count), 0 < share <= 1; None if there is no value."""
        if not self.count:
            return None
        rank = max(1, math.ceil(share * self.count))
        seen = 0
        for at in sorted(self._bins, key=lambda b: -1 if b is None else b):
            seen += self._bins[at]
            if seen >= rank:
                middle = 0.0 if at is None else _LEAST * _GROWTH ** (at + 0.5)
                return min(max(middle, self.least), self.most)
        raise AssertionError("a rank beyond the count")
