"""From one replay's tables to figures. Owns: the arithmetic of every metric in `metric_names`.

Rules (terms.md):
- Every request that arrived is counted. A request without a first token (unfinished or rejected) has a
  latency beyond every one that was measured: a percentile that falls among such requests is None, read
  ">horizon"; means take an unfinished request's time so far, so they are lower bounds there. Rejected
  requests have no time so far: means leave them out, percentiles and shares do not.
- Hot: an endless cache would have reused at least half of the prompt (ideal_tokens >= input_tokens / 2);
  cold: the rest. The group does not depend on the arm.
- Goodput divides by the offered span, first to last arrival.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import polars as pl

from hotprefix.errors import ConfigError
from hotprefix.lab.figures import Figures, mean, most, percentile, ratio, total, worst
from hotprefix.lab.metric_names import GROUPS, METRICS
from hotprefix.lab.window_metrics import link_metrics, window_metrics

QUANTILES = (50, 95, 99)
HOT = pl.col("ideal_tokens") * 2 >= pl.col("input_tokens")

_TTFT = pl.col("first_token_s") - pl.col("arrival_s")
_COMPLETION = pl.col("finish_s") - pl.col("arrival_s")
_TPOT = pl.when(pl.col("output_tokens") > 1).then(
    (pl.col("finish_s") - pl.col("first_token_s")) / (pl.col("output_tokens") - 1)
)


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives, seconds; None = no objective. timeout_s: a request without a first token by then has
    timed out (it is still served). Raises ConfigError."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    completion_s: float | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "completion_s", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"slo.{name}={value!r}: give seconds > 0, or leave it out", param=name)


def metrics(
    requests: pl.DataFrame,
    windows: pl.DataFrame,
    links: pl.DataFrame,
    *,
    slo: Slo,
    page_tokens: int,
    span_s: float | None = None,
    end_s: float | None = None,
) -> Figures:
    """Every name of METRICS for one replay. requests, windows, links: columns of lab.sim.rows. page_tokens:
    tokens of a page. span_s: offered span, None = from the arrivals. end_s: when the replay ended, None =
    the latest time in the tables."""
    span = offered_span(requests) if span_s is None else span_s
    end = last_moment(requests, windows) if end_s is None else end_s
    found = request_metrics(requests, slo, span, end)
    groups = {"hot": requests.filter(HOT), "cold": requests.filter(~HOT)}
    for name in GROUPS:
        found |= {f"{name}.{k}": v for k, v in request_metrics(groups[name], slo, span, end).items()}
    found |= window_metrics(windows, page_tokens)
    found |= _instances(requests, slo, span, end)
    found["worst_group_ttft_p95_s"] = worst(
        found[f"{name}.ttft_p95_s"] for name in GROUPS if not groups[name].is_empty()
    )
    found |= link_metrics(links)
    assert found.keys() == METRICS.keys()
    return {name: None if value is None else float(value) for name, value in found.items()}


def beyond_horizon(name: str, found: Figures) -> bool:
    """Whether a latency is None because it lies among requests that were never served."""
    group, _, own = name.rpartition(".")
    latency = own.startswith(("queue_wait_p", "ttft_p", "completion_p", "worst_")) and own.endswith("_s")
    return latency and found[name] is None and bool(found[f"{group}.requests" if group else "requests"])


def offered_span(requests: pl.DataFrame) -> float | None:
    """Seconds from the first arrival to the last; None for fewer than two requests."""
    if requests.height < 2:
        return None
    arrivals = requests["arrival_s"].to_numpy()
    return float(arrivals.max() - arrivals.min())


def last_moment(requests: pl.DataFrame, windows: pl.DataFrame) -> float:
    """The latest time that either table knows, seconds; 0 for empty tables."""
    latest = [most(requests[c]) for c in ("arrival_s", "admit_s", "first_token_s", "finish_s")]
    latest.append(most(windows["start_s"] + windows["seconds"]))
    return max((t for t in latest if t is not None), default=0.0)


def times(name: str, measured: pl.Series, so_far: pl.Series, beyond: int) -> Figures:
    """Mean and percentiles of a latency. measured: its values; so_far: the time that unfinished requests
    have waited; beyond: requests, those among them, whose value lies beyond the measured."""
    values = measured.drop_nulls().to_numpy().astype(np.float64)
    every = np.concatenate([values, so_far.drop_nulls().to_numpy()])
    found: Figures = {f"{name}_mean_s": float(every.mean()) if len(every) else None}
    return found | {f"{name}_p{q}_s": percentile(values, beyond, q) for q in QUANTILES}


def request_metrics(requests: pl.DataFrame, slo: Slo, span: float | None, end: float) -> Figures:
    """REQUEST_METRICS of a group of requests. span: offered span, end: when the replay ended, seconds."""
    return (
        _outcomes(requests, slo, span, end)
        | _latencies(requests, end)
        | _chain(requests.filter(pl.col("matched_at_admission").is_not_null()))
        | _sources(requests.filter(pl.col("prefill_start_s").is_not_null()))
    )


def _outcomes(requests: pl.DataFrame, slo: Slo, span: float | None, end: float) -> Figures:
    good = requests.filter(good_requests(slo)).height
    late = None if slo.timeout_s is None else requests.filter(_timed_out(slo.timeout_s, end)).height
    count = {
        o: requests.filter(pl.col("outcome") == o).height for o in ("finished", "unfinished", "rejected")
    }
    n = requests.height
    return {
        "requests": n,
        **count,
        "finished_share": ratio(count["finished"], n),
        "timeouts": late,
        "timeout_share": None if late is None else ratio(late, n),
        "good_requests": good,
        "slo_share": ratio(good, n),
        "goodput_rps": ratio(good, span),
        "retractions": total(requests, "retractions"),
    }


def good_requests(slo: Slo) -> pl.Expr:
    """Whether a request finished within every objective; unfinished and rejected requests did not."""
    limits = ((_TTFT, slo.ttft_s), (_TPOT.fill_null(0.0), slo.tpot_s), (_COMPLETION, slo.completion_s))
    good = pl.col("outcome") == "finished"
    for value, limit in limits:
        if limit is not None:
            good = good & (value <= limit).fill_null(False)
    return good


def _timed_out(timeout_s: float, end: float) -> pl.Expr:
    until = pl.col("first_token_s").fill_null(end)
    return (pl.col("outcome") != "rejected") & (until - pl.col("arrival_s") > timeout_s)


def _latencies(requests: pl.DataFrame, end: float) -> Figures:
    """Queue wait, TTFT, completion, TPOT. A request that was never served lies beyond in each of the first
    three; TPOT is a figure of finished requests with two output tokens or more."""
    found: Figures = {}
    served = requests.filter(pl.col("outcome") != "rejected")
    for name, stamp in (("queue_wait", "admit_s"), ("ttft", "first_token_s"), ("completion", "finish_s")):
        reached = requests.filter(pl.col(stamp).is_not_null())
        waiting = served.filter(pl.col(stamp).is_null())
        measured = reached[stamp] - reached["arrival_s"]
        found |= times(name, measured, end - waiting["arrival_s"], requests.height - reached.height)
    found |= times("tpot", requests.select(v=_TPOT)["v"], pl.Series(dtype=pl.Float64), 0)
    waits = served.select(v=pl.col("admit_s").fill_null(end) - pl.col("arrival_s"))["v"]
    executed = requests.filter(pl.col("prefill_start_s").is_not_null())
    found["requeue_mean_s"] = mean(executed["requeue_s"].fill_null(0.0))
    found["oldest_wait_s"] = most(waits)
    return found


def _chain(admitted: pl.DataFrame) -> Figures:
    """The match on arrival and what became of it until admission."""
    hit, at_admission = total(admitted, "matched_at_enqueue"), total(admitted, "matched_at_admission")
    found: Figures = {
        "enqueue_hit_tokens": hit,
        "admission_hit_tokens": at_admission,
        "net_l1_hit_loss_tokens": hit - at_admission,
        "net_l1_hit_loss_share": ratio(hit - at_admission, hit),
        "lost_tokens": hit - total(admitted, "retained_tokens"),
    }
    parts = ("retained", "restored_l2", "restored_l3", "recomputed")
    return found | {f"{part}_share": ratio(total(admitted, f"{part}_tokens"), hit) for part in parts}


def _sources(executed: pl.DataFrame) -> Figures:
    """Final sources of the prompt tokens of requests that were executed, and what was computed."""
    tokens = total(executed, "input_tokens")
    cached = {tier: total(executed, f"cached_{tier}") for tier in ("l1", "l2", "l3")}
    reused, computed = sum(cached.values()), total(executed, "computed_tokens")
    # At least one token of a prompt is always computed, however much was seen before.
    new = total(executed.select(v=(pl.col("input_tokens") - pl.col("ideal_tokens")).clip(1)), "v")
    return {
        "input_tokens": tokens,
        "reused_tokens": reused,
        "reuse_share": ratio(reused, tokens),
        "reuse_of_ideal": ratio(reused, tokens - new),
        **{f"cached_{tier}_share": ratio(amount, tokens) for tier, amount in cached.items()},
        "computed_tokens": computed,
        "computed_per_request": ratio(computed, executed.height),
        "rework_tokens": total(executed, "rework_tokens"),
        "duplication_factor": ratio(computed, new),
    }


def _instances(requests: pl.DataFrame, slo: Slo, span: float | None, end: float) -> Figures:
    """The worst instance; rejected requests that reached none are left to the whole."""
    parts = requests.filter(pl.col("instance").is_not_null()).partition_by("instance")
    found = [_outcomes(part, slo, span, end) | _latencies(part, end) for part in parts]
    shares = [f["slo_share"] for f in found if f["slo_share"] is not None]
    return {
        "worst_instance_ttft_p95_s": worst(f["ttft_p95_s"] for f in found),
        "worst_instance_slo_share": min(shares, default=None),
    }
