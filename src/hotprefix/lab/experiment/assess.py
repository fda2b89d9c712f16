"""From finished replays to what they say. Owns: `assess`, the one way from runs to figures and verdicts.

Rules: arms are compared with a baseline over the seeds both have; a seed that one lacks (its run failed) is
left out of that comparison only. Bucket figures are means over the seeds that have the bucket, null where one
of them is. The window tables kept are those of the first seed: they are for looking at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from hotprefix.lab.buckets import BUCKET_COLUMNS, FIGURES, buckets
from hotprefix.lab.experiment.result import METRIC_ROWS
from hotprefix.lab.figures import Figures
from hotprefix.lab.hypothesis import Hypothesis
from hotprefix.lab.metrics import Slo
from hotprefix.lab.sections import Run, figures
from hotprefix.lab.sim.rows import WINDOW_COLUMNS
from hotprefix.lab.stats import Comparison, compare
from hotprefix.lab.verdict import Outcome, Verdict, decide

Place = tuple[str, str]  # condition, arm
Runs = Mapping[Place, Sequence[Run]]
_PLACE = {"condition": pl.String, "arm": pl.String}


@dataclass(frozen=True, slots=True)
class Assessment:
    """The fields of `ExperimentResult` that follow from the runs."""

    metrics: pl.DataFrame
    comparisons: Mapping[Place, Mapping[str, Comparison]]
    verdicts: tuple[Verdict, ...]
    buckets: pl.DataFrame
    windows: pl.DataFrame


def assess(
    runs: Runs, hypotheses: Sequence[Hypothesis], *, baseline: str, slo: Slo, window_s: float = 30.0
) -> Assessment:
    """runs: of each (condition, arm), one a seed. baseline: the arm that comparisons shown in tables are made
    with; a hypothesis may name another."""
    found = {place: {run.seed: figures(run, slo) for run in some} for place, some in runs.items()}
    comparisons = {
        (condition, arm): _compare(runs, condition, baseline, arm, slo, window_s)
        for condition, arm in runs
        if arm != baseline
    }
    verdicts = []
    for one in hypotheses:
        place = (one.condition, one.arm)
        pair = (
            comparisons.get(place, {})
            if one.baseline == baseline
            else _compare(runs, one.condition, one.baseline, one.arm, slo, window_s)
        )
        base = found.get((one.condition, one.baseline), {})
        verdicts.append(_verdict(one, pair, list(base.values())))
    return Assessment(
        metrics=_metric_rows(found),
        comparisons={place: pair for place, pair in comparisons.items() if pair},
        verdicts=tuple(verdicts),
        buckets=_bucket_rows(runs, slo),
        windows=_placed({place: some[0].windows for place, some in runs.items() if some}, WINDOW_COLUMNS),
    )


def _compare(
    runs: Runs, condition: str, base: str, arm: str, slo: Slo, window_s: float
) -> dict[str, Comparison]:
    """Over the seeds that both have; empty where there are none."""
    both = [runs.get((condition, name), ()) for name in (base, arm)]
    seeds = set.intersection(*({run.seed for run in some} for some in both))
    if not seeds:
        return {}
    paired = [[run for run in some if run.seed in seeds] for some in both]
    return compare(*paired, slo=slo, window_s=window_s)


def _verdict(one: Hypothesis, pair: Mapping[str, Comparison], base: Sequence[Figures]) -> Verdict:
    if not pair:
        reason = f"there are no runs of {one.arm} and {one.baseline} in {one.condition} to compare"
        return Verdict(one, Outcome.INCONCLUSIVE, reason, (), one.level)
    return decide(one, pair, base)


def _metric_rows(found: Mapping[Place, Mapping[int, Figures]]) -> pl.DataFrame:
    rows = [
        (condition, arm, seed, name, value)
        for (condition, arm), seeds in found.items()
        for seed, values in seeds.items()
        for name, value in values.items()
    ]
    return pl.DataFrame(rows, schema=METRIC_ROWS, orient="row")


def _bucket_rows(runs: Runs, slo: Slo) -> pl.DataFrame:
    tables = {}
    for place, some in runs.items():
        every = pl.concat([pl.DataFrame(schema=BUCKET_COLUMNS), *(buckets(run, slo) for run in some)])
        tables[place] = every.group_by("by", "order", "bucket", maintain_order=True).agg(
            pl.when(pl.col(name).null_count() == 0).then(pl.col(name).mean()).alias(name) for name in FIGURES
        )
    return _placed(tables, BUCKET_COLUMNS)


def _placed(
    tables: Mapping[Place, pl.DataFrame], columns: Mapping[str, pl.DataType | type[pl.DataType]]
) -> pl.DataFrame:
    """The tables under one another, with condition and arm before their columns."""
    named = [
        table.select(pl.lit(condition).alias("condition"), pl.lit(arm).alias("arm"), *columns)
        for (condition, arm), table in tables.items()
    ]
    return pl.concat([pl.DataFrame(schema={**_PLACE, **columns}), *named])
