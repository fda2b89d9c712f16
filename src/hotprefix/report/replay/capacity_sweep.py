"""Over all conditions. Owns: the capacity sweep with the clairvoyant bound, and the buckets.

Rules: a sweep is drawn if at least two conditions differ in capacity. The bound is the most tokens that any
policy could have reused for the same requests, so an arm's share of it is at most 1.
"""

from __future__ import annotations

from typing import Any

import polars as pl
from markupsafe import Markup

from hotprefix.lab.experiment.result import ExperimentResult
from hotprefix.report.replay import charts
from hotprefix.report.replay.conditions import colors_of
from hotprefix.report.replay.lookup import Lookup
from hotprefix.report.replay.words import title, value

_BOUND = "clairvoyant"
_SWEPT = (("reuse_share", "Reused prompt tokens", "share"), ("ttft_p95_s", "TTFT p95, s", "seconds"))
_FIGURES = (
    "requests", "queue_wait_mean_s", "net_l1_hit_loss_share", "reuse_share", "ttft_p50_s", "ttft_p95_s",
    "ttft_p99_s", "slo_share",
)  # fmt: skip


def capacity_charts(result: ExperimentResult, lookup: Lookup) -> list[dict[str, Any]]:
    """Reuse, TTFT and the share of the bound, by capacity."""
    places = sorted((c.capacity_tokens, c.name) for c in result.conditions if c.capacity_tokens is not None)
    if len({capacity for capacity, _ in places}) < 2:
        return []
    xs = [float(capacity) for capacity, _ in places]
    found = []
    for metric, name, unit in _SWEPT:
        series: dict[str, Any] = {
            arm.name: (xs, [lookup.figure(place, arm.name, metric).value for _, place in places])
            for arm in result.arms
        }
        if metric == "reuse_share" and result.bounds:
            bounds = sorted((b.capacity_tokens, b.clairvoyant_tokens / b.total_tokens) for b in result.bounds)
            series[_BOUND] = ([float(x) for x, _ in bounds], [y for _, y in bounds])
        found.append(_panel(result, f"sweep {metric}", name, series, unit))
    if result.bounds:
        order = sorted(result.bounds, key=lambda b: b.capacity_tokens)
        shares = {
            arm.name: (
                [float(b.capacity_tokens) for b in order],
                [_share(b.reused_tokens.get(arm.name), b.clairvoyant_tokens) for b in order],
            )
            for arm in result.arms
        }
        found.append(_panel(result, "sweep bound", "Share of the clairvoyant bound", shares, "share"))
    return found


def _panel(
    result: ExperimentResult, key: str, name: str, series: dict[str, Any], unit: str
) -> dict[str, Any]:
    drawn = charts.lines(
        key, series, unit, colors=colors_of(result), x="L1 of one instance, tokens", log_x=True, points=True,
        dashed=_BOUND,
    )  # fmt: skip
    return {"title": name, "svg": Markup(drawn)}


def _share(reused: float | None, of: float) -> float | None:
    return None if reused is None or not of else reused / of


def bound_table(result: ExperimentResult) -> dict[str, Any]:
    """The bound of each condition, and how much of it the arms reached."""
    arms = [arm.name for arm in result.arms]
    rows = []
    for one in result.bounds:
        shares = [_share(one.reused_tokens.get(arm), one.clairvoyant_tokens) for arm in arms]
        bound = one.clairvoyant_tokens / one.total_tokens if one.total_tokens else None
        cells = [value("reuse_share", share) for share in (bound, *shares)]
        rows.append([one.condition, f"{one.capacity_tokens:,}", *cells])
    return {
        "heads": ["condition", "capacity", "bound: reused", *(f"{arm}: of bound" for arm in arms)],
        "rows": rows,
    }


def bucket_tables(result: ExperimentResult) -> list[dict[str, Any]]:
    """One table for each kind of bucket and condition. Each bucket has a row for each arm."""
    found = []
    kinds = result.buckets.select("condition", "by").unique(maintain_order=True).rows()
    for condition, by in kinds:
        part = result.buckets.filter(pl.col("condition") == condition, pl.col("by") == by).sort(
            "order", maintain_order=True
        )
        if part["order"].n_unique() < 2:
            continue
        rows, before = [], None
        for row in part.iter_rows(named=True):
            cells = [value(metric, row[metric], beyond=bool(row["requests"])) if metric.endswith("_s")
                     else value(metric, row[metric]) for metric in _FIGURES]  # fmt: skip
            rows.append(
                {"first": row["bucket"] if row["bucket"] != before else "", "arm": row["arm"], "cells": cells}
            )
            before = row["bucket"]
        found.append(
            {"title": f"{condition}, by {by}", "heads": [by, "arm", *map(title, _FIGURES)], "rows": rows}
        )
    return found
