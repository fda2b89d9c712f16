"""From timings to prices. Owns: the fit, and how far off it is on batches that it did not see.

Rules:
1. The fit is non-negative least squares on relative errors: a step of 10 ms counts as much as one of 1 s.
2. Each regime has the same weight, and so has each batch within it, however often it ran. Outliers have less
   (Huber's weights, iterated; Huber, Robust Estimation of a Location Parameter, 1964).
3. The error is cross-validated over whole batches: all repetitions of a batch are left out together, so the
   figure is for batches that the fit has never seen.
4. The same error decides whether the price of a position or of a decode changes with their number (`Form`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from hotprefix.cost.model import ErrorOf, FitError
from hotprefix.cost.prices import Curve
from hotprefix.errors import InputError
from hotprefix.lab.cost.measure_steps import Sample

Floats = NDArray[np.float64]
FOLDS = 5
HUBER = 1.345
MAD_TO_SIGMA = 1.4826
ROUNDS = 30
PREFILL_KNOTS = (32, 128, 512)
DECODE_KNOTS = (2, 4, 8, 16, 32)
CLEARLY = 0.9  # a form with more prices is taken only if its error is at most this share of the simpler one's


@dataclass(frozen=True, slots=True)
class Form:
    """At which numbers in one step the price changes: of a prefill position, and of a decode. Empty: it never
    changes.
    Example: decode (8,) means one price for the first 8 decodes and another for those beyond."""

    prefill: tuple[int, ...] = ()
    decode: tuple[int, ...] = ()

    def within(self, samples: Sequence[Sample]) -> Form:
        """The form without the changes that no sample reaches: the price beyond such a change would be fitted
        as 0."""
        prefill = max((s.features.prefill_tokens for s in samples), default=0)
        decodes = max((s.features.decodes for s in samples), default=0)
        return Form(
            tuple(after for after in self.prefill if after < prefill),
            tuple(after for after in self.decode if after < decodes),
        )


LINEAR = Form()
FORMS = (LINEAR, Form(decode=DECODE_KNOTS), Form(PREFILL_KNOTS, DECODE_KNOTS))


@dataclass(frozen=True, slots=True)
class StepPrices:
    """The prices of a form's terms.

    values: seconds, each >= 0, in the order of the columns of `step_matrix`: base; prefill positions, with
    one price more for each number in `form.prefill`; prefill context; decodes, with one price more for each
    number in `form.decode`; decode context.
    """

    form: Form
    values: Floats

    @property
    def base_s(self) -> float:
        return float(self.values[0])

    @property
    def prefill(self) -> Curve:
        return _priced(self.form.prefill, self.values[1:])

    @property
    def prefill_context_s(self) -> float:
        return float(self.values[2 + len(self.form.prefill)])

    @property
    def decode(self) -> Curve:
        return _priced(self.form.decode, self.values[3 + len(self.form.prefill) :])

    @property
    def decode_context_s(self) -> float:
        return float(self.values[-1])

    def predict(self, samples: Sequence[Sample]) -> Floats:
        """Seconds of each sample's step."""
        return step_matrix(samples, self.form) @ self.values


def _priced(knots: tuple[int, ...], values: Floats) -> Curve:
    return tuple((after, float(each)) for after, each in zip((0, *knots), values, strict=False))


def step_prices(samples: Sequence[Sample], form: Form = LINEAR) -> StepPrices:
    """The price of each term of a form. Raises InputError for timings that are not positive."""
    form = form.within(samples)
    return StepPrices(form, solve(step_matrix(samples, form), _seconds(samples), _balance(samples)))


def best_form(samples: Sequence[Sample], seed: int = 0) -> Form:
    """The form with the smallest mean error on left-out batches; a form with more prices must be better by
    the factor CLEARLY. Raises InputError for fewer than two batches."""
    best, least = LINEAR, _left_out_error(samples, LINEAR, seed)
    for form in FORMS[1:]:
        error = _left_out_error(samples, form, seed)
        if error < CLEARLY * least:
            best, least = form, error
    return best


def scheduler_prices(samples: Sequence[Sample]) -> Floats:
    """The prices [base, running, waiting, prefix touched by refresh] of a step outside its forward pass;
    seconds, each >= 0. Steps with as many waiting requests, refresh on and off, tell the last two apart."""
    rows = np.array([(1.0, s.running, s.waiting, s.touched) for s in samples])
    return solve(rows, np.array([s.outside_s for s in samples]), np.ones(len(samples)))


def step_matrix(samples: Sequence[Sample], form: Form = LINEAR) -> Floats:
    """The form's terms for each sample, float64[n, 5 + the form's changes of price]."""
    rows = [
        (
            1, *_parts(form.prefill, s.features.prefill_tokens), s.features.prefill_context,
            *_parts(form.decode, s.features.decodes), s.features.decode_context,
        )
        for s in samples
    ]  # fmt: skip
    return np.array(rows, dtype=np.float64)


def _parts(knots: tuple[int, ...], count: int) -> list[int]:
    """How many of `count` have each price. Example: knots (8,) divide 10 into [8, 2]."""
    borders = (0, *knots, count)
    return [max(0, min(count, high) - low) for low, high in pairwise(borders)]


def solve(rows: Floats, seconds: Floats, weights: Floats) -> Floats:
    """The prices x >= 0 for which rows @ x has the smallest weighted relative errors against `seconds`. rows:
    [n, k].
    seconds, weights: [n]. Raises InputError for timings that are not positive."""
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


def cross_validated(samples: Sequence[Sample], form: Form = LINEAR, seed: int = 0) -> FitError:
    """The error of `step_prices` on left-out batches. Raises InputError for fewer than two batches."""
    predicted, sums, batches = _left_out(samples, form, seed)
    found = errors(samples, predicted, f"{len(sums)}-fold cross-validation over {batches} batches")
    spread = float(np.sqrt((len(sums) - 1) * np.var(sums)) / _seconds(samples).sum())
    return found.model_copy(update={"uncertainty": spread})


def _left_out_error(samples: Sequence[Sample], form: Form, seed: int) -> float:
    """Mean absolute relative error on left-out batches, each batch and regime with equal weight."""
    predicted, _, _ = _left_out(samples, form, seed)
    return float(np.average(np.abs(predicted / _seconds(samples) - 1.0), weights=_balance(samples)))


def _left_out(samples: Sequence[Sample], form: Form, seed: int) -> tuple[Floats, list[float], int]:
    """Three results: each sample's seconds as predicted by a fit that did not see its batch; for each of
    these fits, the sum of the predicted seconds of all samples; the number of batches."""
    names = sorted({s.point for s in samples})
    if len(names) < 2:
        raise InputError(f"{len(names)} batches were timed: a cross-validation needs at least 2")
    folds = min(FOLDS, len(names))
    order = np.random.default_rng(seed).permutation(len(names))
    fold_of = {names[at]: i % folds for i, at in enumerate(order)}
    folds_of = np.array([fold_of[s.point] for s in samples])
    predicted, sums = np.zeros(len(samples)), []
    for fold in range(folds):
        left_out = folds_of == fold
        seen = [s for s, out in zip(samples, left_out, strict=True) if not out]
        every = step_prices(seen, form).predict(samples)
        predicted[left_out] = every[left_out]
        sums.append(float(every.sum()))
    return predicted, sums, len(names)


def errors(samples: Sequence[Sample], predicted: Floats, method: str) -> FitError:
    """How far `predicted` is from the samples' seconds, overall and by regime."""
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
    """Weights with the same sum for each regime and, within a regime, for each batch."""
    runs = Counter((s.features.regime, s.point) for s in samples)
    batches = Counter(regime for regime, _ in runs)
    return np.array([1.0 / (runs[s.features.regime, s.point] * batches[s.features.regime]) for s in samples])
