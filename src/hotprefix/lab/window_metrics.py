"""Figures of an instance's time. Owns: the metrics of the window table and of the link table.

Rules:
1. Shares are of instance time: the time from the first window's start to the last one's end, times the number
   of instances. A window without steps is idle time.
2. An instance's normalised load is its busy time as a share of that time. What a step costs is told by the
   cost model (docs/terms.md: cached_tps is observed throughput, not capacity).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import polars as pl

from hotprefix.lab.metric_names import LINKS
from hotprefix.lab.table_math import Figures, Floats, columns, mean, most, percentiles, ratio

_COLUMNS: Final = (
    "instance", "start_s", "seconds", "prefill_s", "decode_s", "scheduler_s", "cached_tokens",
    "computed_tokens", "refresh_touches", "evicted_pages", "stalls",
)  # fmt: skip
_AMOUNTS: Final = ("bytes", "seconds", "transfers", "cancels")


def window_metrics(windows: pl.DataFrame, page_tokens: int) -> Figures:
    """The metrics of the window table: throughput, busy shares and the cache's counters."""
    rows = columns(windows, _COLUMNS)
    start, stop = rows["start_s"], rows["start_s"] + rows["seconds"]
    span = float(stop.max() - start.min()) if len(start) else 0.0
    instances, place = np.unique(rows["instance"], return_inverse=True)
    time = span * len(instances)
    sums = {name: float(values.sum()) for name, values in rows.items()}
    busy = np.zeros(len(instances))
    np.add.at(busy, place, rows["prefill_s"] + rows["decode_s"])
    cached = np.zeros(len(instances))
    np.add.at(cached, place, rows["cached_tokens"])
    worst, average = most(busy), mean(busy)
    return {
        **_throughput("cached_tps", rows["cached_tokens"], rows["seconds"], span),
        **_throughput("uncached_tps", rows["computed_tokens"], rows["seconds"], span),
        "prefill_busy_share": ratio(sums["prefill_s"], time),
        "decode_busy_share": ratio(sums["decode_s"], time),
        "scheduler_share": None if math.isnan(sums["scheduler_s"]) else ratio(sums["scheduler_s"], time),
        "refresh_touches": sums["refresh_touches"],
        "evicted_pages": sums["evicted_pages"],
        "evicted_tokens": sums["evicted_pages"] * page_tokens,
        "stalls": sums["stalls"],
        "normalised_load_mean": ratio(average, span),
        "normalised_load_worst": ratio(worst, span),
        "load_imbalance": ratio(worst, average),
        "cached_tps_spread": ratio(float(np.ptp(cached)) if len(cached) else None, mean(cached)),
    }


def _throughput(name: str, tokens: Floats, seconds: Floats, span: float) -> Figures:
    """Tokens per second: of all instances over the whole replay, and of single instances' windows."""
    cut = seconds > 0
    median, highest = percentiles(tokens[cut] / seconds[cut], 0, (50, 100))
    return {
        name: ratio(float(tokens.sum()), span),
        f"{name}_window_p50": median,
        f"{name}_window_max": highest,
    }


def link_metrics(links: pl.DataFrame) -> Figures:
    """The metrics of each physical link; None if the link does not exist."""
    found: Figures = {}
    for link in LINKS:
        rows, at = columns(links.filter(pl.col("link") == link), _AMOUNTS), link.replace("-", "_")
        sums = {name: float(values.sum()) for name, values in rows.items()}
        exists = len(rows["bytes"]) > 0
        found |= {f"{at}_{name}": value if exists else None for name, value in sums.items()}
        found[f"{at}_bandwidth"] = ratio(sums["bytes"], sums["seconds"])
    return found
