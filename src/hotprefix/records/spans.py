"""OpenTelemetry spans: one for each request. Owns: `Spans`, what they carry, and where they are sent.

Rules:
1. A `hotprefix.request` span goes from the request's arrival to its end. Its children `queue`, `prefill` and
   `decode` cover it without gaps, and begin anew after a retraction.
2. Attributes are lengths, counts, reasons and final sources: no text, no token ids, no words of foreign
   errors. What was not measured is left out.
3. On the loop's thread a request is noted while it runs, and its spans are made when it has ended. They are
   sent on the SDK's thread, which drops what is too much.
4. This module imports the extra `otel`, so `records.open_recorder` imports it only if spans are asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from hotprefix import __version__
from hotprefix.errors import ConfigError
from hotprefix.kernel import events as ev
from hotprefix.kernel.plan import Finish, Progress

NAME = "hotprefix.request"
PATH = "/v1/traces"
CLOSE_S = 2.0
PROPAGATOR = TraceContextTextMapPropagator()
Attributes = dict[str, Any]


def open_spans(url: str) -> Spans:
    """Spans that go to an OTLP/HTTP collector; nothing is sent yet. Raises ConfigError (the URL)."""
    return Spans(otlp(url))


def otlp(url: str) -> SpanExporter:
    """What sends spans to an OTLP/HTTP collector. Raises ConfigError (the URL)."""
    return OTLPSpanExporter(endpoint=endpoint(url))


def provider(exporter: SpanExporter, service: str) -> TracerProvider:
    """Makes spans, and hands them to `exporter` on a thread of the SDK's. service: their maker's name."""
    made = TracerProvider(
        resource=Resource.create({"service.name": service, "service.version": __version__}),
        shutdown_on_exit=False,
    )
    made.add_span_processor(BatchSpanProcessor(exporter))
    return made


def parent_in(headers: Mapping[str, str]) -> Context:
    """The context of the span that a request's headers name; without one if they name none that is valid."""
    return PROPAGATOR.extract(headers, Context())


def shut_down(provider: TracerProvider, timeout_s: float = CLOSE_S) -> None:
    """Send what is queued. Waits for that at most `timeout_s`."""
    closing = threading.Thread(target=provider.shutdown, name="hotprefix-spans", daemon=True)
    closing.start()
    closing.join(timeout_s)


def endpoint(url: str) -> str:
    """The URL at which a collector takes traces: `url` itself if it has a path, else with PATH. Raises
    ConfigError if it is no http or https URL."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or any(c.isspace() for c in url):
        raise ConfigError(
            f"otel={url!r}: give an OTLP/HTTP collector's URL, for example http://127.0.0.1:4318",
            param="otel",
        )
    return url if parts.path.strip("/") else parts._replace(path=PATH).geturl()


@dataclass(slots=True)
class _Life:
    """A request that has not ended.

    enqueued: its first event.
    arrived: when it reached the server.
    parent: what its client said of its trace.
    phase: the child span that is open.
    since: when that began.
    phases: the children that have ended, as (name, begin, end).
    marks: the span's events, as (name, time, attributes).
    admitted: tokens matched in L1 at the first admission; None before it.
    ran: whether a prefill step of it has run.
    """

    enqueued: ev.Enqueued
    arrived: float
    parent: Context
    phase: str
    since: float
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    marks: list[tuple[str, float, Attributes]] = field(default_factory=list)
    admitted: int | None = None
    retractions: int = 0
    ran: bool = False

    def enter(self, phase: str, now: float) -> None:
        self.phases.append((self.phase, self.since, now))
        self.phase, self.since = phase, now


class Spans:
    """Makes spans from kernel events. The SDK hands them to `exporter` on a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._provider = provider(exporter, "hotprefix")
        self._tracer = self._provider.get_tracer("hotprefix", __version__)
        self._live: dict[str, _Life] = {}
        self._arrived: dict[str, tuple[float, Context]] = {}
        self._told: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.Enqueued: self._enqueued,
            ev.Admitted: self._admitted,
            ev.Prefilled: self._ran,
            ev.PrefillDone: self._prefilled,
            ev.Retracted: self._retracted,
            ev.Rejected: self._rejected,
        }

    def opened(self, model: str, wall: float, now: float) -> None:
        """Begin to make spans. wall: Unix time at the engine's clock `now`, seconds."""
        self._model = model
        self._zero = round(wall * 1e9) - round(now * 1e9)

    def arrived(self, request: str, now: float, trace: str | None = None) -> None:
        """Note when a request reached the server that the kernel will take or refuse next, and with what
        `traceparent`. One that cannot be read is none."""
        self._arrived[request] = now, parent_in({"traceparent": trace or ""})

    def event(self, event: ev.Event) -> None:
        told = self._told.get(type(event))
        if told is not None:
            told(event)

    def ended(self, progress: Progress, now: float) -> None:
        """Make the spans of a request that has ended. A request whose enqueue was not seen has none."""
        life = self._live.pop(progress.request, None)
        if life is None:
            return
        life.enter("", now)
        with_totals = self._known(life) | _totals(progress, life.ran)
        span = self._begin(progress.request, life.arrived, life.parent, with_totals)
        under = set_span_in_context(span, Context())
        for name, begin, end in life.phases:
            child = self._tracer.start_span(name, under, start_time=self._ns(begin))
            child.end(self._ns(end))
        for name, at, attributes in life.marks:
            span.add_event(name, attributes, self._ns(at))
        if progress.finish is Finish.ERROR:
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._ns(now))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what is queued. Waits for that at most `timeout_s`. Requests that have not ended have no
        span."""
        shut_down(self._provider, timeout_s)

    # -- events -----------------------------------------------------------------------------------

    def _enqueued(self, event: ev.Enqueued) -> None:
        arrived, parent = self._arrived.pop(event.request, (event.now, Context()))
        self._live[event.request] = _Life(event, arrived, parent, "queue", arrived)

    def _admitted(self, event: ev.Admitted) -> None:
        life = self._live[event.request]
        life.enter("prefill", event.now)
        if not event.again:
            life.admitted = event.matched
        if event.restored_host or event.restored_storage:
            tokens = {"hotprefix.host": event.restored_host, "hotprefix.storage": event.restored_storage}
            life.marks.append(("restore", event.now, tokens))

    def _ran(self, event: ev.Prefilled) -> None:
        self._live[event.request].ran = True

    def _prefilled(self, event: ev.PrefillDone) -> None:
        self._live[event.request].enter("decode", event.now)

    def _retracted(self, event: ev.Retracted) -> None:
        """Note a retraction. Behind a colon the reason of a failed step has foreign words, which are left
        out."""
        life = self._live[event.request]
        life.enter("queue", event.now)
        life.retractions += 1
        why = {"hotprefix.reason": event.reason.partition(":")[0], "hotprefix.lost_tokens": event.lost}
        life.marks.append(("retract", event.now, why))

    def _rejected(self, event: ev.Rejected) -> None:
        arrived, parent = self._arrived.pop(event.request, (event.now, Context()))
        span = self._begin(event.request, arrived, parent, {"error.type": "rejected"})
        span.set_status(Status(StatusCode.ERROR, event.reason))
        span.end(self._ns(event.now))

    # -- spans ------------------------------------------------------------------------------------

    def _ns(self, now: float) -> int:
        return self._zero + round(now * 1e9)

    def _begin(self, request: str, now: float, parent: Context, attributes: Attributes) -> Span:
        """Begin a request's span, which is the root of a trace of its own if it has no parent."""
        names = {"gen_ai.response.id": request, "gen_ai.response.model": self._model}
        return self._tracer.start_span(NAME, parent, attributes=names | attributes, start_time=self._ns(now))

    def _known(self, life: _Life) -> Attributes:
        found: Attributes = {
            "gen_ai.usage.input_tokens": life.enqueued.prompt_tokens,
            "hotprefix.matched_at_enqueue": life.enqueued.matched,
            "hotprefix.parked": life.enqueued.parked,
            "hotprefix.retractions": life.retractions,
        }
        if life.admitted is not None:
            found["hotprefix.matched_at_admission"] = life.admitted
        return found


def _totals(progress: Progress, ran: bool) -> Attributes:
    """The attributes that a request's last progress gives. If the request never ran, they say nothing about
    the cache. An error is named by its type, which stands before the colon."""
    assert progress.finish is not None
    found: Attributes = {
        "gen_ai.response.finish_reasons": (progress.finish.value,),
        "gen_ai.usage.output_tokens": progress.outputs,
    }
    if ran:
        found |= {
            "gen_ai.usage.cache_read.input_tokens": progress.cached,
            "hotprefix.cached.device": progress.cached - progress.host - progress.storage,
            "hotprefix.cached.host": progress.host,
            "hotprefix.cached.storage": progress.storage,
            "hotprefix.computed_tokens": progress.computed,
            "hotprefix.recomputed_tokens": progress.recomputed,
        }
    if progress.error is not None:
        found["error.type"] = progress.error.partition(":")[0]
    return found
