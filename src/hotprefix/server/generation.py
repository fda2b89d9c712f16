"""Running generations for one HTTP request. Owns: the response that streams or collects, and its end.

Rules: nothing is sent before the first delta, so that a refusal or an early failure still has its
status. A failure after that is an SSE error event and no [DONE]. The client that leaves ends its
generations at once, all of them; so does every error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

from pydantic_core import to_json
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from hotprefix.engine.client import Health, Stream
from hotprefix.engine.messages import Delta, EngineInfo, EngineStats, FlushReport, Generate
from hotprefix.kernel.plan import Finish
from hotprefix.server.answer import Answer
from hotprefix.server.errors import ApiError, from_error
from hotprefix.server.guard import ARRIVED, Gate
from hotprefix.server.metrics import Metrics, Watch

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


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


class GenerationResponse(Response):
    """Submits the answer's requests when called, and sends what comes of them."""

    def __init__(self, answer: Answer, engine: Engine, gate: Gate, metrics: Metrics, *, sse: bool) -> None:
        self._answer, self._engine, self._gate, self._metrics = answer, engine, gate, metrics
        self._sse = sse
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate.enter()
        work = asyncio.current_task()
        assert work is not None
        gone = asyncio.ensure_future(_cancel_when_gone(work, receive))
        try:
            await self._work(scope, receive, send)
        except asyncio.CancelledError:
            if not _came_to_its_end(gone) or work.uncancel():  # somebody else cancelled, too
                raise
            self._metrics.client_left()
        finally:
            gone.cancel()
            self._gate.leave()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with await self._engine.submit(self._answer.requests) as stream:
            watch = self._metrics.watch(scope[ARRIVED])
            if self._sse:
                await self._send_events(stream, watch, send)
                return
            async for delta in stream:
                self._chunks(delta, watch)
        await JSONResponse(self._answer.whole())(scope, receive, send)

    def _chunks(self, delta: Delta, watch: Watch) -> list[dict[str, Any]]:
        """The stream chunks of a delta, measured. Raises ApiError at one that tells of a failure."""
        watch.delta(delta, time.monotonic())
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

    async def _send_events(self, stream: Stream, watch: Watch, send: Send) -> None:
        started = False
        try:
            async for delta in stream:
                events = b"".join(map(_event, self._chunks(delta, watch)))
                if stream.ended:
                    last = self._answer.last_chunk()
                    events += (_event(last) if last else b"") + b"data: [DONE]\n\n"
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
                    started = True
                if events:
                    await _send_body(send, events, more=not stream.ended)
        except Exception as error:
            if not started:
                raise
            await _send_body(send, _event(from_error(error).body()), more=False)
            if not isinstance(error, ApiError):
                raise


async def _cancel_when_gone(work: asyncio.Task[Any], receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel()


def _came_to_its_end(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"
