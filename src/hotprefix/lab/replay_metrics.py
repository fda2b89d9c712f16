"""From one replay's tables to figures. Owns: the arithmetic of every metric in `metric_names`.

Rules (docs/terms.md):
1. Every request that arrived is counted. A request without a first token (unfinished or rejected) has a
   latency beyond every one that was measured, so a percentile that falls among such requests is None, read
   ">horizon".
2. A mean takes the time so far of an unfinished request, so it is a lower bound then. A rejected request has
   no time so far: means leave it out; percentiles and shares do not (`Metric.counts_all`). A verdict does
   not believe a mean of the side that finished fewer.
3. Hot and cold are by `definitions.is_hot`, of what an endless cache would have reused of the prompt
   (ideal_tokens), so a request's group does not depend on the arm.
4. Goodput divides by the offered span, from the first arrival to the last.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from hotprefix.definitions import Slo, is_hot
from hotprefix.lab.metric_names import METRICS
from hotprefix.lab.table_math import Figures, Floats, columns, mean, most, percentiles, ratio, worst
from hotprefix.lab.window_metrics import link_metrics, window_metrics

QUANTILES: Final = (50, 95, 99)
HIT_PARTS: Final = ("retained", "regained", "restored_l2", "restored_l3", "recomputed")
_COLUMNS: Final[tuple[str | pl.Expr, ...]] = (
    "instance", "input_tokens", "output_tokens", "ideal_tokens", "heat", "queue_depth", "arrival_s",
    "admit_s", "prefill_start_s", "prefill_done_s", "first_token_s", "finish_s", "requeue_s",
    "matched_at_enqueue",
    "matched_at_admission", "retained_tokens", "regained_tokens", "restored_l2_tokens", "restored_l3_tokens",
    "recomputed_tokens", "cached_l1", "cached_l2", "cached_l3", "computed_tokens", "rework_tokens",
    "rework_output_tokens", "retractions", "failovers", "available_tokens", "captured_tokens",
    "copied_tokens", "predicted_first_s",
    *((pl.col("outcome") == name).alias(name) for name in ("finished", "unfinished", "rejected")),
)  # fmt: skip

Rows = dict[str, Floats]  # columns of requests; NaN where a thing did not happen; outcomes as 0 and 1


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
    """Every metric of METRICS for one replay.

    requests, windows, links: tables with the columns of lab.sim.rows.
    page_tokens: tokens of a page.
    span_s: the offered span; None = taken from the arrivals.
    end_s: when the replay ended; None = the latest time in the tables.
    """
    rows = request_rows(requests)
    span = offered_span(requests) if span_s is None else span_s
    end = last_moment(requests, windows) if end_s is None else end_s
    hot = is_hot(rows["ideal_tokens"], rows["input_tokens"])
    groups = {"hot": only(rows, hot), "cold": only(rows, ~hot)}
    found = request_metrics(rows, slo, span, end)
    for name, part in groups.items():
        found |= {f"{name}.{k}": v for k, v in request_metrics(part, slo, span, end).items()}
    found |= window_metrics(windows, page_tokens)
    found |= _instances(rows, slo)
    present = [name for name, part in groups.items() if len(part["arrival_s"])]
    found["worst_group_ttft_p95_s"] = worst(found[f"{name}.ttft_p95_s"] for name in present)
    found |= link_metrics(links)
    assert found.keys() == METRICS.keys()
    return {name: None if value is None else float(value) for name, value in found.items()}


def request_rows(requests: pl.DataFrame) -> Rows:
    """The request table as arrays."""
    return columns(requests, _COLUMNS)


def only(rows: Rows, chosen: NDArray[np.bool_]) -> Rows:
    return {name: values[chosen] for name, values in rows.items()}


def beyond_horizon(name: str, found: Figures) -> bool:
    """Whether a latency is None because it falls among requests that were never served."""
    group, _, own = name.rpartition(".")
    latency = own.startswith(("queue_wait_p", "ttft_p", "completion_p", "worst_")) and own.endswith("_s")
    return latency and found[name] is None and bool(found[f"{group}.requests" if group else "requests"])


def offered_span(requests: pl.DataFrame) -> float | None:
    """Seconds from the first arrival to the last; None for fewer than two requests."""
    arrivals = requests["arrival_s"].to_numpy()
    return float(arrivals.max() - arrivals.min()) if len(arrivals) > 1 else None


def last_moment(requests: pl.DataFrame, windows: pl.DataFrame) -> float:
    """The latest time in either table, seconds; 0 for empty tables."""
    stamps = columns(requests, ("arrival_s", "admit_s", "first_token_s", "finish_s")).values()
    ends = (windows["start_s"] + windows["seconds"]).to_numpy()
    return max((t for t in map(most, (*stamps, ends)) if t is not None), default=0.0)


def request_metrics(rows: Rows, slo: Slo, span: float | None, end: float) -> Figures:
    """REQUEST_METRICS of a group of requests. span: the offered span, seconds. end: when the replay ended,
    seconds."""
    return (
        _outcomes(rows, slo, span, end)
        | _latencies(rows, end)
        | _chain(only(rows, ~np.isnan(rows["matched_at_admission"])))
        | _sources(only(rows, ~np.isnan(rows["prefill_done_s"])))
        | _predicted(rows)
    )


def _outcomes(rows: Rows, slo: Slo, span: float | None, end: float) -> Figures:
    good, n = float(good_requests(rows, slo).sum()), len(rows["arrival_s"])
    late = None if slo.timeout_s is None else float(_timed_out(rows, slo, end).sum())
    outcomes = {name: float(rows[name].sum()) for name in ("finished", "unfinished", "rejected")}
    return {
        "requests": n,
        **outcomes,
        "finished_share": ratio(outcomes["finished"], n),
        "timeouts": late,
        "timeout_share": None if late is None else ratio(late, n),
        "good_requests": good,
        "slo_share": ratio(good, n),
        "goodput_rps": ratio(good, span),
        "retractions": float(rows["retractions"].sum()),
        "failed_over": float((rows["failovers"] > 0).sum()),
    }


def good_requests(rows: Rows, slo: Slo) -> NDArray[np.bool_]:
    """Which requests finished within every objective; unfinished and rejected requests did not."""
    arrival = rows["arrival_s"]
    met = slo.met(rows["first_token_s"] - arrival, np.nan_to_num(_tpot(rows)), rows["finish_s"] - arrival)
    good: NDArray[np.bool_] = (rows["finished"] > 0) & met
    return good


def _tpot(rows: Rows) -> Floats:
    """Seconds per output token after the first; NaN for requests with fewer than two, or unfinished."""
    later = rows["output_tokens"] - 1
    return (rows["finish_s"] - rows["first_token_s"]) / np.where(later > 0, later, np.nan)


def _timed_out(rows: Rows, slo: Slo, end: float) -> NDArray[np.bool_]:
    until = np.where(np.isnan(rows["first_token_s"]), end, rows["first_token_s"])
    late: NDArray[np.bool_] = (rows["rejected"] == 0) & slo.timed_out(until - rows["arrival_s"])
    return late


def _latencies(rows: Rows, end: float) -> Figures:
    """Queue wait, TTFT, completion and TPOT. In the first three a request that was never served lies beyond
    all that were measured. TPOT is a figure of finished requests with two output tokens or more."""
    found: Figures = {}
    accepted = rows["rejected"] == 0
    for name, stamp in (("queue_wait", "admit_s"), ("ttft", "first_token_s"), ("completion", "finish_s")):
        took, so_far = rows[stamp] - rows["arrival_s"], end - rows["arrival_s"]
        reached = ~np.isnan(took)
        found |= _times(name, took[reached], so_far[accepted & ~reached], int((~reached).sum()))
    tpot = _tpot(rows)
    found |= _times("tpot", tpot[~np.isnan(tpot)], tpot[:0], 0)
    waits = np.where(np.isnan(rows["admit_s"]), end, rows["admit_s"]) - rows["arrival_s"]
    executed = ~np.isnan(rows["prefill_start_s"])
    found["requeue_mean_s"] = mean(np.nan_to_num(rows["requeue_s"][executed]))
    found["oldest_wait_s"] = most(waits[accepted])
    return found


def _times(name: str, measured: Floats, so_far: Floats, beyond: int) -> Figures:
    """Mean and percentiles of a latency.

    so_far: the times that unfinished requests have waited.
    beyond: how many requests, these included, lie beyond the measured.
    """
    marks = percentiles(measured, beyond, QUANTILES)
    return {
        f"{name}_mean_s": mean(np.concatenate([measured, so_far])),
        **{f"{name}_p{q}_s": mark for q, mark in zip(QUANTILES, marks, strict=True)},
    }


def _chain(admitted: Rows) -> Figures:
    """The match on arrival, and what became of it until it was used. Nothing is said about what was not used
    yet."""
    sums = _sums(admitted)
    hit, at_admission = sums["matched_at_enqueue"], sums["matched_at_admission"]
    parts = {part: sums[f"{part}_tokens"] for part in HIT_PARTS}
    reached = sum(parts.values())
    found: Figures = {
        "enqueue_hit_tokens": hit,
        "admission_hit_tokens": at_admission,
        "net_l1_hit_loss_tokens": hit - at_admission,
        "net_l1_hit_loss_share": ratio(hit - at_admission, hit),
        "lost_tokens": reached - parts["retained"],
    }
    return found | {f"{part}_share": ratio(tokens, reached) for part, tokens in parts.items()}


def _sources(prefilled: Rows) -> Figures:
    """Final sources of the prompt tokens of requests whose prefill is done, and what was computed. Other
    requests have no final sources yet, so their tokens are in neither part of a share."""
    sums = _sums(prefilled)
    tokens, computed = sums["input_tokens"], sums["computed_tokens"]
    cached = {tier: sums[f"cached_{tier}"] for tier in ("l1", "l2", "l3")}
    reused = sum(cached.values())
    # At least one token of a prompt is always computed, however much was seen before.
    new = float(np.maximum(prefilled["input_tokens"] - prefilled["ideal_tokens"], 1).sum())
    return {
        "input_tokens": tokens,
        "reused_tokens": reused,
        "reuse_share": ratio(reused, tokens),
        "reuse_of_ideal": ratio(reused, tokens - new),
        **{f"cached_{tier}_share": ratio(amount, tokens) for tier, amount in cached.items()},
        "computed_tokens": computed,
        "computed_per_request": ratio(computed, len(prefilled["arrival_s"])),
        "rework_tokens": sums["rework_tokens"] + sums["rework_output_tokens"],
        **{
            f"{name}_share": ratio(_known(prefilled[f"{name}_tokens"]), tokens)
            for name in ("available", "captured")
        },
        "duplication_factor": ratio(computed, new),
    }


def _predicted(rows: Rows) -> Figures:
    """How far the fleet's predictions were off, of the requests that got a first token on the instance that
    was chosen first; and what it let be computed twice."""
    off = rows["predicted_first_s"] - (rows["first_token_s"] - rows["arrival_s"])
    off = off[~np.isnan(off) & (rows["failovers"] == 0)]
    p50, p95 = percentiles(np.abs(off), 0, (50, 95))
    return {
        "copied_tokens": _known(rows["copied_tokens"]),
        "prediction_bias_s": mean(off),
        "prediction_error_p50_s": p50,
        "prediction_error_p95_s": p95,
    }


def _known(values: Floats) -> float | None:
    """The sum of what is known; None if nothing is."""
    return None if np.isnan(values).all() else float(np.nansum(values))


def _instances(rows: Rows, slo: Slo) -> Figures:
    """The figures of the worst instance. Rejected requests that reached no instance count only for the
    whole."""
    shares, tails = [], []
    for instance in np.unique(rows["instance"][~np.isnan(rows["instance"])]):
        part = only(rows, rows["instance"] == instance)
        took = part["first_token_s"] - part["arrival_s"]
        reached = ~np.isnan(took)
        tails += percentiles(took[reached], int((~reached).sum()), (95,))
        shares.append(float(good_requests(part, slo).mean()))
    return {
        "worst_instance_ttft_p95_s": worst(tails),
        "worst_instance_slo_share": min(shares, default=None),
    }


def _sums(rows: Rows) -> dict[str, float]:
    """The sum of each column. What is not known adds nothing."""
    return {name: float(np.nansum(values)) for name, values in rows.items()}
