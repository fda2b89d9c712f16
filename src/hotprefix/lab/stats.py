"""How sure a difference is. Owns: `Comparison`, its interval, and the comparison of two arms.

Rules (docs/decisions/0012-verdicts.md):
- What is drawn is never a request but a *section* (lab.sections): a run of whole sessions or arrival windows
  of one seed, or a whole seed where there are SECTIONS seeds or more.
- The point estimate is the mean over seeds of each whole replay's figure. Its interval is a studentised
  bootstrap over paired sections, symmetric (Hall 1988), never narrower than Student's t with sections - 1
  degrees of freedom; the spread is taken around the point estimate (sectioning, Asmussen and Glynn 2007), so
  that a bias of small sections widens the interval. Its random numbers have a fixed seed.
- No interval where there is nothing to draw it from; then the reason is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from hotprefix.errors import InputError
from hotprefix.lab.metric_names import METRICS, Metric
from hotprefix.lab.metrics import Slo, beyond_horizon
from hotprefix.lab.sections import Pair, Run, figures, section_figures

SECTIONS: Final = 8
METHOD: Final = (
    f"symmetric studentised bootstrap over at least {SECTIONS} paired sections, not narrower than Student's t"
)
_RESAMPLES: Final = 2000
_ROUNDING: Final = 1e-9
_FEWEST: Final = 4
_UNEVEN: Final = 0.01  # a difference of finished shares below it is a request or two at the replay's end
_SIGN_TEST: Final = 6  # as many equal signs have a two-sided p of 2 / 2**6 = 0.031

Interval = tuple[float, float]
Scale = Literal["difference", "relative"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric, arm against baseline. base, arm: means over seeds, None where a seed has no figure.
    sections: (base, arm) of each section, on the scale of the whole. beyond: whose figure lies beyond the
    replay's end ("", "base", "arm", "both"). reason: why there is no interval. finished: shares of requests
    that finished, (base, arm), where the metric does not count the others in full; else None."""

    metric: str
    base: float | None
    arm: float | None
    sections: tuple[tuple[float, float], ...] = ()
    beyond: str = ""
    reason: str = ""
    finished: tuple[float, float] | None = None

    def value(self, scale: Scale) -> float | None:
        """arm - base, or that as a share of |base|; None where a figure is missing, or base is 0."""
        if self.base is None or self.arm is None:
            return None
        if scale == "difference":
            return self.arm - self.base
        return (self.arm - self.base) / abs(self.base) if self.base else None

    @property
    def flattered(self) -> Literal["", "base", "arm"]:
        """Who finished fewer of its requests by more than one in a hundred, in a metric that does not count
        the others in full: its figure may look better than it is."""
        base, arm = self.finished or (0.0, 0.0)
        if abs(arm - base) <= _UNEVEN:
            return ""
        return "arm" if arm < base else "base"

    @property
    def constant(self) -> bool:
        """Each of _SIGN_TEST sections or more gives the whole's difference: there is no spread to draw an
        interval from, and no doubt either."""
        whole = self.value("difference")
        return (
            whole is not None
            and len(self.sections) >= _SIGN_TEST
            and all(math.isclose(a - b, whole, rel_tol=1e-9, abs_tol=1e-12) for b, a in self.sections)
        )

    def interval(self, confidence: float = 0.95, scale: Scale = "difference") -> Interval | None:
        """Of the difference; relative: the same interval as shares of |base|, so that both always agree on
        whether 0 is in it. None: see reason, or the baseline is 0."""
        centre = self.value("difference")
        unit = abs(self.base or 0.0) if scale == "relative" else 1.0
        if self.reason or centre is None or not unit:
            return None
        base, arm = np.array(self.sections).T
        reach = half_width(arm - base - centre, confidence)
        return (centre - reach) / unit, (centre + reach) / unit

    def bounds(self, confidence: float, scale: Scale) -> Interval | None:
        """What a verdict goes by: the interval, or the value itself, twice, where it is constant."""
        value = self.value(scale)
        return (value, value) if value is not None and self.constant else self.interval(confidence, scale)


def half_width(spread: NDArray[np.float64], confidence: float) -> float:
    """Of the interval. spread: each section's deviation from the point estimate, shape (sections,)."""
    count = len(spread)
    error = math.sqrt(float((spread**2).sum()) / (count - 1) / count)
    samples = spread[np.random.default_rng(0).integers(0, count, (_RESAMPLES, count))]
    errors = samples.std(axis=1, ddof=1) / math.sqrt(count)
    distances = np.abs(samples.mean(axis=1) - spread.mean())
    # A sample without spread (but for rounding) says nothing of how far off a mean is in units of its spread.
    vary = errors > _ROUNDING * float(np.abs(spread).max())
    scores = distances[vary] / errors[vary]
    drawn = float(np.quantile(scores, confidence)) if len(scores) else 0.0
    return error * max(drawn, float(stdtrit(count - 1, (1 + confidence) / 2)))


def compare(
    base: Sequence[Run], arm: Sequence[Run], *, slo: Slo, window_s: float = 30.0
) -> dict[str, Comparison]:
    """Every metric, arm against baseline. base, arm: the same seeds, the same workload for a seed. window_s:
    length of a cluster where requests have no session. Raises InputError where the seeds differ."""
    pairs = _paired(base, arm)
    whole = [(figures(b, slo), figures(a, slo)) for b, a in pairs]
    if len(pairs) >= SECTIONS:
        return {name: _comparison(name, whole, whole) for name in METRICS}
    parts = -(-SECTIONS // len(pairs))
    cut = [section for b, a in pairs for section in section_figures(b, a, parts, slo=slo, window_s=window_s)]
    return {name: _comparison(name, whole, cut) for name in METRICS}


def _paired(base: Sequence[Run], arm: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Runs of the same seed, in the order of seeds. Raises InputError."""
    ours = {run.seed: run for run in arm}
    if not base or ours.keys() != {run.seed for run in base}:
        raise InputError(
            f"the arm has seeds {sorted(ours)}, its baseline {sorted(r.seed for r in base)}: compare the "
            "same seeds, at least one"
        )
    return [(run, ours[run.seed]) for run in sorted(base, key=lambda r: r.seed)]


def _comparison(name: str, whole: Sequence[Pair], cut: Sequence[Pair]) -> Comparison:
    base, arm = (_mean([pair[side][name] for pair in whole]) for side in (0, 1))
    pairs = [(b[name], a[name]) for b, a in cut]
    known = tuple((b, a) for b, a in pairs if b is not None and a is not None)
    far = [any(beyond_horizon(name, pair[side]) for pair in whole) for side in (0, 1)]
    beyond = {(True, True): "both", (True, False): "base", (False, True): "arm"}.get((far[0], far[1]), "")
    found = Comparison(name, base, arm, known, beyond, finished=_finished(METRICS[name], whole))
    reason = _why_none(found, len(pairs), any(beyond_horizon(name, f) for pair in cut for f in pair))
    return replace(found, reason=reason)


def _finished(metric: Metric, whole: Sequence[Pair]) -> tuple[float, float] | None:
    share = f"{metric.group}.finished_share".removeprefix(".")
    base, arm = (_mean([pair[side][share] for pair in whole]) for side in (0, 1))
    return None if metric.counts_all or base is None or arm is None else (base, arm)


def _why_none(found: Comparison, sections: int, far: bool) -> str:
    """Why no interval can be given; empty where it can."""
    if found.beyond:
        return "falls among requests that were not served by the replay's end"
    if found.base is None or found.arm is None:
        return "not measured"
    if METRICS[found.metric].extreme:
        return "an extreme value: one request or window decides it"
    if far:
        return "falls among requests that were not served, in some sections"
    if len(found.sections) < max(_FEWEST, sections / 2):
        return f"measured in {len(found.sections)} of {sections} sections; {SECTIONS} seeds would do"
    differences = {a - b for b, a in found.sections}
    return "the same difference in every section" if len(differences) == 1 else ""


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
