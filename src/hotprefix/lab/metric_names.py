"""The names of what is measured. Owns: the catalogue of metrics: unit, which way is better, meaning.

Rules:
1. Names and formulas are those of docs/terms.md. A name says its unit.
2. A request metric exists for three groups: `name` (all requests), `hot.name` and `cold.name`. Metrics of
   windows, instances and links exist for the whole only.
3. Experiment files may only name what stands here.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, Literal

from hotprefix.definitions import GROUPS
from hotprefix.errors import ConfigError

Better = Literal["lower", "higher", "neither"]
_COUNT_ALL: Final = frozenset({
    "requests", "finished", "unfinished", "rejected", "finished_share", "good_requests", "slo_share",
    "goodput_rps", "worst_instance_slo_share",
})  # fmt: skip
_PERCENTILES: Final = ("_p50_s", "_p95_s", "_p99_s")


@dataclass(frozen=True, slots=True)
class Metric:
    """unit: seconds | tokens | tokens/s | tokens/request | requests | requests/s | share | ratio | pages |
    bytes | bytes/s | count."""

    name: str
    unit: str
    better: Better
    meaning: str

    @property
    def own(self) -> str:
        """The name without its group."""
        return self.name.rpartition(".")[2]

    @property
    def additive(self) -> bool:
        """Whether the parts of a replay add up to the whole's figure."""
        return self.unit in ("tokens", "requests", "pages", "bytes", "count")

    @property
    def extreme(self) -> bool:
        """Whether one request or window decides it, so that no sample can say how sure it is."""
        return self.own == "oldest_wait_s" or self.name.endswith("_window_max")

    @property
    def signed(self) -> bool:
        """Whether it may be negative. Example: a match may grow between arrival and admission."""
        return self.own.startswith(("net_l1_hit_loss", "prediction_bias"))

    @property
    def group(self) -> str:
        """The group: "hot", "cold", or "" for all requests."""
        return self.name.rpartition(".")[0]

    @property
    def counts_all(self) -> bool:
        """Whether every request that arrived counts in full, also one that was rejected or has not finished.
        Any other metric is a figure of the requests that were served, and flatters the side that serves
        fewer."""
        percentile = self.own.endswith(_PERCENTILES) and not self.own.startswith(("tpot", "prediction"))
        return self.own in _COUNT_ALL or percentile


def _times(name: str, meaning: str) -> list[Metric]:
    """Mean and percentiles of a latency, all in seconds."""
    return [
        Metric(f"{name}_mean_s", "seconds", "lower", f"mean {meaning}"),
        *(Metric(f"{name}_p{q}_s", "seconds", "lower", f"{meaning}, p{q}") for q in (50, 95, 99)),
    ]


REQUEST_METRICS: Final = (
    Metric("requests", "requests", "neither", "requests that arrived"),
    Metric("finished", "requests", "higher", "requests that finished"),
    Metric("unfinished", "requests", "lower", "requests still queued or running at the replay's end"),
    Metric("rejected", "requests", "lower", "requests refused on arrival"),
    Metric("finished_share", "share", "higher", "finished / arrived"),
    *_times("queue_wait", "time from arrival to first admission"),
    *_times("ttft", "time from arrival to first token"),
    *_times("completion", "time from arrival to last token"),
    *_times("tpot", "time per output token after the first, (last - first) / (tokens - 1)"),
    Metric("requeue_mean_s", "seconds", "lower", "waits after retractions, mean of executed requests"),
    Metric("timeouts", "requests", "lower", "requests without a first token within the timeout"),
    Metric("timeout_share", "share", "lower", "timeouts / arrived"),
    Metric("oldest_wait_s", "seconds", "lower", "longest time any request waited for its admission"),
    Metric("good_requests", "requests", "higher", "requests that finished within every objective"),
    Metric("slo_share", "share", "higher", "good requests / arrived (unfinished and rejected count)"),
    Metric("goodput_rps", "requests/s", "higher", "good requests per second of offered span"),
    Metric("input_tokens", "tokens", "neither", "prompt tokens of requests whose prefill is done"),
    Metric("enqueue_hit_tokens", "tokens", "neither", "L1 match on arrival, of admitted requests"),
    Metric("admission_hit_tokens", "tokens", "higher", "L1 match at first admission"),
    Metric("net_l1_hit_loss_tokens", "tokens", "lower", "match on arrival - match at admission"),
    Metric("net_l1_hit_loss_share", "share", "lower", "net loss / match on arrival"),
    Metric("retained_share", "share", "higher", "of the match on arrival: its very pages in L1 until used"),
    Metric(
        "regained_share", "share", "neither", "of the match on arrival: lost, in L1 again by another request"
    ),
    Metric("restored_l2_share", "share", "neither", "of the match on arrival: lost, copied back from L2"),
    Metric("restored_l3_share", "share", "neither", "of the match on arrival: lost, fetched from L3"),
    Metric("recomputed_share", "share", "lower", "of the match on arrival: lost, computed by the request"),
    Metric("lost_tokens", "tokens", "lower", "of the match on arrival: gone from L1 before they were used"),
    Metric("reused_tokens", "tokens", "higher", "prompt tokens taken from any tier"),
    Metric("reuse_share", "share", "higher", "reused / prompt tokens, where the prefill is done"),
    Metric("reuse_of_ideal", "ratio", "higher", "reused / what an endless cache would have reused"),
    Metric("cached_l1_share", "share", "higher", "prompt tokens whose final source is L1"),
    Metric("cached_l2_share", "share", "neither", "prompt tokens whose final source is L2"),
    Metric("cached_l3_share", "share", "neither", "prompt tokens whose final source is L3"),
    Metric("computed_tokens", "tokens", "lower", "prompt positions computed, repetitions included"),
    Metric(
        "computed_per_request", "tokens/request", "lower", "computed tokens / requests whose prefill is done"
    ),
    Metric("rework_tokens", "tokens", "lower", "positions computed again after a retraction"),
    Metric("duplication_factor", "ratio", "lower", "computed / tokens that no request had computed before"),
    Metric("retractions", "count", "lower", "times a running request was sent back to the queue"),
    Metric("failed_over", "requests", "lower", "requests that began again because their instance died"),
    Metric("available_share", "share", "neither", "prompt tokens the fleet knew of on the best instance"),
    Metric("captured_share", "share", "higher", "prompt tokens it knew of on the instance it chose"),
    Metric("copied_tokens", "tokens", "lower", "computed though another instance had or computed them"),
    Metric("prediction_bias_s", "seconds", "neither", "mean of predicted - actual time to first token"),
    Metric("prediction_error_p50_s", "seconds", "lower", "|predicted - actual| time to first token, p50"),
    Metric("prediction_error_p95_s", "seconds", "lower", "|predicted - actual| time to first token, p95"),
)

WHOLE_METRICS: Final = (
    Metric("cached_tps", "tokens/s", "higher", "reused prompt tokens per second, whole replay"),
    Metric("uncached_tps", "tokens/s", "neither", "computed prompt tokens per second, whole replay"),
    Metric("cached_tps_window_p50", "tokens/s", "neither", "cached_tps of one instance's window, median"),
    Metric("cached_tps_window_max", "tokens/s", "neither", "cached_tps of one instance's window, highest"),
    Metric("uncached_tps_window_p50", "tokens/s", "neither", "the same of one instance's window, median"),
    Metric("uncached_tps_window_max", "tokens/s", "neither", "the same of one instance's window, highest"),
    Metric("prefill_busy_share", "share", "lower", "time in steps that prefill / instance time"),
    Metric("decode_busy_share", "share", "neither", "time in steps that only decode / instance time"),
    Metric("scheduler_share", "share", "lower", "scheduler's own time / instance time"),
    Metric("refresh_touches", "count", "neither", "prefixes touched by waiting-prefix refresh"),
    Metric("evicted_pages", "pages", "lower", "pages evicted from L1"),
    Metric("evicted_tokens", "tokens", "lower", "the same in tokens"),
    Metric("stalls", "count", "lower", "passes in which nothing could run"),
    Metric("normalised_load_mean", "share", "neither", "busy time / time, mean of instances"),
    Metric("normalised_load_worst", "share", "lower", "the same, busiest instance"),
    Metric("load_imbalance", "ratio", "lower", "busiest instance's load / mean load"),
    Metric("cached_tps_spread", "ratio", "lower", "(highest - lowest) / mean cached_tps of instances"),
    Metric("worst_instance_ttft_p95_s", "seconds", "lower", "highest TTFT p95 of an instance"),
    Metric("worst_instance_slo_share", "share", "higher", "lowest SLO share of an instance"),
    Metric("worst_group_ttft_p95_s", "seconds", "lower", "higher TTFT p95 of the hot and the cold group"),
)

LINKS: Final = ("l3-l2", "l2-l1", "l1-l2", "l2-l3")


def _link(link: str) -> list[Metric]:
    at = link.replace("-", "_")
    return [
        Metric(f"{at}_bytes", "bytes", "lower", f"bytes over {link}"),
        Metric(f"{at}_seconds", "seconds", "lower", f"time transfers took on {link}, summed"),
        Metric(f"{at}_bandwidth", "bytes/s", "higher", f"effective bandwidth of {link}"),
        Metric(f"{at}_transfers", "count", "neither", f"transfers over {link}"),
        Metric(f"{at}_cancels", "count", "neither", f"cancelled transfers over {link}"),
    ]


METRICS: Final[dict[str, Metric]] = {
    m.name: m
    for m in (
        *REQUEST_METRICS,
        *(
            Metric(f"{group}.{m.name}", m.unit, m.better, f"{m.meaning}; {group} requests")
            for group in GROUPS
            for m in REQUEST_METRICS
        ),
        *WHOLE_METRICS,
        *(m for link in LINKS for m in _link(link)),
    )
}


def known(name: str) -> Metric:
    """The metric of that name. Raises ConfigError with the nearest names."""
    found = METRICS.get(name)
    if found is None:
        near = ", ".join(get_close_matches(name, METRICS, n=3)) or "see docs/experiments.md"
        raise ConfigError(f"metric={name!r}: there is no such metric; nearest: {near}", param="metric")
    return found
