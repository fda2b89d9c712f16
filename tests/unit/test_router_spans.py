"""The router's spans: between the client's and the worker's, one for each request, whatever becomes of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from hotprefix.errors import ConfigError
from hotprefix.router import route_spans
from tests.support.routing import FakeWorker, Routing, fleet, refuses, report, says

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=1", "baggage": "k=v"}
BODY = {"prompt": "a secret text", "stream": True}


@contextlib.asynccontextmanager
async def traced(
    monkeypatch: pytest.MonkeyPatch, *workers: FakeWorker, **settings: Any
) -> AsyncIterator[tuple[Routing, list[ReadableSpan]]]:
    """A router, and its spans once it is closed."""
    memory, spans = InMemorySpanExporter(), []  # type: ignore[var-annotated]
    monkeypatch.setattr(route_spans, "otlp", lambda url: memory)
    async with fleet(*workers, otel="http://127.0.0.1:4318", **settings) as before:
        yield before, spans
    spans += memory.get_finished_spans()


async def test_it_stands_between_the_client_s_span_and_the_worker_s(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker("w0", says("a"), load=report())
    async with traced(monkeypatch, worker) as (before, spans):
        assert (await before.http.post("/v1/completions", json=BODY, headers=CONTEXT)).status_code == 200
    (span,) = spans
    got = worker.asked[0].headers
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert got["traceparent"] == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert (got["tracestate"], got["baggage"]) == ("a=1", "k=v")
    assert len([name for name, _ in worker.asked[0].raw_headers if name == b"traceparent"]) == 1
    said = dict(span.attributes or {})
    assert said.pop("hotprefix.first_s") > 0  # type: ignore[operator]
    assert said.pop("hotprefix.predicted_first_s") > 0  # type: ignore[operator]
    assert said == {
        "hotprefix.worker": "w0", "hotprefix.rule": "least_predicted", "hotprefix.found_tokens": 0,
        "gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 3, "hotprefix.attempts": 1,
        "hotprefix.ending": "ended", "http.response.status_code": 200,
    }  # fmt: skip
    assert span.status.status_code is StatusCode.UNSET
    assert span.start_time is not None
    assert span.end_time is not None
    assert 0 < span.end_time - span.start_time < 60e9


async def test_a_request_without_a_parent_begins_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker("w0", says("a"))
    async with traced(monkeypatch, worker) as (before, spans):
        zero = f"00-{'0' * 32}-{PARENT}-01"
        for given in ({}, {"traceparent": "garbage", "tracestate": "a=1"}, {"traceparent": zero}):
            await before.http.post("/v1/completions", json=BODY, headers=given)
    assert [span.parent for span in spans] == [None, None, None]
    assert len({span.context.trace_id for span in spans}) == 3
    for span, asked in zip(spans, worker.asked, strict=True):
        assert "tracestate" not in asked.headers, "it belongs to the parent that could not be read"
        assert asked.headers["traceparent"].split("-")[1:3] == [
            f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"
        ]  # fmt: skip


async def test_what_the_client_does_not_sample_is_passed_on_and_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = FakeWorker("w0", says("a"))
    async with traced(monkeypatch, worker) as (before, spans):
        await before.http.post(
            "/v1/completions", json=BODY, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}
        )
    assert spans == []
    version, trace, _, flags = worker.asked[0].headers["traceparent"].split("-")
    assert (version, trace, flags) == ("00", TRACE, "00")


async def test_retries_failures_and_the_request_s_own_errors_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = FakeWorker("bad", refuses(500))
    settings: Any = {"policy": "round_robin", "breaker_failures": 99}
    async with traced(monkeypatch, bad, FakeWorker("w0", says("a")), **settings) as (before, spans):
        for _ in range(2):
            await before.ask(stream=True)
    retried = next(s for s in spans if (s.attributes or {})["hotprefix.attempts"] == 2)
    workers = [(e.attributes or {})["hotprefix.worker"] for e in retried.events]
    assert workers == ["bad", "w0"]
    assert retried.status.status_code is StatusCode.UNSET

    for status, code in ((500, StatusCode.ERROR), (400, StatusCode.UNSET)):
        async with traced(monkeypatch, FakeWorker("w0", refuses(status))) as (before, spans):
            assert (await before.ask()).status_code == status
        (span,) = spans
        assert (span.status.status_code, (span.attributes or {})["hotprefix.ending"]) == (code, "failed")

    async with traced(monkeypatch, FakeWorker("w0", says("a")), hold_s=0.0) as (before, spans):
        before.router.roster.drain("w0")
        assert (await before.ask()).status_code == 503
    assert [(s.attributes or {})["hotprefix.attempts"] for s in spans] == [0]


async def test_a_bad_address_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="otel='nowhere': give an OTLP/HTTP collector's URL"):
        async with fleet(FakeWorker("w0", says("a")), otel="nowhere"):
            raise AssertionError("it must not start")
