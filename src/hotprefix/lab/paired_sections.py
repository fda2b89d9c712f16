"""Paired pieces of two replays. Owns: `Run`, and how arm and baseline are cut into sections.

Rules:
1. A cluster is a session. Requests without a session are a cluster if they arrive within the same window. A
   cluster is never split.
2. A section is a run of neighbouring clusters, by their first arrival in the baseline, so that requests that
   depend on each other in time stay together. Sections have about equally many requests.
3. Windows are cut into as many equal stretches of each replay's own time. Links are counted per replay and
   not cut.
4. What a replay does not model (lab.basis), and figures of a group without requests, are None, for the whole
   and for every section: no 0 stands for what was not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from hotprefix.definitions import GROUPS, Slo
from hotprefix.lab.basis import Models, absent, empty_group
from hotprefix.lab.metric_names import METRICS
from hotprefix.lab.replay_metrics import last_moment, metrics, offered_span
from hotprefix.lab.table_math import Figures


@dataclass(frozen=True, slots=True)
class Run:
    """One replay.

    seed: its seed.
    requests, windows, links: tables with the columns of lab.sim.rows.
    page_tokens: tokens of a page.
    end_s: when it ended; None = the latest time in the tables.
    models: what it models; None = everything.
    """

    seed: int
    requests: pl.DataFrame
    windows: pl.DataFrame
    links: pl.DataFrame
    page_tokens: int
    end_s: float | None = None
    models: Models | None = None


Pair = tuple[Figures, Figures]


def figures(run: Run, slo: Slo) -> Figures:
    """The metrics of a whole replay."""
    found = metrics(
        run.requests, run.windows, run.links, slo=slo, page_tokens=run.page_tokens, end_s=run.end_s
    )
    return without(found, unmeasured(run, found))


def unmeasured(run: Run, whole: Figures) -> frozenset[str]:
    """The metrics of which a replay has no figure. whole: all its metrics."""
    empty = frozenset(group for group in GROUPS if not whole[f"{group}.requests"])
    return frozenset(name for name in whole if absent(name, run.models) or empty_group(name, empty))


def without(found: Figures, missing: frozenset[str]) -> Figures:
    """The figures, with None for those in `missing`."""
    return {name: None if name in missing else value for name, value in found.items()}


def section_figures(base: Run, arm: Run, parts: int, *, slo: Slo, window_s: float) -> list[Pair]:
    """(baseline's metrics, arm's metrics) of each section; at most `parts` sections. Figures that add up are
    scaled to the whole, so that every figure of a section is an estimate of the whole's."""
    key = _clusters(base, arm, parts, window_s)
    cut = [list(_cut(run, key, window_s, slo)) for run in (base, arm)]
    return list(zip(*cut, strict=True))


def _cluster(window_s: float) -> pl.Expr:
    """The expression that names a request's cluster: its session, or its window of arrival. The two never
    share a name."""
    window = (pl.col("arrival_s") // window_s).cast(pl.Int64).cast(pl.String)
    return pl.coalesce("session:" + pl.col("session"), "window:" + window).alias("cluster")


def _clusters(base: Run, arm: Run, parts: int, window_s: float) -> pl.DataFrame:
    """A table with the columns cluster and section. Clusters that only the arm has, because it came further
    in a closed loop, stand last."""
    both = [
        run.requests.group_by(_cluster(window_s)).agg(first=pl.col("arrival_s").min(), n=pl.len())
        for run in (base, arm)
    ]
    more = both[1].join(both[0], on="cluster", how="anti")
    order = pl.concat([both[0].sort("first", "cluster"), more.sort("first", "cluster")])
    before = pl.col("n").cum_sum() - pl.col("n")
    placed = order.with_columns(section=(before * parts) // pl.col("n").sum())
    return placed.select("cluster", section=pl.col("section").rank("dense") - 1)


def _cut(run: Run, clusters: pl.DataFrame, window_s: float, slo: Slo) -> Iterator[Figures]:
    """The metrics of each section of one replay."""
    parts = clusters["section"].n_unique()
    requests = run.requests.with_columns(_cluster(window_s)).join(clusters, on="cluster", how="left")
    stretch = ((pl.col("start_s").rank("dense") - 1) * parts) // pl.col("start_s").n_unique()
    windows = run.windows.with_columns(section=stretch)
    span = offered_span(run.requests)
    whole = metrics(
        run.requests, run.windows, run.links, slo=slo, page_tokens=run.page_tokens, end_s=run.end_s
    )
    missing = unmeasured(run, whole)
    end = last_moment(run.requests, run.windows) if run.end_s is None else run.end_s
    for part in range(parts):
        found = metrics(
            requests.filter(pl.col("section") == part), windows.filter(pl.col("section") == part),
            run.links.clear(), slo=slo, page_tokens=run.page_tokens,
            span_s=None if span is None else span / parts, end_s=end,
        )  # fmt: skip
        yield {
            name: value * parts if value is not None and METRICS[name].additive else value
            for name, value in without(found, missing).items()
        }
