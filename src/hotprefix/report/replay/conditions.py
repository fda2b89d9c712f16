"""What happened, condition by condition. Owns: the tables and charts of the request chain, groups, resources,
cluster and time.

Rules: tables have arms as rows, and their columns follow the order of a request's life. A cell is the mean
over seeds and, in small type, the change against the baseline with its 95 % interval. Columns that are empty
or zero in every arm are left out. Time charts show the first seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
from markupsafe import Markup

from hotprefix.lab.experiment.result import Condition, ExperimentResult
from hotprefix.lab.metric_names import LINKS
from hotprefix.report.replay import charts
from hotprefix.report.replay.lookup import Figure, Lookup
from hotprefix.report.replay.words import change, title, value

CHAIN = (
    "requests", "queue_wait_mean_s", "enqueue_hit_tokens", "admission_hit_tokens", "net_l1_hit_loss_share",
    "retained_share", "regained_share", "restored_l2_share", "restored_l3_share", "recomputed_share",
    "cached_l1_share", "cached_l2_share", "cached_l3_share", "reuse_share", "computed_per_request",
    "ttft_mean_s", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s",
)  # fmt: skip
SERVICE = (
    "finished_share", "unfinished", "rejected", "slo_share", "goodput_rps", "tpot_p95_s", "completion_p95_s",
    "timeout_share", "cold.timeout_share", "oldest_wait_s", "worst_group_ttft_p95_s",
)  # fmt: skip
RESOURCES = (
    "prefill_busy_share", "decode_busy_share", "scheduler_share", "refresh_touches", "evicted_tokens",
    "stalls", "retractions", "rework_tokens", "duplication_factor", "reuse_of_ideal",
)  # fmt: skip
CLUSTER = (
    "cached_tps", "cached_tps_window_p50", "cached_tps_window_max", "uncached_tps", "uncached_tps_window_p50",
    "uncached_tps_window_max", "normalised_load_mean", "normalised_load_worst", "load_imbalance",
    "worst_instance_ttft_p95_s", "worst_instance_slo_share",
)  # fmt: skip
_LINK = ("bytes", "seconds", "bandwidth", "transfers", "cancels")
RESTORES = tuple(f"{link.replace('-', '_')}_{name}" for link in LINKS for name in _LINK)
_TABLES = (
    ("Service and fairness", SERVICE),
    ("Resources", RESOURCES),
    ("Restores and saves, by link", RESTORES),
    ("Cluster", CLUSTER),
)
GROUPS = (("", "all requests"), ("hot.", "hot requests"), ("cold.", "cold requests"))
_KEPT = ("retained_share", "regained_share", "restored_l2_share", "restored_l3_share", "recomputed_share")
_KEPT_PARTS = (("L1", 2), ("L1 again", 0), ("L2", 1), ("L3", 4), ("recomputed", 3))
_PARTS = (("L1", 2), ("L2", 1), ("L3", 4), ("computed", 3))
_CACHED = ("cached_l1_share", "cached_l2_share", "cached_l3_share")


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    small: written below the text.
    tone: good | bad | "".
    """

    text: str
    small: str = ""
    tone: str = ""


def condition_section(result: ExperimentResult, lookup: Lookup, condition: Condition) -> dict[str, Any]:
    """Everything about one condition."""
    arms = [arm.name for arm in result.arms if lookup.ran(condition.name, arm.name)]
    here = condition.name
    return {
        "name": here,
        "about": condition.about,
        "settings": [f"{key} = {text}" for key, text in condition.settings.items()],
        "chain": table(lookup, here, arms, "The way of a request", CHAIN, GROUPS),
        "tables": [table(lookup, here, arms, title_, metrics) for title_, metrics in _TABLES],
        "shares": _share_charts(result, lookup, here, arms) if arms else [],
        "times": _time_charts(result, here, arms),
    }


def table(
    lookup: Lookup, condition: str, arms: Sequence[str], name: str, metrics: Sequence[str],
    groups: Sequence[tuple[str, str]] = (("", ""),), heads: Mapping[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One table: in each group the arms, one below the other. Empty columns are left out.

    heads: names of columns that are not called as elsewhere.
    """
    cells = {
        (group, arm, metric): lookup.figure(condition, arm, f"{group}{metric}")
        for group, _ in groups
        for arm in arms
        for metric in metrics
    }
    shown = [m for m in metrics if any(_tells(f) for (_, _, at), f in cells.items() if at == m)]
    rows: list[dict[str, Any]] = []
    for group, label in groups:
        if label:
            rows.append({"kind": "group", "cells": [Cell(label), *(Cell("") for _ in shown)]})
        for arm in arms:
            found = [cells[group, arm, metric] for metric in shown]
            written = [
                Cell(
                    value(f.metric, f.value, beyond=f.beyond, not_measured=f.not_measured), change(f), f.tone
                )
                for f in found
            ]
            rows.append({"kind": "", "cells": [Cell(arm), *written]})
    return {
        "title": name,
        "heads": ["arm", *((heads or {}).get(m) or title(m) for m in shown)],
        "rows": rows if shown else [],
    }


def _tells(figure: Figure) -> bool:
    """Whether a figure makes its column worth showing. A column without any value is not, except for the
    scheduler's share of time: if no run measured it, the column says so."""
    blind = figure.not_measured and figure.value is None
    return bool(figure.value) or figure.beyond or (blind and figure.metric == "scheduler_share")


def colors_of(result: ExperimentResult) -> dict[str, int]:
    """The colour of each arm, the same on the whole page."""
    return {arm.name: at for at, arm in enumerate(result.arms)}


def _share_charts(
    result: ExperimentResult, lookup: Lookup, condition: str, arms: Sequence[str]
) -> list[dict[str, Any]]:
    """Retention, final sources, TTFT percentiles."""

    def shares(metrics: Sequence[str], rest: bool) -> list[tuple[str, list[float]]]:
        rows = []
        for arm in arms:
            values = [max(0.0, lookup.figure(condition, arm, m).value or 0.0) for m in metrics]
            rows.append((arm, [*values, max(0.0, 1 - sum(values))] if rest else values))
        return rows

    colors, panels = colors_of(result), []
    if any(lookup.figure(condition, arm, "enqueue_hit_tokens").value for arm in arms):
        kept = charts.stacked(f"retention {condition}", shares(_KEPT, False), _KEPT_PARTS)
        panels.append(("What became of the match on arrival", kept))
    sources = charts.stacked(f"sources {condition}", shares(_CACHED, True), _PARTS)
    panels.append(("Final source of prompt tokens", sources))
    for prefix, label in GROUPS:
        rows = [
            (
                arm,
                [lookup.figure(condition, arm, f"{prefix}ttft_p{q}_s").value for q in (50, 95, 99)],
                colors[arm],
            )
            for arm in arms
        ]
        if any(v is not None for _, values, _ in rows for v in values):
            drawn = charts.spans(f"ttft {prefix}{condition}", rows)
            panels.append((f"TTFT p50, p95, p99: {label}", drawn))
    return [{"title": name, "svg": Markup(svg)} for name, svg in panels]


def _time_charts(result: ExperimentResult, condition: str, arms: Sequence[str]) -> list[dict[str, Any]]:
    """One line for each arm. Values are sums over instances; the oldest wait is the greatest of them."""
    rows = result.windows.filter(pl.col("condition") == condition)
    if rows.is_empty():
        return []
    pages = pl.sum_horizontal("free_pages", "owned_pages", "evictable_pages", "protected_pages")
    totals = rows.group_by("arm", "start_s", maintain_order=True).agg(
        waiting=pl.col("waiting").sum(),
        oldest=pl.col("oldest_wait_s").max(),
        evictable=pl.col("evictable_pages").sum() / pages.sum(),
        protected=(pl.col("protected_pages") + pl.col("owned_pages")).sum() / pages.sum(),
        cached=(pl.col("cached_tokens") / pl.col("seconds")).sum(),
        evicted=(pl.col("evicted_pages") / pl.col("seconds")).sum(),
    )
    panels = (
        ("waiting", "Requests waiting", "requests"),
        ("oldest", "Oldest waiting request, s", "seconds"),
        ("evictable", "Evictable share of L1", "share"),
        ("protected", "Protected or owned share of L1", "share"),
        ("cached", "Reused prompt tokens per second", "tokens/s"),
        ("evicted", "Pages evicted per second", "pages/s"),
    )
    found = []
    for column, name, unit in panels:
        series = {}
        for arm in arms:
            part = totals.filter(pl.col("arm") == arm).sort("start_s")
            series[arm] = (part["start_s"].to_list(), part[column].fill_nan(None).to_list())
        if any(y for _, ys in series.values() for y in ys):
            drawn = charts.lines(f"{column} {condition}", series, unit, colors=colors_of(result))
            found.append({"title": name, "svg": Markup(drawn)})
    return found
