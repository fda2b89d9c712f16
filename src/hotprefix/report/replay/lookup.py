"""One figure of a result. Owns: `Lookup`, from (condition, arm, metric) to its mean and its change.

Rules: a figure is the mean over seeds. If one seed has none, the figure is None, and `beyond` tells whether
it lies beyond the replay's end. If no seed has one, it was not measured. A change is against the baseline,
with its interval; it is *clear* if the interval excludes 0.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hotprefix.lab.experiment.result import ExperimentResult
from hotprefix.lab.interval import Interval
from hotprefix.lab.metric_names import METRICS
from hotprefix.lab.replay_metrics import beyond_horizon
from hotprefix.lab.stats import Comparison
from hotprefix.lab.table_math import Figures

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric of one arm under one condition.

    value: the mean over seeds.
    beyond: it lies beyond the replay's end.
    relative, interval: the change against the baseline, as shares of the baseline.
    reason: why there is no interval.
    tone: good | bad if the change is clear, otherwise "".
    sections: how many sections the interval rests on.
    not_measured: there is no value because nothing was measured, or there is no change for that reason.
    """

    metric: str
    value: float | None
    beyond: bool = False
    relative: float | None = None
    interval: Interval | None = None
    reason: str = ""
    tone: str = ""
    sections: int = 0
    not_measured: bool = False


class Lookup:
    """Finds a result's figures. What was not measured is a Figure without a value."""

    def __init__(self, result: ExperimentResult) -> None:
        self._result = result
        self._seeds: dict[tuple[str, str], dict[int, Figures]] = defaultdict(lambda: defaultdict(dict))
        for condition, arm, seed, metric, value in result.metrics.iter_rows():
            self._seeds[condition, arm][seed][metric] = value

    def ran(self, condition: str, arm: str) -> bool:
        return (condition, arm) in self._seeds

    def figure(self, condition: str, arm: str, metric: str) -> Figure:
        seeds = list(self._seeds.get((condition, arm), {}).values())
        values = [figures.get(metric) for figures in seeds]
        known = [v for v in values if v is not None]
        mean = sum(known) / len(known) if known and len(known) == len(values) else None
        beyond = any(beyond_horizon(metric, figures) for figures in seeds)
        found = self._result.comparisons.get((condition, arm), {}).get(metric)
        blind = bool(values) and not known and not beyond
        if found is None:
            return Figure(metric, mean, beyond, not_measured=blind)
        blind = blind or bool(found.not_measured)
        relative = None if blind else found.value("relative")
        interval = found.interval(CONFIDENCE, "relative")
        return Figure(
            metric, mean, beyond, relative, interval, found.reason, _tone(found), len(found.sections), blind
        )


def _tone(found: Comparison) -> str:
    """Whether a clear change is for the better. Empty if the change is not clear, if neither direction is
    better, or if it favours the side that finished fewer requests."""
    interval, better = found.interval(CONFIDENCE), METRICS[found.metric].better
    if interval is None or better == "neither" or interval[0] <= 0 <= interval[1]:
        return ""
    good = (interval[0] > 0) is (better == "higher")
    if found.flattered == ("arm" if good else "base"):
        return ""
    return "good" if good else "bad"
