"""Running generations for one HTTP request. Owns: the response that streams or collects, and its end.

Rules: nothing is sent before the first delta, so a refusal or an early failure still gets its status. Only
keep-alive comments, if they are configured, may come before. A failure after that is an SSE error event,
without [DONE]. If the client leaves, all of the request's generations end at once; they do so on every error,
too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from pydantic_core import to_json
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from hotprefix.engine.client import Health, Stream
from hotprefix.engine.messages import (
    Delta,
    EngineInfo,
    EngineLoad,
    EngineStats,
    FlushReport,
    Generate,
    KVSnapshot,
)
from hotprefix.errors import HotprefixError
from hotprefix.kernel.plan import Finish
from hotprefix.server.answer import Answer, Chunk
from hotprefix.server.errors import ApiError, from_error
from hotprefix.server.guard import ARRIVED, Gate
from hotprefix.server.metrics import Metrics, Watch
from hotprefix.server.resume import LOST, mark_line

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
KEEPALIVE = b": keep-alive\n\n"


class Engine(Protocol):
    """What the server needs of an engine; `engine.client.AsyncEngine` is one."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def restarts(self) -> int: ...
    def health(self) -> Health: ...
    async def submit(self, requests: Sequence[Generate]) -> Stream: ...
    async def flush_cache(self) -> FlushReport: ...
    async def stats(self) -> EngineStats: ...
    async def load(self) -> EngineLoad: ...
    async def kv_snapshot(self) -> KVSnapshot | None: ...


class GenerationResponse(Response):
    """Submits the answer's requests when it is called, and sends what comes of them."""

    def __init__(
        self, answer: Answer, engine: Engine, gate: Gate, metrics: Metrics, *, sse: bool, keepalive_s: float
    ) -> None:
        self._answer, self._engine, self._gate, self._metrics = answer, engine, gate, metrics
        self._sse, self._keepalive_s = sse, keepalive_s
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate.enter()
        work = asyncio.current_task()
        assert work is not None
        gone = asyncio.ensure_future(_cancel_when_gone(work, receive))
        try:
            await self._work(scope, receive, send)
        except asyncio.CancelledError:
            if not _came_to_its_end(gone) or work.uncancel():  # it was cancelled for another reason, too
                raise
            self._metrics.client_left()
        finally:
            gone.cancel()
            self._gate.leave()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._sse:
            opening = mark_line(self._answer.head()) if self._answer.marked else b""
            await self._stream(Events(send, self._keepalive_s, opening), scope[ARRIVED])
            return
        async with await self._engine.submit(self._answer.requests) as stream:
            watch = self._metrics.watch(scope[ARRIVED])
            async for delta in stream:
                self._chunks(delta, watch)
        await JSONResponse(self._answer.whole())(scope, receive, send)

    def _chunks(self, delta: Delta, watch: Watch) -> list[Chunk]:
        """The stream chunks of a delta; the delta's times are measured. Raises ApiError if the delta tells of
        a failure."""
        watch.delta(self._answer.made_here(delta), time.monotonic())
        if delta.finish in (Finish.ERROR, Finish.ABORT):
            raise self._failure(delta)
        return self._answer.chunks(delta)

    def _failure(self, delta: Delta) -> ApiError:
        if self._gate.draining:
            return ApiError(503, "the server shut down before the answer was complete", code="draining")
        if not self._engine.health().ok:
            message = delta.error or "the engine died before the answer was complete"
            return ApiError(503, message, code="engine_unavailable", headers={"retry-after": "1"})
        return ApiError(500, delta.error or "the generation was aborted", code="generation_failed")

    async def _stream(self, events: Events, arrived: float) -> None:
        try:
            async with events.beating(), await self._engine.submit(self._answer.open_requests) as stream:
                watch = self._metrics.watch(arrived)
                if stream.ended:  # every choice had ended before
                    await events.put(self._last(), more=False)
                async for delta in stream:
                    replays = self._answer.replays(delta)
                    found = b"".join(map(self._marked, self._chunks(delta, watch)))
                    if stream.ended:
                        found += self._last()
                    if found or not replays:  # what a replay refuses still gets its status
                        await events.put(found, more=not stream.ended)
                    else:
                        await asyncio.sleep(0)  # a long replay comes at once, and other streams go on
        except Exception as error:
            if not events.begun:
                raise
            await events.put(self._error(from_error(error)), more=False)
            if not isinstance(error, ApiError | HotprefixError):
                raise

    def _marked(self, chunk: Chunk) -> bytes:
        event = _event(chunk.body)
        return mark_line(chunk.mark) + event if self._answer.marked else event

    def _last(self) -> bytes:
        last = self._answer.last_chunk()
        return (_event(last) if last else b"") + b"data: [DONE]\n\n"

    def _error(self, error: ApiError) -> bytes:
        lost = self._answer.marked and error.status in (429, 503)
        return (mark_line(LOST) if lost else b"") + _event(error.body())


class Events:
    """The body of a stream.

    begun: whether status and headers are sent, which happens with the first bytes.
    keepalive_s: after so long without a byte a comment is sent, which clients ignore; 0 = never.
    opening: comes before the first bytes.
    """

    def __init__(self, send: Send, keepalive_s: float, opening: bytes = b"") -> None:
        self._send, self._keepalive_s, self._opening = send, keepalive_s, opening
        self._sending = asyncio.Lock()
        self._sent_at = time.monotonic()
        self.begun = self._ended = False

    async def put(self, data: bytes, *, more: bool = True) -> None:
        async with self._sending:
            if self._ended:
                return
            if not self.begun:
                self.begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            self._ended = not more
            self._sent_at = time.monotonic()
            if data or not more:
                data, self._opening = self._opening + data, b""
                await self._send({"type": "http.response.body", "body": data, "more_body": more})

    @contextlib.asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """While the body of this context runs, comments are sent whenever it takes long."""
        beat = asyncio.create_task(self._beat()) if self._keepalive_s else None
        try:
            yield
        finally:
            if beat is not None:
                beat.cancel()

    async def _beat(self) -> None:
        while True:
            left = self._sent_at + self._keepalive_s - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await self.put(KEEPALIVE)


async def _cancel_when_gone(work: asyncio.Task[Any], receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel()


def _came_to_its_end(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"
