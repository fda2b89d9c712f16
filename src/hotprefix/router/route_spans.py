"""OpenTelemetry spans of the router: one for each request. Owns: `RouteSpans`, `RouteSpan`.

Rules:
1. A `hotprefix.route` span goes from the request's arrival to its end. Its parent is the client's span, by
   the `traceparent` header; the worker gets the router's, so that its span becomes a child.
2. Attributes are names of workers and models, counts, times and reasons: no text, no token ids, nothing else
   that a client sent.
3. Spans are sent on the SDK's thread, which drops what is too much.
4. This module imports the extra `otel`, so it is imported only if spans are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from multidict import CIMultiDict
from opentelemetry.context import Context
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from hotprefix.fleet.records import Stage
from hotprefix.records.spans import PROPAGATOR, otlp, parent_in, provider, shut_down
from hotprefix.router.ticket import Ticket

NAME = "hotprefix.route"
CONTEXT = ("traceparent", "tracestate")


class RouteSpan:
    """The span of one request that has not ended."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def goes(self, ticket: Ticket, headers: CIMultiDict[str]) -> None:
        """The request goes to the worker of its decision, with these headers, which then name this span."""
        found = ticket.decision
        assert found is not None
        predicted: dict[str, str | float] = {
            "hotprefix.worker": found.worker, "hotprefix.rule": found.rule,
            "hotprefix.predicted_first_s": found.parts.first, "hotprefix.found_tokens": found.found.total,
        }  # fmt: skip
        self._span.add_event("route", predicted)
        self._span.set_attributes(predicted)
        for name in CONTEXT:
            headers.popall(name, None)
        PROPAGATOR.inject(headers, set_span_in_context(self._span, Context()))

    def ended(self, ticket: Ticket, model: str, stage: Stage, status: int | None) -> None:
        """The request has ended. status: of a worker's answer that was passed on; None = there was none, or
        not to its end."""
        self._span.set_attributes(
            {"gen_ai.request.model": model, "gen_ai.usage.input_tokens": ticket.request.prompt,
             "hotprefix.attempts": ticket.attempt, "hotprefix.ending": stage.value}
        )  # fmt: skip
        if ticket.first_s is not None:
            self._span.set_attribute("hotprefix.first_s", ticket.first_s)
        if status is not None:
            self._span.set_attribute("http.response.status_code", status)
        if stage is Stage.FAILED and (status is None or status >= 500):
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class RouteSpans:
    """Makes spans, which the SDK hands to `exporter` on a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._provider = provider(exporter, "hotprefix-router")
        self._tracer = self._provider.get_tracer("hotprefix")

    def begin(self, headers: Mapping[str, str], arrived: float) -> RouteSpan:
        """A request has come. headers: the client's. arrived: when, by `time.monotonic`."""
        start = time.time_ns() - max(0, round((time.monotonic() - arrived) * 1e9))
        parent = parent_in(headers)
        return RouteSpan(self._tracer.start_span(NAME, parent, kind=SpanKind.SERVER, start_time=start))

    def close(self) -> None:
        """Send what is queued. Waits for that at most 2 s."""
        shut_down(self._provider)


def open_route_spans(url: str) -> RouteSpans:
    """Spans that go to an OTLP/HTTP collector; nothing is sent yet. Raises ConfigError (the URL)."""
    return RouteSpans(otlp(url))
