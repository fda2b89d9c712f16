"""The router's GET /metrics. Owns: the names of its metrics.

Rules: everything is made from the view in state.py, so that page, /workers and /metrics never differ. Names
are `hotprefix_router_...`. Labels take fixed words and the names of workers and models, nothing that a client
sends. What is not known is absent, not 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from hotprefix.fleet.correction import BOUNDS
from hotprefix.server.insight_metrics import counter, counters, gauge, gauges

STATES = ("ready", "failing", "silent", "unknown", "draining")
BREAKERS = ("closed", "open", "half_open")
COUNTERS = {
    "routed": "Choices.",
    "waits": "Looks that found no worker that may be chosen.",
    "expired": "Requests that the fleet could give to nobody.",
    "unknown": "Choices of a worker whose load was not known.",
    "late": "Reports of progress for requests that had ended.",
    "restarts": "Lives of workers that were seen to end without a leave.",
    "gaps": "Questions for missing KV events.",
    "dropped": "Times a worker's entries were dropped for missing events or a snapshot.",
}


class RouterMetrics:
    """view: makes the state. errors: error answers of the router itself, by status."""

    def __init__(self, view: Callable[[], dict[str, Any]]) -> None:
        self._view = view
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self.errors: Counter[str] = Counter()

    def error(self, status: int) -> None:
        """The router answered with an error of its own."""
        self.errors[str(status)] += 1

    def text(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        yield counters("router_http_errors", "Error answers of the router itself.", "status", self.errors)
        yield counter("router_clients_left", "Requests whose client left.", view["clients_left"])
        yield counters("router_cut", "Answers that broke off after their first byte.", "reason", view["cut"])
        log = view["event_log"]
        if log is not None:
            records = {name: log[name] for name in ("written", "dropped")}
            yield counters("router_event_log_records", "Records of the event log.", "outcome", records)
            yield gauge(
                "router_event_log_failed", "1 once the event log has ended.", log["failed"] is not None
            )
        yield gauge("router_draining", "1 while the router shuts down.", view["draining"])
        yield from _pools(view["pools"])
        yield from _workers(view["workers"])


def _pools(pools: list[dict[str, Any]]) -> Iterator[Metric]:
    for name, text in COUNTERS.items():
        values = {pool["model"]: pool["counters"][name] for pool in pools}
        yield counters(f"router_{name}", text, "model", values)
    for name, label, text in (
        ("rules", "rule", "Choices by the rule that chose."),
        ("matched_tokens", "tier", "Prompt tokens of choices that need not be computed."),
        ("copied_tokens", "reason", "Prompt tokens computed a further time by choice."),
        ("ended", "ending", "Stays of requests with a worker, by how they ended."),
        ("refused", "reason", "Requests that the router refused."),
    ):
        yield counters(f"router_{name}", text, f"model {label}", _two(pools, "model", name))
    for name, text in (
        ("prompt_tokens", "Prompt tokens of choices."),
        ("waited", "Requests that waited at the router."),
        ("retries", "Requests that went to another worker before their answer began."),
    ):
        yield counters(f"router_{name}", text, "model", {pool["model"]: pool[name] for pool in pools})
    moved = {(p["model"], m["reason"], m["outcome"]): m["count"] for p in pools for m in p["migrations"]}
    text = "Answers that had begun and left their worker, by why, and what came of it."
    yield counters("router_migrations", text, "model reason outcome", moved)
    yield counters("router_hits", "Prompt tokens by where hits go, and their requests.", "model of",
                   _two(pools, "model", "hits"))  # fmt: skip
    yield gauges("router_held", "Requests that wait now.", "model", {p["model"]: p["held"] for p in pools})
    waits = {p["model"]: p["oldest_wait_s"] for p in pools if p["oldest_wait_s"] is not None}
    yield gauges("router_oldest_wait_seconds", "How long the first of them has waited.", "model", waits)
    yield from _predictions(pools)


def _predictions(pools: list[dict[str, Any]]) -> Iterator[Metric]:
    for of, text in (
        ("predicted", "Predicted seconds to the first token."),
        ("observed", "Observed seconds to the first token, of the same requests."),
    ):
        rows = (
            (p["model"], p["first_token"][of]["histogram"], p["first_token"][of]["total_s"]) for p in pools
        )
        yield _histogram(f"router_first_token_{of}_seconds", text, rows)
    rows = ((p["model"], p["error"]["histogram"], None) for p in pools)
    text = "How far the predicted first token was off, either way."
    yield _histogram("router_first_token_error_seconds", text, rows)
    for name, text in (
        ("bias_s", "Mean of predicted less observed."),
        ("p50_s", "Median of the absolute error, by its bucket's upper end."),
        ("p95_s", "95th percentile of the absolute error, by its bucket's upper end."),
    ):
        values = {p["model"]: p["error"][name] for p in pools if p["error"][name] is not None}
        word = name.removesuffix("_s")
        yield gauges(f"router_first_token_error_{word}_seconds", text, "model", values)


def _workers(workers: list[dict[str, Any]]) -> Iterator[Metric]:
    for name, label, words, text in (
        ("state", "state", STATES, "1 for the state that the worker is in."),
        ("breaker", "state", BREAKERS, "1 for the state of the worker's breaker."),
    ):
        values = {(w["name"], word): float(w[name] == word) for w in workers for word in words}
        yield gauges(f"router_worker_{name}", text, f"worker {label}", values)
    for name, text in (
        ("requests", "Requests sent to the worker."),
        ("opened", "Times its breaker opened."),
        ("restarts", "Lives of the worker that were seen to begin."),
    ):
        yield counters(f"router_worker_{name}", text, "worker", {w["name"]: w[name] for w in workers})
    yield counters("router_worker_failures", "Failures of the worker by kind.", "worker kind",
                   _two(workers, "name", "failures"))  # fmt: skip
    yield gauges("router_worker_under_way", "Requests under way at the worker.", "worker",
                 {w["name"]: w["under_way"] for w in workers})  # fmt: skip
    asked = {w["name"]: w["asked_s"] for w in workers if w["asked_s"] is not None}
    yield gauges("router_worker_report_age_seconds", "Since the worker was asked last.", "worker", asked)
    yield gauges("router_worker_load", "Load; 1 = as much as it should have.", "worker component",
                 _two(workers, "name", "load"))  # fmt: skip
    yield gauges("router_worker_pages", "L1's pages as the worker told.", "worker state",
                 _two(workers, "name", "pages"))  # fmt: skip
    yield gauges("router_worker_correction", "What predictions for the worker are multiplied with.",
                 "worker of", _two(workers, "name", "corrections"))  # fmt: skip


def _two(rows: list[dict[str, Any]], key: str, of: str) -> dict[tuple[str, str], float]:
    """Values by the row's key and a word; what is not known is left out."""
    return {
        (row[key], word): value
        for row in rows
        for word, value in (row[of] or {}).items()
        if value is not None
    }


def _histogram(
    name: str, text: str, rows: Iterable[tuple[str, list[int], float | None]]
) -> HistogramMetricFamily:
    """rows: model, counts by bucket, and the sum if it is known."""
    family = HistogramMetricFamily(f"hotprefix_{name}", text, labels=["model"])
    for model, counts, total in rows:
        seen, buckets = 0, []
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        family.add_metric([model], buckets, total)
    return family
