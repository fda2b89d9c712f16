"""From finished replays to what they say. Owns: `assess`, the one way from runs to figures and verdicts.

Rules:
1. An arm is compared with a baseline over the seeds that both have. A seed that one lacks, because its run
   failed, is left out of that comparison only.
2. A claim is judged at the first look that decides it.
3. A bucket's figures are means over the seeds that have the bucket, and null if one of these has null.
4. Only the window tables of the first seed are kept; they are for looking at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl

from hotprefix.definitions import Slo
from hotprefix.lab.buckets import BUCKET_COLUMNS, FIGURES, buckets
from hotprefix.lab.experiment.looks import Look
from hotprefix.lab.experiment.result import METRIC_ROWS
from hotprefix.lab.hypothesis import Hypothesis
from hotprefix.lab.paired_sections import Run, figures
from hotprefix.lab.power import seeds_to_decide
from hotprefix.lab.sim.rows import WINDOW_COLUMNS
from hotprefix.lab.stats import Comparison, compare
from hotprefix.lab.table_math import Figures
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
    runs: Runs, hypotheses: Sequence[Hypothesis], *, baseline: str, slo: Slo, window_s: float = 30.0,
    looks: Sequence[Look] = (),
) -> Assessment:  # fmt: skip
    """Compare and judge finished runs.

    runs: those of each (condition, arm), one a seed.
    baseline: the arm with which the comparisons in tables are made; a hypothesis may name another.
    looks: the looks that were taken; empty = one look at everything.
    """
    compared = Compared(runs, slo, window_s)
    places = [place for place in runs if place[1] != baseline]
    pairs = {place: compared.pair(place[0], baseline, place[1]) for place in places}
    return Assessment(
        metrics=_metric_rows({place: compared.figures(place) for place in runs}),
        comparisons={place: pair for place, pair in pairs.items() if pair},
        verdicts=tuple(_planned(compared, judge(compared, one, looks)) for one in hypotheses),
        buckets=_bucket_rows(runs, slo),
        windows=_placed({place: some[0].windows for place, some in runs.items() if some}, WINDOW_COLUMNS),
    )


class Compared:
    """Runs and their comparisons, each made once."""

    def __init__(self, runs: Runs, slo: Slo, window_s: float) -> None:
        self._runs, self._slo, self._window_s = runs, slo, window_s
        self._figures: dict[Place, dict[int, Figures]] = {}
        self._pairs: dict[tuple[str, str, str, int | None], dict[str, Comparison]] = {}

    def figures(self, place: Place, seeds: int | None = None) -> dict[int, Figures]:
        """The metrics of a (condition, arm) by seed. seeds: only seeds 1 to that; None = all."""
        if place not in self._figures:
            self._figures[place] = {run.seed: figures(run, self._slo) for run in self._runs.get(place, ())}
        return {seed: one for seed, one in self._figures[place].items() if seeds is None or seed <= seeds}

    def pair(self, condition: str, base: str, arm: str, seeds: int | None = None) -> dict[str, Comparison]:
        """The comparison of two arms over the seeds that both have; empty if there are none."""
        key = (condition, base, arm, seeds)
        if key not in self._pairs:
            both = [self._runs.get((condition, name), ()) for name in (base, arm)]
            shared = set.intersection(*({run.seed for run in some} for some in both))
            shared = {seed for seed in shared if seeds is None or seed <= seeds}
            paired = [[run for run in some if run.seed in shared] for some in both]
            found = compare(*paired, slo=self._slo, window_s=self._window_s) if shared else {}
            self._pairs[key] = found
        return self._pairs[key]


def judge(compared: Compared, one: Hypothesis, looks: Sequence[Look] = ()) -> Verdict:
    """The verdict of the first look that settles the claim, else of the last one. Without looks it is that of
    all runs."""
    every: list[tuple[int | None, float]] = [(look.seeds, look.spend) for look in looks]
    for seeds, spend in every or [(None, 1.0)]:
        pair = compared.pair(one.condition, one.baseline, one.arm, seeds)
        base = compared.figures((one.condition, one.baseline), seeds)
        verdict = _verdict(one, pair, list(base.values()), spend)
        if verdict.settled:
            break
    return verdict


def _planned(compared: Compared, verdict: Verdict) -> Verdict:
    """The verdict, with about how many seeds would decide it."""
    one = verdict.hypothesis
    pair = compared.pair(one.condition, one.baseline, one.arm)
    return replace(verdict, would_decide=seeds_to_decide(verdict, pair))


def _verdict(
    one: Hypothesis, pair: Mapping[str, Comparison], base: Sequence[Figures], spend: float
) -> Verdict:
    if not pair:
        reason = f"there are no runs of {one.arm} and {one.baseline} in {one.condition} to compare"
        return Verdict(one, Outcome.INCONCLUSIVE, reason, (), one.level_of(spend))
    return decide(one, pair, base, spend=spend)


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
