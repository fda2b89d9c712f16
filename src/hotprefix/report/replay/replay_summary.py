"""`summary.json` and the flat tables of a replay. Owns: their schema.

Rules: JSON has null for what was not measured and for an end at infinity of an interval, never NaN or
infinity. Every figure is in the unit that its name says (lab.metric_names). CSV and Parquet hold the same
numbers as the report, unrounded.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import polars as pl

from hotprefix.lab.experiment.result import ExperimentResult
from hotprefix.lab.interval import METHOD, Interval
from hotprefix.lab.metric_names import METRICS
from hotprefix.lab.stats import Comparison
from hotprefix.lab.verdict import Verdict
from hotprefix.report.replay.fleet_tables import copied_by_reason
from hotprefix.report.replay.lookup import CONFIDENCE, Lookup

SCHEMA = 2


def summary(result: ExperimentResult) -> dict[str, Any]:
    """conditions -> arms -> metrics (means over seeds) and changes against the baseline; hypotheses with
    verdict and intervals."""
    lookup = Lookup(result)
    plain = ("name", "question", "spec_hash", "version", "command", "baseline", "fixed")
    return {
        "schema_version": SCHEMA,
        **{name: getattr(result, name) for name in plain},
        "seeds": list(result.seeds),
        "slo": dataclasses.asdict(result.slo),
        "interval_method": METHOD,
        "looks": [dataclasses.asdict(look) for look in result.looks],
        "hypotheses": [_hypothesis(verdict) for verdict in result.verdicts],
        "conditions": {
            condition.name: {
                "about": condition.about,
                "settings": dict(condition.settings),
                "capacity_tokens": condition.capacity_tokens,
                "arms": {
                    arm.name: _arm(result, lookup, condition.name, arm.name)
                    for arm in result.arms
                    if lookup.ran(condition.name, arm.name)
                },
            }
            for condition in result.conditions
        },
        "arms": {arm.name: {"about": arm.about, "settings": dict(arm.settings)} for arm in result.arms},
        "bounds": [dataclasses.asdict(one) for one in result.bounds],
        "trace": dataclasses.asdict(result.trace),
        "cost": dataclasses.asdict(result.cost),
        "problems": [dataclasses.asdict(one) for one in result.problems],
    }


def _arm(result: ExperimentResult, lookup: Lookup, condition: str, arm: str) -> dict[str, Any]:
    figures = {name: lookup.figure(condition, arm, name) for name in METRICS}
    pair = result.comparisons.get((condition, arm), {})
    return {
        "metrics": {name: figure.value for name, figure in figures.items()},
        "beyond_end": [name for name, figure in figures.items() if figure.beyond],
        "not_measured": [name for name, figure in figures.items() if figure.not_measured],
        "copied_by_reason": copied_by_reason(result.fleets.get((condition, arm), ())),
        "changes": {name: _change(one) for name, one in pair.items() if one.value("difference") is not None},
    }


def _change(found: Comparison) -> dict[str, Any]:
    interval, relative = (found.interval(CONFIDENCE, scale) for scale in ("difference", "relative"))
    return {
        "difference": found.value("difference"),
        "interval": _ends(interval),
        "relative": found.value("relative"),
        "relative_interval": _ends(relative),
        "sections": len(found.sections),
        "reason": found.reason,
    }


def _ends(interval: Interval | None) -> list[float | None] | None:
    """The ends of an interval; null for an end at infinity."""
    return None if interval is None else [None if math.isinf(end) else end for end in interval]


def _hypothesis(verdict: Verdict) -> dict[str, Any]:
    one = verdict.hypothesis
    plain = ("id", "claim", "why", "arm", "baseline", "condition", "confidence")
    return {
        **{name: getattr(one, name) for name in plain},
        "kind": str(one.kind),
        "verdict": str(verdict.outcome),
        "reason": verdict.reason,
        "interval_confidence": verdict.level,
        "seeds": verdict.seeds,
        "seeds_that_would_decide": verdict.would_decide,
        "findings": [
            {
                "want": found.want,
                "metric": found.tolerance.metric,
                "amount": found.tolerance.amount,
                "scale": found.tolerance.scale,
                "state": str(found.state),
                "baseline": found.base,
                "arm": found.arm,
                "change": found.value,
                "interval": _ends(found.interval),
                "sections": found.sections,
                "rests_on": found.rests_on,
            }
            for found in verdict.findings
        ],
    }


def tables(result: ExperimentResult) -> dict[str, pl.DataFrame]:
    """Name -> table, for CSV and Parquet."""
    return {
        "metrics": result.metrics,
        "comparisons": _comparisons(result),
        "verdicts": _verdicts(result),
        "buckets": result.buckets,
        "windows": result.windows,
    }


def _comparisons(result: ExperimentResult) -> pl.DataFrame:
    text = ("condition", "arm", "baseline", "metric", "reason")
    numbers = ("base", "value", "difference", "low", "high", "relative")
    rows = []
    for (condition, arm), pair in result.comparisons.items():
        for name, one in pair.items():
            low, high = one.interval(CONFIDENCE) or (None, None)
            rows.append({
                "condition": condition, "arm": arm, "baseline": result.baseline, "metric": name,
                "base": one.base, "value": one.arm, "difference": one.value("difference"), "low": low,
                "high": high, "relative": one.value("relative"), "sections": len(one.sections),
                "reason": one.reason,
            })  # fmt: skip
    schema = {
        **dict.fromkeys(text[:4], pl.String), **dict.fromkeys(numbers, pl.Float64), "sections": pl.Int64,
        "reason": pl.String,
    }  # fmt: skip
    return pl.DataFrame(rows, schema=schema)


def _verdicts(result: ExperimentResult) -> pl.DataFrame:
    text = ("id", "claim", "kind", "arm", "baseline", "condition", "verdict", "reason")
    return pl.DataFrame(
        [{name: one[name] for name in text} for one in map(_hypothesis, result.verdicts)],
        schema=dict.fromkeys(text, pl.String),
    )
