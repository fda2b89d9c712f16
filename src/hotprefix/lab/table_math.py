"""Small arithmetic of tables. Owns: sums, ratios, means and percentiles that are None if there is nothing.

Rules:
1. No figure is NaN or infinity.
2. Percentiles are by numpy's method "linear".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

PERCENTILE_METHOD: Final = "linear"

Figures = dict[str, float | None]
Floats = NDArray[np.float64]


def percentiles(measured: Floats, beyond: int, quantiles: Sequence[float]) -> list[float | None]:
    """Percentiles (0..100) of the measured values and of `beyond` further values that are greater than any of
    them. A percentile is None if it falls among the further ones, or if there is no value.

    Example: of the measured 1, 2, 3, 4 and one beyond, the median is 3 and the 90th percentile is None.
    """
    count = len(measured) + beyond
    if not len(measured):
        return [None] * len(quantiles)
    padded = np.concatenate([measured, np.full(beyond, measured.max())])
    found = np.percentile(padded, quantiles, method=PERCENTILE_METHOD)
    return [
        float(value) if math.ceil((count - 1) * q / 100) < len(measured) else None
        for q, value in zip(quantiles, found, strict=True)
    ]


def ratio(part: float | None, of: float | None) -> float | None:
    return None if part is None or not of else part / of


def mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def most(values: Floats) -> float | None:
    """The highest value that is not NaN; None if there is none."""
    known = values[~np.isnan(values)]
    return float(known.max()) if len(known) else None


def worst(values: Iterable[float | None]) -> float | None:
    """The highest value; None if there is none, or if one is None: it lies beyond the horizon, and nothing is
    worse than that."""
    every = list(values)
    known = [v for v in every if v is not None]
    return max(known) if known and len(known) == len(every) else None


def columns(table: pl.DataFrame, names: Iterable[str | pl.Expr]) -> dict[str, Floats]:
    """Columns of a table as arrays, with NaN for null. An expression is a column of its own name."""
    found = table.select(names).cast(pl.Float64).fill_null(float("nan"))
    return {name: found[name].to_numpy() for name in found.columns}
