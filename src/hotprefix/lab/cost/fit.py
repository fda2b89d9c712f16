"""From timings to prices. Owns: the fit, and how far off it is on what it did not see.

Rules: non-negative least squares on relative errors (a step of 10 ms counts as much as one of 1 s), each
regime and each batch with equal weight however often it ran, outliers with less (Huber's weights, iterated;
Huber, Robust Estimation of a Location Parameter, 1964). The error is cross-validated over whole batches:
all repetitions of a batch are left out together, so the figure is for batches the fit has never seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from hotprefix.errors import InputError
from hotprefix.lab.cost.measure import Sample
from hotprefix.lab.cost.model import ErrorOf, FitError

Floats = NDArray[np.float64]
FOLDS = 5
HUBER = 1.345
MAD_TO_SIGMA = 1.4826
ROUNDS = 30


def step_prices(samples: Sequence[Sample]) -> Floats:
    """[base, prefill token, prefill context, decode, decode context], seconds, each >= 0."""
    return solve(step_matrix(samples), _seconds(samples), _balance(samples))


def scheduler_prices(samples: Sequence[Sample]) -> Floats:
    """[base, running, waiting], seconds, each >= 0."""
    rows = np.array([(1.0, s.running, s.waiting) for s in samples])
    return solve(rows, np.array([s.outside_s for s in samples]), np.ones(len(samples)))


def step_matrix(samples: Sequence[Sample]) -> Floats:
    """The model's terms of each sample, float64[n, 5]."""
    return np.array([(1, *s.features) for s in samples], dtype=np.float64)


def solve(rows: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Prices x >= 0 that make rows @ x close to seconds, relatively. rows [n, k], seconds [n] > 0, weights
    [n]. Raises InputError for timings that are not positive."""
    if not len(rows) or not np.all(np.isfinite(seconds)) or np.min(seconds) <= 0:
        raise InputError(f"{len(rows)} timings, all of which have to be above 0 s: nothing can be fitted")
    relative = rows / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    robust = np.ones(len(rows))
    prices = np.zeros(rows.shape[1])
    for _ in range(ROUNDS):
        root = np.sqrt(weights * robust)
        found = nnls(relative / scale * root[:, None], root)[0] / scale
        if np.allclose(found, prices, rtol=1e-6, atol=0.0):
            break
        prices = found
        off = np.abs(relative @ prices - 1.0)
        limit = HUBER * max(MAD_TO_SIGMA * float(np.median(off)), 1e-9)
        robust = np.minimum(1.0, limit / np.maximum(off, limit))
    return prices


def cross_validated(samples: Sequence[Sample], seed: int = 0) -> FitError:
    """The error of `step_prices` on left-out batches. Raises InputError for fewer than two batches."""
    names = sorted({s.point for s in samples})
    if len(names) < 2:
        raise InputError(f"{len(names)} batches were timed: a cross-validation needs at least 2")
    folds = min(FOLDS, len(names))
    order = np.random.default_rng(seed).permutation(len(names))
    fold_of = {names[at]: i % folds for i, at in enumerate(order)}
    folds_of = np.array([fold_of[s.point] for s in samples])
    rows, predicted = step_matrix(samples), np.zeros(len(samples))
    for fold in range(folds):
        left_out = folds_of == fold
        seen = [s for s, out in zip(samples, left_out, strict=True) if not out]
        predicted[left_out] = rows[left_out] @ step_prices(seen)
    return errors(samples, predicted, f"{folds}-fold cross-validation over {len(names)} batches")


def errors(samples: Sequence[Sample], predicted: Floats, method: str) -> FitError:
    """How far `predicted` is from the samples' seconds, whole and by regime."""
    seconds = _seconds(samples)
    off = np.abs(predicted / seconds - 1.0)
    regimes = np.array([s.features.regime for s in samples])

    def of(chosen: NDArray[np.bool_]) -> ErrorOf | None:
        if not chosen.any():
            return None
        median, p95 = np.percentile(off[chosen], (50, 95), method="linear")
        return ErrorOf(samples=int(chosen.sum()), median=float(median), p95=float(p95))

    overall = of(np.ones(len(samples), dtype=bool))
    assert overall is not None
    return FitError(
        method=method,
        overall=overall,
        prefill=of(regimes == "prefill"),
        decode=of(regimes == "decode"),
        mixed=of(regimes == "mixed"),
        bias=float((predicted.sum() - seconds.sum()) / seconds.sum()),
    )


def _seconds(samples: Sequence[Sample]) -> Floats:
    return np.array([s.seconds for s in samples], dtype=np.float64)


def _balance(samples: Sequence[Sample]) -> Floats:
    """Weights that give each regime the same sum, and each batch in a regime."""
    runs = Counter((s.features.regime, s.point) for s in samples)
    batches = Counter(regime for regime, _ in runs)
    return np.array([1.0 / (runs[s.features.regime, s.point] * batches[s.features.regime]) for s in samples])
