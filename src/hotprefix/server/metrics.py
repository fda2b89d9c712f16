"""GET /metrics. Owns: every metric's name, and what the server itself measures.

Rules: `hotprefix_*` names and meanings follow the project's terms. `vllm:*` are aliases with vLLM's meaning,
so that dashboards made for it work. The engine's counters start at 0 with each new engine process. A prompt's
cache lookup counts once per generation, however often the scheduler looked. What was not measured is absent,
not 0. Labels take a fixed set of values: nothing that a client sends becomes one.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from hotprefix.engine.messages import Delta, EngineStats, Timing
from hotprefix.kernel.plan import Finish
from hotprefix.server.insight_metrics import (
    STATES,
    counter,
    counters,
    gauge,
    gauges,
    insight_metrics,
    tier_pages,
)

LATENCY_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
TOKENS = tuple(2**power for power in range(18))
GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)


class Metrics:
    """One registry for one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self.engine = EngineCollector()
        self._registry.register(self.engine)
        self._aliases: dict[str, Histogram] = {}
        self._ttft = self._both("time_to_first_token_seconds", "time_to_first_token_seconds", LATENCY_S,
                                "Arrival of the request to first output token.")  # fmt: skip
        self._queue = self._both("queue_seconds", "request_queue_time_seconds", LATENCY_S,
                                 "Request queued to first admission.")  # fmt: skip
        self._prefill = self._both("prefill_seconds", "request_prefill_time_seconds", LATENCY_S,
                                   "First admission to first output token.")  # fmt: skip
        self._total = self._both("request_seconds", "e2e_request_latency_seconds", LATENCY_S,
                                 "Arrival of the request to its end.")  # fmt: skip
        self._gap = self._both("inter_token_seconds", "inter_token_latency_seconds", GAP_S,
                               "Between two deliveries of one generation, per token.")  # fmt: skip
        self._decode = self._both("decode_seconds", "request_decode_time_seconds", LATENCY_S,
                                  "First to last output token.")  # fmt: skip
        self._rate = self._both("time_per_output_token_seconds", "request_time_per_output_token_seconds",
                                GAP_S, "Decode time over output tokens after the first.")  # fmt: skip
        self._prompts = self._both("prompt_tokens", "request_prompt_tokens", TOKENS, "Prompt tokens.")
        self._outputs = self._both("output_tokens", "request_generation_tokens", TOKENS, "Output tokens.")
        self._finished = Counter("hotprefix_generations_finished", "Generations by how they ended.",
                                 ["reason"], registry=self._registry)  # fmt: skip
        self._left = Counter("hotprefix_clients_left", "Requests whose client left before the end.",
                             registry=self._registry)  # fmt: skip
        self._errors = Counter("hotprefix_http_errors", "Error answers by status.", ["status"],
                               registry=self._registry)  # fmt: skip
        self._registry.register(self)

    def _both(self, own: str, alias: str, buckets: tuple[float, ...], text: str) -> Histogram:
        histogram = Histogram(f"hotprefix_{own}", text, buckets=buckets, registry=self._registry)
        self._aliases[f"vllm:{alias}"] = histogram
        return histogram

    def collect(self) -> Iterator[Metric]:
        """vLLM's aliases of what the server measures. They are made when metrics are asked for, so that each
        token is observed only once."""
        labels = {"model_name": self.engine.model, "engine": "0"}
        for name, histogram in self._aliases.items():
            (own,) = histogram.collect()
            alias = Metric(name, own.documentation, own.type)
            alias.samples = [
                s._replace(name=name + s.name.removeprefix(own.name), labels=labels | s.labels)
                for s in own.samples
            ]
            yield alias
        success = CounterMetricFamily(
            "vllm:request_success", "Generations that ended well.", labels=[*labels, "finished_reason"]
        )
        (finished,) = self._finished.collect()
        for s in finished.samples:
            if s.name.endswith("_total") and s.labels["reason"] in (Finish.STOP, Finish.LENGTH):
                success.add_metric([*labels.values(), s.labels["reason"]], s.value)
        yield success

    def watch(self, now: float) -> Watch:
        """A `Watch` for the generations of one request that was taken at `now`."""
        return Watch(self, now)

    def ended(self, delta: Delta, seconds: float) -> None:
        """The terminal delta of a generation came `seconds` after its request was taken."""
        assert delta.finish is not None
        self._finished.labels(delta.finish.value).inc()
        if delta.finish in (Finish.STOP, Finish.LENGTH):
            self._total.observe(seconds)
            self._prompts.observe(delta.usage.prompt_tokens)
            self._outputs.observe(delta.usage.completion_tokens)
        if delta.timing is not None:
            self._timed(delta.timing, delta.usage.completion_tokens)

    def _timed(self, timing: Timing, outputs: int) -> None:
        """Observe the intervals by the engine's clock, except those that never happened."""
        for histogram, seconds in (
            (self._queue, timing.queue),
            (self._prefill, timing.prefill),
            (self._decode, timing.decode),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        if timing.decode is not None and outputs > 1:
            self._rate.observe(timing.decode / (outputs - 1))

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def gap(self, seconds: float) -> None:
        self._gap.observe(seconds)

    def client_left(self) -> None:
        self._left.inc()

    def error(self, status: int) -> None:
        self._errors.labels(str(status)).inc()

    def text(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)


class Watch:
    """The times of one request's generations. The clock's seconds are passed in."""

    def __init__(self, metrics: Metrics, start: float) -> None:
        self._metrics, self._start = metrics, start
        self._last: dict[str, float] = {}

    def delta(self, delta: Delta, now: float) -> None:
        last = self._last.get(delta.id)
        if delta.tokens:
            if last is None:
                self._metrics.first_token(now - self._start)
            else:
                for _ in delta.tokens:
                    self._metrics.gap((now - last) / len(delta.tokens))
            self._last[delta.id] = now
        if delta.finish is not None:
            self._metrics.ended(delta, now - self._start)


class EngineCollector:
    """The engine's own numbers, as of the last snapshot given to `update`."""

    def __init__(self) -> None:
        self.model = ""
        self._stats: EngineStats | None = None
        self._up = False
        self._restarts = 0

    def update(self, model: str, stats: EngineStats | None, *, up: bool, restarts: int) -> None:
        """stats: None if the engine gave none; then its numbers are absent."""
        self.model, self._stats, self._up, self._restarts = model, stats, up, restarts

    def collect(self) -> Iterator[Metric]:
        yield gauge("engine_up", "1 while a request would be answered.", self._up)
        yield counter("engine_restarts", "Engine processes that were replaced.", self._restarts)
        if self._stats is not None:
            yield from _own(self._stats)
            yield from _aliases(self._stats, self.model)
            if self._stats.insight is not None:
                yield from insight_metrics(self._stats.insight)


def _own(stats: EngineStats) -> Iterator[Metric]:
    requests = {"running": stats.running, "waiting": stats.waiting}
    yield gauges("requests", "Generations now.", "state", requests)
    pages = {}
    for state in STATES:
        pages["device", state] = getattr(stats, f"{state}_pages")
        for tier, occupancy in tier_pages(stats.insight).items():
            pages[tier, state] = getattr(occupancy, state)
    yield gauges("pages", "Pages now; the states add up to the total.", "tier state", pages)
    yield counters("reused_tokens", "Prompt tokens reused, by final source.", "source", _reused(stats))
    for name, text, value in (
        ("queried_tokens", "Prompt tokens looked up, once per request.", stats.queried_tokens),
        ("computed_tokens", "Prompt tokens computed, re-computation included.", stats.computed_tokens),
        ("generated_tokens", "Output tokens.", stats.generated_tokens),
        ("steps", "Forward passes.", stats.steps),
        ("retractions", "Running generations put back to wait.", stats.retractions),
        ("evicted_pages", "Cached pages given up for other pages.", stats.evicted_pages),
    ):
        yield counter(name, text, value)


def _reused(stats: EngineStats) -> dict[str, int]:
    return {source: getattr(stats, f"cached_{source}") for source in ("device", "host", "storage")}


def _aliases(stats: EngineStats, model: str) -> Iterator[Metric]:
    labels, values = ["model_name", "engine"], [model, "0"]
    reused = _reused(stats)
    hits = sum(reused.values())
    used = (stats.owned_pages + stats.protected_pages) / stats.total_pages
    if stats.insight is not None:  # of the fullest pool: if one is full, nothing more runs
        used = max([used, *(group.held / group.total for group in stats.insight.groups)])
    now, so_far = GaugeMetricFamily, CounterMetricFamily
    for kind, name, value, text in (
        (now, "num_requests_running", stats.running, "Requests running."),
        (now, "num_requests_waiting", stats.waiting, "Requests waiting."),
        (now, "kv_cache_usage_perc", used, "Share of KV pages in use, 0 to 1."),
        (so_far, "prefix_cache_queries", stats.queried_tokens, "Prompt tokens looked up, once per request."),
        (so_far, "prefix_cache_hits", hits, "Prompt tokens found and used."),
        (so_far, "prompt_tokens_cached", hits, "Prompt tokens found and used."),
        (so_far, "prompt_tokens", stats.prompt_tokens, "Prompt tokens of started requests."),
        (so_far, "generation_tokens", stats.generated_tokens, "Output tokens."),
        (so_far, "num_preemptions", stats.retractions, "Preemptions."),
    ):  # fmt: skip
        family = kind(f"vllm:{name}", text, labels=labels)
        family.add_metric(values, value)
        yield family
    by_source = CounterMetricFamily(
        "vllm:prompt_tokens_cached_by_source", "Prompt tokens found, by source.", labels=[*labels, "source"]
    )
    for source, tokens in reused.items():
        by_source.add_metric([*values, source], tokens)
    yield by_source
