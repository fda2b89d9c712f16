"""Figures of an instance's time. Owns: the metrics of the window table and of the link table.

Rules: shares are of instance time, from the first window's start to the last one's end, times instances: a
window without steps is idle time. An instance's normalised load is its busy time as a share of that time;
what a step costs is the cost model's (terms.md: cached_tps is observed throughput, not capacity).
"""

from __future__ import annotations

import polars as pl

from hotprefix.lab.figures import Figures, mean, most, percentile, ratio, total
from hotprefix.lab.metric_names import LINKS


def window_metrics(windows: pl.DataFrame, page_tokens: int) -> Figures:
    """Throughput, busy shares and the cache's counters."""
    start = windows["start_s"].to_numpy()
    span = float((start + windows["seconds"].to_numpy()).max() - start.min()) if len(start) else 0.0
    time = span * windows["instance"].n_unique()
    evicted = total(windows, "evicted_pages")
    busy = windows.group_by("instance").agg(v=pl.col("prefill_s").sum() + pl.col("decode_s").sum())["v"]
    worst, average = most(busy), mean(busy)
    return {
        **_throughput("cached_tps", windows, "cached_tokens", span),
        **_throughput("uncached_tps", windows, "computed_tokens", span),
        "prefill_busy_share": ratio(total(windows, "prefill_s"), time),
        "decode_busy_share": ratio(total(windows, "decode_s"), time),
        "scheduler_share": ratio(total(windows, "scheduler_s"), time),
        "refresh_touches": total(windows, "refresh_touches"),
        "evicted_pages": evicted,
        "evicted_tokens": evicted * page_tokens,
        "stalls": total(windows, "stalls"),
        "normalised_load_mean": ratio(average, span),
        "normalised_load_worst": ratio(worst, span),
        "load_imbalance": ratio(worst, average),
    }


def _throughput(name: str, windows: pl.DataFrame, column: str, span: float) -> Figures:
    """Tokens per second: of all instances over the whole replay, and of single instances' windows."""
    cut = windows.filter(pl.col("seconds") > 0)
    rates = (cut[column] / cut["seconds"]).to_numpy()
    return {
        name: ratio(total(windows, column), span),
        f"{name}_window_p50": percentile(rates, 0, 50),
        f"{name}_window_max": percentile(rates, 0, 100),
    }


def link_metrics(links: pl.DataFrame) -> Figures:
    """Each physical link on its own; None where the link does not exist."""
    found: Figures = {}
    for link in LINKS:
        rows, at = links.filter(pl.col("link") == link), link.replace("-", "_")
        sums = {c: total(rows, c) for c in ("bytes", "seconds", "transfers", "failures", "cancels")}
        found |= {f"{at}_{name}": None if rows.is_empty() else value for name, value in sums.items()}
        found[f"{at}_bandwidth"] = ratio(sums["bytes"], sums["seconds"])
    return found
