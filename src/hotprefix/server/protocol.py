"""HTTP on one connection, bounded. Owns: how many bytes and how much time a client may take for each part of
a request, and the answer if it takes more.

Rules:
1. The parser never sees more of a head, of a body's framing or of its trailers than `max_header_bytes` and
   one slice, so neither its work nor its memory grows with what a client sends. This is decided before any
   key is looked at.
2. Every wait for a client ends: for a head, for a body, for the next request, for a client that reads.
3. Requests are taken one at a time: what a client sends ahead is not parsed.
4. What is refused here has the same error body as everywhere else, and a moment to arrive before the
   connection closes.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from hotprefix.server.config import ServerConfig
from hotprefix.server.connections import Connections, connections_allowed
from hotprefix.server.errors import LINGER_S, ApiError

SLICE_BYTES = 16 * 1024
THROWN_AWAY_BYTES = 1024 * 1024


class _Stop(Exception):
    """Raised inside a callback of the parser, to end it there."""


class BoundedHttp(HttpToolsProtocol):
    """A connection that keeps to `ServerConfig`'s limits. told: called with the status of each refusal."""

    def __init__(
        self, limits: ServerConfig, open_ones: Connections, told: Callable[[int], None], **uvicorn: Any
    ) -> None:
        super().__init__(**uvicorn)
        self._limits, self._open_ones, self._told = limits, open_ones, told
        self._deadline: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._in_head = False
        self._in_body = False
        self._deaf = False
        self._fed = 0  # bytes since a request's end, a head's start or a piece of a body
        self._body_bytes = 0
        self._body_began = 0.0
        self._thrown_away = 0

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # -- the connection ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._open_ones.join(self):
            self._await_head()
            return
        limit = self._open_ones.limit
        message = f"all {limit} connections (--max-connections) have a request in progress: try again later"
        error = ApiError(503, message, code="too_many_connections", headers={"retry-after": "1"})
        self._deaf = True
        self._told(error.status)
        self.transport.write(_raw_answer(error))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_ones.leave(self)
        self._clear()
        super().connection_lost(exc)

    def give_way(self) -> None:
        """Close at once. Called only if the connection has no request in progress."""
        self._deaf = True
        self._clear()
        if self.transport.get_write_buffer_size():  # an answer that the client does not read
            self.transport.abort()
        else:
            self.transport.close()

    def _clear(self) -> None:
        self._set_deadline(None)
        self._unset_keepalive_if_required()
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _set_deadline(self, seconds: float | None, then: Callable[[], None] | None = None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None or then is None else self.loop.call_later(seconds, then)

    # -- reading ----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        view = memoryview(data)
        for at in range(0, len(view), SLICE_BYTES):
            if self._deaf:
                self._throw_away(len(view) - at)
                return
            if not (self._in_head or self._in_body or self._answering):  # the first bytes of a request
                self._unset_keepalive_if_required()
                if self._deadline is None:
                    self._await_head()
            part = view[at : at + SLICE_BYTES]
            self._fed += len(part)
            self._feed(part)

    def _feed(self, part: memoryview) -> None:
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade:
            # What follows is not HTTP/1.1: if it were read as requests, one could hide in another.
            self._unsupported_upgrade_warning()
            self._read_no_more()
        except httptools.HttpParserError:
            if self._refusal is not None:
                self.refuse(self._refusal)
            elif not self._deaf:
                message = "this is not HTTP/1.1: the request cannot be read"
                self.refuse(ApiError(400, message, code="invalid_http"))
        else:
            if self._fed > self._limits.max_header_bytes and not self._deaf:
                self.refuse(self._head_too_large())

    def _throw_away(self, size: int) -> None:
        """Read on for a while, so that the answer arrives. A client that sends more than that is not read any
        further."""
        self._thrown_away += size
        if self._thrown_away > THROWN_AWAY_BYTES:
            if self._answering:  # without reading it would not be seen that the client leaves
                self.transport.abort()
            else:
                self.flow.pause_reading()

    def _read_no_more(self) -> None:
        """Make the request in progress this connection's last one."""
        self._deaf = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _stop(self, error: ApiError) -> NoReturn:
        self._refusal = error
        raise _Stop

    def _head_too_large(self) -> ApiError:
        limit = self._limits.max_header_bytes
        what = (
            "what frames the body (chunk headers, trailers)" if self._in_body else "request line and headers"
        )
        message = f"{what}: more than {limit} bytes (--max-header-bytes); send less"
        return ApiError(431, message, code="headers_too_large")

    def on_message_begin(self) -> None:
        if self._answering:  # a client that sends ahead must be ready to repeat it
            self._read_no_more()
            raise _Stop
        self._in_head, self._fed = True, 0
        self._await_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # a trailer, which no route wants
            return
        limit = self._limits.max_headers
        if len(self.headers) >= limit:
            message = f"the request has more than {limit} headers (--max-headers): send fewer"
            self._stop(ApiError(431, message, code="headers_too_large"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_header_bytes:
            self._stop(self._head_too_large())
        self._in_head, self._in_body, self._fed = False, True, 0
        self._body_bytes, self._body_began = 0, self.loop.time()
        self._set_deadline(self._limits.body_timeout_s, self._body_late)
        self._open_ones.busy(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._fed = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body, self._fed = False, 0
        self._set_deadline(None)
        super().on_message_complete()
        if not self._answering and not self._deaf:  # the answer came before the body's end
            self._open_ones.idle(self)

    # -- limits of time ---------------------------------------------------------------------------

    def _await_head(self) -> None:
        self._set_deadline(self._limits.header_timeout_s, self._head_late)

    def _head_late(self) -> None:
        if not self._in_head:  # there is no request, so there is no answer
            self.give_way()
            return
        limit = self._limits.header_timeout_s
        message = f"the headers took longer than {limit:g} s (--header-timeout): send them at once"
        self.refuse(ApiError(408, message, code="request_timeout"))

    def _body_late(self) -> None:
        """The body's time is over. Each byte that came in adds time, so a slow line is no failure, but a
        silent client is."""
        allowed = self._limits.body_timeout_s + self._body_bytes / self._limits.min_body_rate
        left = self._body_began + allowed - self.loop.time()
        if left > 0:
            self._set_deadline(left, self._body_late)
            return
        limits = self._limits
        message = (
            f"the body came too slowly: {self._body_bytes} bytes in {allowed:.0f} s; the limit is "
            f"{limits.body_timeout_s:g} s (--body-timeout) and one more for each {limits.min_body_rate} "
            "bytes (--min-body-rate)"
        )
        self.refuse(ApiError(408, message, code="request_timeout"))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():  # it closes when the client has read what was written
            self._set_deadline(self._limits.send_timeout_s, self.transport.abort)
        elif self._in_body:  # answered before it was read; see `Lingering`
            self._set_deadline(LINGER_S, self.transport.abort)
        else:
            self._open_ones.idle(self)

    def timeout_keep_alive_handler(self) -> None:
        self.give_way()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self.loop.call_later(self._limits.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    # -- refusing ---------------------------------------------------------------------------------

    def refuse(self, error: ApiError) -> None:
        """Answer with an error, unless an answer has begun, and close. What the client still sends is thrown
        away for a moment, because closing on unread data can destroy the answer on its way."""
        self._deaf = True
        self._clear()
        self._told(error.status)
        begun = self._answering and self.cycle.response_started
        if not begun:
            self.transport.write(_raw_answer(error))
        if self._answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if begun or not self.transport.can_write_eof():
            self.transport.abort()
            return
        self.transport.write_eof()
        self.flow.resume_reading()
        self._set_deadline(LINGER_S, self.transport.abort)


def _raw_answer(error: ApiError) -> bytes:
    body = json.dumps(error.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close",
               **error.headers}  # fmt: skip
    lines = b"".join(f"{name}: {value}\r\n".encode("latin-1") for name, value in headers.items())
    return STATUS_LINE[error.status] + lines + b"\r\n" + body


def bounded_http(limits: ServerConfig, told: Callable[[int], None]) -> Callable[..., BoundedHttp]:
    """A factory of each connection's protocol, as uvicorn takes it."""
    open_ones = Connections(limits.max_connections or connections_allowed())
    return functools.partial(BoundedHttp, limits, open_ones, told)
