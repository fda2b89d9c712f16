"""Small arithmetic of tables. Owns: sums, ratios, means and percentiles that say None where there is nothing.

Rules: never NaN or infinity. Percentiles by numpy's method "linear".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

PERCENTILE_METHOD: Final = "linear"

Figures = dict[str, float | None]


def percentile(measured: NDArray[np.float64], beyond: int, q: float) -> float | None:
    """The q-th percentile (0..100) of the measured values and `beyond` further ones that are greater than
    any; None where it falls among those, or there is nothing."""
    count = len(measured) + beyond
    if not count or math.ceil((count - 1) * q / 100) >= len(measured):
        return None
    padded = np.concatenate([measured, np.full(beyond, measured.max())])
    return float(np.percentile(padded, q, method=PERCENTILE_METHOD))


def ratio(part: float | None, of: float | None) -> float | None:
    return None if part is None or not of else part / of


def total(rows: pl.DataFrame, column: str) -> float:
    return float(rows[column].sum())


def mean(values: pl.Series) -> float | None:
    return float(values.to_numpy().mean()) if len(values) else None


def most(values: pl.Series) -> float | None:
    known = values.drop_nulls().to_numpy()
    return float(known.max()) if len(known) else None


def worst(values: Iterable[float | None]) -> float | None:
    """The highest; None if one lies beyond the horizon, for nothing is worse than that."""
    every = list(values)
    known = [v for v in every if v is not None]
    return max(known) if known and len(known) == len(every) else None
