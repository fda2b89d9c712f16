"""OpenTelemetry spans: exact for small runs, true for random ones, and harmless whatever becomes of them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from hotprefix.engine.config import EngineConfig
from hotprefix.engine.messages import Generate
from hotprefix.engine.params import SamplingParams
from hotprefix.errors import ConfigError, QueueFull, RequestRejected
from hotprefix.kernel import events as ev
from hotprefix.kernel.config import TierConfig
from hotprefix.kernel.plan import Finish
from hotprefix.records.open_recorder import open_recorder
from hotprefix.records.recorder import Recorder, RecordOptions
from hotprefix.records.spans import NAME, Spans, endpoint
from tests.support.engine import drain, fake_loop
from tests.support.observed import WatchedDriver, program, run

KEY = bytes(32)
WALL = 1_700_000_000.0
TOKENS = list(range(41))  # 10 pages of 4 and a token


class Traced:
    """A recorder that makes spans, its clock's zero at WALL, and what it exported."""

    def __init__(self) -> None:
        self.memory = InMemorySpanExporter()
        self.recorder = Recorder(RecordOptions(KEY, spans=Spans(self.memory)), wall=lambda: WALL)

    def spans(self) -> tuple[ReadableSpan, ...]:
        assert self.recorder._spans is not None
        self.recorder._spans.close(timeout_s=60.0)
        return self.memory.get_finished_spans()


def at(ns: int | None) -> float:
    """Seconds of the engine's clock."""
    assert ns is not None
    return (ns - int(WALL) * 10**9) / 1e9


def roots(spans: Sequence[ReadableSpan]) -> dict[str, ReadableSpan]:
    found = [s for s in spans if s.name == NAME]
    named = {str(s.attributes["gen_ai.response.id"]): s for s in found if s.attributes}
    assert len(named) == len(found)
    assert all(s.parent is None for s in found)
    return named


def children(spans: Sequence[ReadableSpan], root: ReadableSpan) -> list[tuple[str, float, float]]:
    below = [s for s in spans if s.parent is not None and s.parent.span_id == root.context.span_id]
    assert {s.context.trace_id for s in below} <= {root.context.trace_id}
    return [(s.name, at(s.start_time), at(s.end_time)) for s in below]


def said(root: ReadableSpan) -> dict[str, Any]:
    return dict(root.attributes or {})


def marks(root: ReadableSpan) -> list[tuple[str, float, dict[str, Any]]]:
    return [(e.name, at(e.timestamp), dict(e.attributes or {})) for e in root.events]


# -- exact ----------------------------------------------------------------------------------------


def test_a_request_is_one_span_with_its_phases_and_sources() -> None:
    traced = Traced()
    d = WatchedDriver(traced.recorder, page_size=4)
    d.submit("a", TOKENS, 1)
    d.run()
    d.now = 10.0
    d.submit("b", TOKENS, 3)
    d.now = 12.0
    d.run()
    spans = traced.spans()
    found = roots(spans)
    assert list(found) == ["a", "b"]
    b = found["b"]
    assert (at(b.start_time), at(b.end_time)) == (10.0, 15.0)
    assert children(spans, b) == [("queue", 10.0, 12.0), ("prefill", 12.0, 13.0), ("decode", 13.0, 15.0)]
    assert said(b) == {
        "gen_ai.response.id": "b",
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 41,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 40,
        "hotprefix.cached.device": 40,
        "hotprefix.cached.host": 0,
        "hotprefix.cached.storage": 0,
        "hotprefix.computed_tokens": 3,
        "hotprefix.recomputed_tokens": 0,
        "hotprefix.matched_at_enqueue": 40,
        "hotprefix.matched_at_admission": 40,
        "hotprefix.parked": False,
        "hotprefix.retractions": 0,
    }
    assert marks(b) == []
    assert b.status.status_code is StatusCode.UNSET
    assert said(found["a"])["gen_ai.usage.cache_read.input_tokens"] == 0
    assert children(spans, found["a"]) == [("queue", 0.0, 0.0), ("prefill", 0.0, 1.0), ("decode", 1.0, 1.0)]
    assert b.resource.attributes["service.name"] == "hotprefix"


def test_an_abort_while_waiting_has_only_what_was_measured() -> None:
    traced = Traced()
    d = WatchedDriver(traced.recorder, page_size=4)
    d.submit("a", TOKENS, 3)
    d.now = 2.0
    d.abort("a")
    spans = traced.spans()
    a = roots(spans)["a"]
    assert children(spans, a) == [("queue", 0.0, 2.0)]
    assert said(a)["gen_ai.response.finish_reasons"] == ("abort",)
    assert "hotprefix.matched_at_admission" not in said(a)
    assert a.status.status_code is StatusCode.UNSET


def test_a_rejected_request_is_a_span_of_no_length() -> None:
    traced = Traced()
    d = WatchedDriver(traced.recorder, page_size=4, max_waiting=1, max_running=1)
    d.submit("a", TOKENS, 1)
    d.submit("c", TOKENS, 1)
    d.now = 1.0
    with pytest.raises(QueueFull) as caught:
        d.submit("b", TOKENS, 1)
    d.run()
    found = roots(traced.spans())
    assert list(found) == ["b", "a", "c"]
    b = found["b"]
    assert (at(b.start_time), at(b.end_time)) == (1.0, 1.0)
    assert said(b) == {
        "gen_ai.response.id": "b", "gen_ai.response.model": "fake", "error.type": "rejected",
    }  # fmt: skip
    assert (b.status.status_code, b.status.description) == (StatusCode.ERROR, str(caught.value))
    assert said(found["a"])["gen_ai.response.finish_reasons"] == ("length",)


def test_a_retraction_begins_the_phases_anew() -> None:
    traced = Traced()
    d = WatchedDriver(traced.recorder, page_size=4)
    d.submit("a", TOKENS, 3)
    d.step()
    d.executor.fail_next = 1
    d.step()
    d.run().assert_cold_equal()
    spans = traced.spans()
    a = roots(spans)["a"]
    assert children(spans, a) == [
        ("queue", 0.0, 0.0), ("prefill", 0.0, 1.0), ("decode", 1.0, 2.0),
        ("queue", 2.0, 2.0), ("prefill", 2.0, 3.0), ("decode", 3.0, 4.0),
    ]  # fmt: skip
    [(name, when, why)] = marks(a)
    assert (name, when) == ("retract", 2.0)
    assert why == {"hotprefix.reason": f"step {d.plans[1].step} failed", "hotprefix.lost_tokens": 41}
    assert said(a)["hotprefix.retractions"] == 1
    assert said(a)["hotprefix.matched_at_admission"] == 0, "of the first"
    assert said(a)["hotprefix.recomputed_tokens"] == d.kernel.counters.recomputed_tokens


def test_a_restore_from_the_host_tier_is_told_with_its_tokens() -> None:
    traced = Traced()
    d = WatchedDriver(
        traced.recorder, total_pages=12, page_size=4, tiers=TierConfig(pages=40, min_restore_pages=1)
    )
    d.submit("a", TOKENS, 1)
    d.run()
    d.submit("evictor", [95] * 47, 1, salt="other")
    d.run()
    d.now = 10.0
    d.submit("b", TOKENS, 1)
    d.run().assert_cold_equal()
    assert d.sources["b"] == (0, 40, 0)
    b = roots(traced.spans())["b"]
    assert marks(b) == [("restore", 10.0, {"hotprefix.host": 40, "hotprefix.storage": 0})]
    assert said(b)["gen_ai.usage.cache_read.input_tokens"] == said(b)["hotprefix.cached.host"] == 40
    assert (said(b)["hotprefix.matched_at_enqueue"], said(b)["hotprefix.matched_at_admission"]) == (0, 0)


def test_the_parent_is_the_client_s_span_if_it_names_one() -> None:
    traced = Traced()
    loop, _, _ = fake_loop(observer=traced.recorder, total_pages=20, page_size=4)
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    given = {"child": f"00-{trace}-{parent}-01", "garbage": "00-xyz", "zero": f"00-{'0' * 32}-{parent}-01",
             "none": None, "silent": f"00-{trace}-{parent}-00"}  # fmt: skip
    for name, header in given.items():
        loop.submit(Generate(name, (1, 2, 3), SamplingParams(max_tokens=2), trace=header))
    with pytest.raises(RequestRejected):
        loop.submit(Generate("refused", (1,) * 90, SamplingParams(max_tokens=1), trace=given["child"]))
    drain(loop)
    spans = traced.spans()
    found = {str((s.attributes or {})["gen_ai.response.id"]): s for s in spans if s.name == NAME}
    assert found.keys() == {"child", "garbage", "zero", "none", "refused"}, "silent is not sampled"
    for name, span in found.items():
        if name in ("child", "refused"):
            assert span.parent is not None
            assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (trace, parent)
        else:
            assert span.parent is None
    assert [name for name, _, _ in children(spans, found["child"])] == ["queue", "prefill", "decode"]


def test_errors_keep_their_type_and_lose_their_words() -> None:
    """What an executor raises may quote anything."""
    traced = Traced()
    loop, executor, _ = fake_loop(observer=traced.recorder, max_step_failures=1)
    executor.poison.add("bad")
    for name in ("bad", "good"):
        loop.submit(Generate(name, (1, 2, 3), SamplingParams(max_tokens=2)))
    drain(loop)
    spans = traced.spans()
    found = roots(spans)
    bad = found["bad"]
    assert bad.status.status_code is StatusCode.ERROR
    assert (said(bad)["error.type"], said(bad)["gen_ai.response.finish_reasons"]) == (
        "ValueError",
        ("error",),
    )
    assert "error.type" not in said(found["good"])
    assert [name for name, _, _ in marks(bad)] == ["retract"] * said(bad)["hotprefix.retractions"] != []
    assert "poisonous" not in "".join(span.to_json() for span in spans)


def test_a_refused_second_use_of_an_id_leaves_the_first_alone() -> None:
    traced = Traced()
    d = WatchedDriver(traced.recorder, page_size=4)
    d.submit("a", TOKENS, 1)
    with pytest.raises(RequestRejected, match="in use"):
        d.submit("a", TOKENS, 1)
    d.run()
    refused, first = [said(s) for s in traced.spans() if s.name == NAME]
    assert refused["error.type"] == "rejected"
    assert first["gen_ai.response.finish_reasons"] == ("length",)


# -- random programs ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_spans_are_true_and_durations_never_negative(seed: int) -> None:
    traced = Traced()
    seen: list[ev.Event] = []
    event = traced.recorder.event
    traced.recorder.event = lambda e: (seen.append(e), event(e))[1]  # type: ignore[method-assign,func-returns-value]
    d = run(program(seed), traced.recorder)
    spans = traced.spans()
    assert d.kernel.sink_failure is None
    assert traced.recorder._spans is not None
    assert traced.recorder._spans._live == {}
    rejected = [s for s in spans if said(s).get("error.type") == "rejected"]
    found = roots([s for s in spans if s not in rejected])
    assert len(rejected) == sum(isinstance(e, ev.Rejected) for e in seen)
    assert set(found) == set(d.finish)
    enqueued = {e.request: e for e in seen if isinstance(e, ev.Enqueued)}
    for name, root in found.items():
        phases = children(spans, root)
        assert phases[0][0] == "queue"
        assert all(begin <= end for _, begin, end in phases)
        assert [begin for _, begin, _ in phases[1:]] == [end for _, _, end in phases[:-1]]
        assert (phases[0][1], phases[-1][2]) == (at(root.start_time), at(root.end_time))
        assert phases[0][1] == enqueued[name].now
        assert all(at(root.start_time) <= t <= at(root.end_time) for _, t, _ in marks(root))
        told = said(root)
        assert told["gen_ai.response.finish_reasons"] == (d.finish[name].value,)
        if not d.computed.get(name):
            assert not [key for key in told if "cache" in key or "computed" in key], "nothing was measured"
            continue
        sources = tuple(told[f"hotprefix.cached.{tier}"] for tier in ("device", "host", "storage"))
        assert sources == d.sources[name]
        assert told["gen_ai.usage.cache_read.input_tokens"] == sum(sources) == d.cached[name]
        assert told["gen_ai.usage.output_tokens"] == len(d.outputs[name])
        assert told["hotprefix.computed_tokens"] == d.computed[name]
    assert sum(said(s)["hotprefix.retractions"] for s in found.values()) == d.kernel.counters.retractions
    assert Finish.LENGTH in d.finish.values()


# -- exporters that are no good -------------------------------------------------------------------


class Raising(SpanExporter):
    calls = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.calls += 1
        raise RuntimeError("the exporter is broken")

    def shutdown(self) -> None:
        raise RuntimeError("the exporter is still broken")


class Hanging(SpanExporter):
    def __init__(self) -> None:
        self.release = threading.Event()
        self.held = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.held.set()
        self.release.wait(120)
        return SpanExportResult.SUCCESS


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exporter_that_raises_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    exporter = Raising()
    spans = Spans(exporter)
    recorder = Recorder(RecordOptions(KEY, spans=spans))
    lit, dark = run(program(5), recorder), run(program(5))
    spans.close(timeout_s=60.0)
    assert exporter.calls > 0
    assert recorder.stats().failed is None
    assert [repr(p) for p in lit.plans] == [repr(p) for p in dark.plans]


def test_an_exporter_that_hangs_holds_neither_steps_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """More spans than the SDK's queue takes, while the exporter holds the first batch."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    exporter = Hanging()
    spans = Spans(exporter)
    recorder = Recorder(RecordOptions(KEY, spans=spans))
    try:
        lit = WatchedDriver(recorder)
        for n in range(20):
            lit.submit(f"r{n}", [n, 1, 2], 2)
            lit.run()
            if n == 5:
                assert exporter.held.wait(60)
        spans.close(timeout_s=0.01)
        assert "hotprefix-spans" in {t.name for t in threading.enumerate()}, "it was not waited for"
        assert len(lit.finish) == 20
        assert not exporter.release.is_set()
    finally:
        exporter.release.set()


# -- from settings to a collector -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://[::1]:4318?a=b", "http://[::1]:4318/v1/traces?a=b"),
        ("http://collector/otlp/v1/traces", "http://collector/otlp/v1/traces"),
    ],
)
def test_a_url_without_a_path_gets_the_usual_one(url: str, where: str) -> None:
    assert endpoint(url) == where


@pytest.mark.parametrize(
    "url",
    ["", "localhost:4318", "ftp://collector", "http://", "http://h:port", "http://h:99999", "http://h:0",
     "http://a b", "http://[::1"],
)  # fmt: skip
def test_a_bad_url_is_refused_with_the_fix(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_recorder(EngineConfig(otel=url))
    assert str(caught.value) == (
        f"otel={url!r}: give an OTLP/HTTP collector's URL, for example http://127.0.0.1:4318"
    )


@pytest.mark.parametrize("missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"])
def test_without_the_packages_the_fix_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hotprefix.records.spans")
    for name in [m for m in sys.modules if m.startswith(missing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"pip install 'hotprefix\[otel\]'"):
        open_recorder(EngineConfig(otel="http://127.0.0.1:4318"))
    assert open_recorder(EngineConfig()).wants_events is False


def test_bad_settings_are_found_before_a_model_is_looked_for() -> None:
    from hotprefix.server.serve import build

    with pytest.raises(ConfigError, match="otel="):
        build(EngineConfig(model="no/such/model", otel="nowhere"), lambda line: None)


class Collector(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Take)
        self.got: list[tuple[str, ExportTraceServiceRequest]] = []
        self.arrived = threading.Event()


class _Take(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.server.arrived.set()
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_spans_reach_a_collector_by_http_when_the_loop_closes(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10000000")  # nothing else sends them
    recorder = open_recorder(EngineConfig(otel=f"http://127.0.0.1:{collector.server_port}"))
    loop, _, clock = fake_loop(observer=recorder)
    loop.submit(Generate("a", (1, 2, 3), SamplingParams(max_tokens=2)))
    clock.now = 3.0
    drain(loop)
    loop.close()
    assert collector.arrived.wait(60), "the close waits for it, but not for ever"
    [(path, request)] = collector.got
    assert path == "/v1/traces"
    [scope] = request.resource_spans[0].scope_spans
    assert [s.name for s in scope.spans] == ["queue", "prefill", "decode", NAME]
    queue, *_, root = scope.spans
    assert queue.end_time_unix_nano - queue.start_time_unix_nano == 3 * 10**9
    assert queue.parent_span_id == root.span_id
