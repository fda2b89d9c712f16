"""Small arithmetic of tables. Owns: sums, ratios, means and percentiles that say None where there is nothing.

Rules: never NaN or infinity. Percentiles by numpy's method "linear".
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
    """Percentiles (0..100) of the measured values and `beyond` further ones that are greater than any; None
    where one falls among those, or there is nothing."""
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
    """The highest that is known (not NaN)."""
    known = values[~np.isnan(values)]
    return float(known.max()) if len(known) else None


def worst(values: Iterable[float | None]) -> float | None:
    """The highest; None if one lies beyond the horizon, for nothing is worse than that."""
    every = list(values)
    known = [v for v in every if v is not None]
    return max(known) if known and len(known) == len(every) else None


def columns(table: pl.DataFrame, names: Iterable[str | pl.Expr]) -> dict[str, Floats]:
    """Columns as arrays; NaN for null. An expression is a column of its own name."""
    found = table.select(names).cast(pl.Float64).fill_null(float("nan"))
    return {name: found[name].to_numpy() for name in found.columns}
