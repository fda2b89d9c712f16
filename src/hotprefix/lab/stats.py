"""How sure a difference is. Owns: `Comparison`, its interval, and the comparison of two arms.

Rules (docs/decisions/0012-verdicts.md, 0018-intervals.md):
1. The unit of the sample is never a request but a *section* (lab.paired_sections): a run of whole sessions or
   arrival windows of one seed; or a whole seed, if there are SECTIONS seeds or more. Arm and baseline are
   paired: the same sessions of the same seed, section by section.
2. The point estimate is the mean over seeds of each whole replay's figure; `lab.interval` says how far off it
   may be. If there is nothing from which to take an interval there is none, and the reason is given.
3. A figure that one of the two replays does not model (`Run.models`), or that both model without the very
   thing in which they differ, is not measured: it is None, and no claim rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from hotprefix.definitions import Slo
from hotprefix.errors import InputError
from hotprefix.lab.basis import not_measured
from hotprefix.lab.interval import Interval, Paired, difference, fewest, ratio
from hotprefix.lab.metric_names import METRICS, Metric
from hotprefix.lab.paired_sections import Pair, Run, figures, section_figures
from hotprefix.lab.replay_metrics import beyond_horizon

SECTIONS: Final = 8
_UNEVEN: Final = 0.01  # finished shares that differ by less differ by a request or two at the replay's end

Scale = Literal["difference", "relative"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric, arm against baseline.

    metric: its name.
    base, arm: means over seeds; None if a seed has no figure.
    sections: (base, arm) of each section, on the scale of the whole.
    beyond: which figure lies beyond the replay's end: "", "base", "arm" or "both".
    reason: why there is no interval; empty if there is one.
    finished: the shares of requests that finished, (base, arm), if the metric does not count the others in
    full; else None.
    seeds: how many seeds the figures are of.
    not_measured: why the replays do not measure this difference; empty if they do.
    """

    metric: str
    base: float | None
    arm: float | None
    sections: tuple[tuple[float, float], ...] = ()
    beyond: str = ""
    reason: str = ""
    finished: tuple[float, float] | None = None
    seeds: int = 0
    not_measured: str = ""

    def value(self, scale: Scale) -> float | None:
        """arm - base, or that as a share of |base|. None if a figure is missing, or for a share if base is
        0."""
        if self.base is None or self.arm is None:
            return None
        if scale == "difference":
            return self.arm - self.base
        return (self.arm - self.base) / abs(self.base) if self.base else None

    @property
    def flattered(self) -> Literal["", "base", "arm"]:
        """The side whose figure may look better than it is, because it finished fewer requests and the metric
        does not count the others in full; "" if the finished shares differ by at most 0.01."""
        base, arm = self.finished or (0.0, 0.0)
        if abs(arm - base) <= _UNEVEN:
            return ""
        return "arm" if arm < base else "base"

    def interval(self, confidence: float = 0.95, scale: Scale = "difference") -> Interval | None:
        """The interval of the change; None for a reason that `why_none` gives.

        scale: `relative` = as shares of |base|; the upper end may be infinity then. Both scales agree on
        whether 0 is in the interval.
        If every section gives the same change, and there are so many that this cannot be chance, the interval
        is that value, twice.
        """
        if self.reason or self.base is None or self.arm is None or not (scale == "difference" or self.base):
            return None
        pair = Paired(self.base, self.arm, np.array(self.sections))
        if scale == "difference":
            found = difference(pair, confidence)
        else:
            low, high = ratio(pair, confidence, signed=METRICS[self.metric].signed)
            found = (low - 1, high - 1) if self.base > 0 else (1 - high, 1 - low)
        if all(map(math.isinf, found)):
            return None
        if math.isclose(*found, rel_tol=1e-9, abs_tol=1e-12):
            return found if len(self.sections) >= fewest(confidence) else None
        return found

    def why_none(self, confidence: float = 0.95) -> str:
        """Why `interval` is None on either scale."""
        if self.reason:
            return self.reason
        if not self.base:
            return "the baseline is 0"
        if self.interval(confidence) is not None:
            return f"the baseline itself may be 0 at {confidence * 100:.4g} %"
        return f"{len(self.sections)} equal sections may be chance; {fewest(confidence)} would not"


def compare(
    base: Sequence[Run], arm: Sequence[Run], *, slo: Slo, window_s: float = 30.0
) -> dict[str, Comparison]:
    """Every metric, arm against baseline. Raises InputError if the seeds differ.

    base, arm: runs of the same seeds, with the same workload for a seed.
    window_s: length of a cluster of requests without a session.
    """
    pairs = _paired(base, arm)
    whole = [(figures(b, slo), figures(a, slo)) for b, a in pairs]
    cut = whole
    if len(pairs) < SECTIONS:
        parts = -(-SECTIONS // len(pairs))
        cut = [
            section for b, a in pairs for section in section_figures(b, a, parts, slo=slo, window_s=window_s)
        ]
    found = {name: _comparison(name, whole, cut) for name in METRICS}
    return {name: _measured(one, *pairs[0], slo) for name, one in found.items()}


def _measured(found: Comparison, base: Run, arm: Run, slo: Slo) -> Comparison:
    """The comparison; without figures if the replays do not measure it."""
    why = not_measured(found.metric, base.models, arm.models, slo)
    return replace(found, not_measured=why, reason=f"not measured: {why}") if why else found


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
    found = Comparison(
        name, base, arm, known, beyond, finished=_finished(METRICS[name], whole), seeds=len(whole)
    )
    reason = _why_none(found, len(pairs), any(beyond_horizon(name, f) for pair in cut for f in pair))
    return replace(found, reason=reason)


def _finished(metric: Metric, whole: Sequence[Pair]) -> tuple[float, float] | None:
    share = f"{metric.group}.finished_share".removeprefix(".")
    base, arm = (_mean([pair[side][share] for pair in whole]) for side in (0, 1))
    return None if metric.counts_all or base is None or arm is None else (base, arm)


def _why_none(found: Comparison, sections: int, far: bool) -> str:
    """Why no interval can be given; empty if one can."""
    if found.beyond:
        return "falls among requests that were not served by the replay's end"
    if found.base is None or found.arm is None:
        return "not measured"
    if METRICS[found.metric].extreme:
        return "an extreme value: one request or window decides it"
    if far:
        return "falls among requests that were not served, in some sections"
    if len(found.sections) < max(2, sections / 2):
        return f"measured in {len(found.sections)} of {sections} sections; {SECTIONS} seeds would do"
    return ""


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
