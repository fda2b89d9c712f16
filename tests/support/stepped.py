"""Engines that step when a test says so, each behind its server on a socket of its own. Owns:
`SteppedEngine`, `Engine` and `engines`.

Rules:
1. Kernel, text, scheduler and server are the real ones. What is computed is pretended (`engine.paced`) or
   computed in fp32, so every engine gives the same answer.
2. An engine makes as many steps as it has left; so a test decides where an answer is when its engine fails.
3. What fails is a connection or a byte, as on a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from hotprefix.engine.client import Health, Stream
from hotprefix.engine.config import EngineConfig
from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.messages import Delta, EngineLoad, Generate, KVSnapshot
from hotprefix.engine.paced.build import build_paced
from hotprefix.kernel.plan import Finish
from hotprefix.server.app import create_app
from hotprefix.server.model_text import ModelText
from tests.support.inline import CONFIG, InlineEngine
from tests.support.routing import serving

MODEL = "SmolLM2-135M-Instruct"
PRESET = "llama-3.1-8b.1xh100.fp8"
Spoil = Callable[[int, bytes], bytes | None]


class SteppedEngine(InlineEngine):
    """left: steps that it may still make. ok: whether it is healthy."""

    def __init__(self, loop: EngineLoop) -> None:
        super().__init__(loop)
        self.left: float = math.inf
        self.ok = True
        self._streams: dict[str, Stream] = {}
        self._wake = asyncio.Event()

    def health(self) -> Health:
        return Health(self.ok, "ready" if self.ok else "dead")

    async def submit(self, requests: Sequence[Generate]) -> Stream:
        self.seen += requests
        stream = Stream(requests, self._abort)
        for request in requests:
            self._streams[request.id] = stream
            self.loop.submit(request)
        self._wake.set()
        return stream

    def let(self, steps: float) -> None:
        """Allow so many further steps."""
        self.left = steps
        self._wake.set()

    def die(self) -> None:
        """What an engine process that dies looks like to its server."""
        self.ok = False
        for name, stream in self._streams.items():
            stream.put(Delta(name, "", (), stream.usage[name], Finish.ERROR, error="the engine died"))

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            if not self.loop.has_work or self.left < 1:
                self._wake.clear()
                await self._wake.wait()
                continue
            self.left -= 1
            for delta in self.loop.step():
                self._streams[delta.id].put(delta)
            await asyncio.sleep(0)

    async def load(self) -> EngineLoad:
        return self.loop.load()

    async def kv_snapshot(self) -> KVSnapshot | None:
        return None


@dataclass
class Engine:
    """An engine and its server.

    hung: it answers nothing any more. spoil: what becomes of the n-th piece of an answer's body; None = the
    answer ends there as if it were complete. asked: paths and headers of the requests.
    """

    name: str
    engine: SteppedEngine
    app: Any
    url: str = ""
    http: uvicorn.Server | None = None
    hung: bool = False
    spoil: Spoil = lambda _, data: data
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._until_well()
        pieces = 0
        ended = False

        async def watched(message: Any) -> None:
            nonlocal pieces, ended
            await self._until_well()
            if message["type"] == "http.response.body" and scope["method"] == "POST" and not ended:
                pieces += 1
                data = self.spoil(pieces, message["body"])
                ended = data is None or not message.get("more_body", False)
                message = {**message, "body": data or b"", "more_body": not ended}
            elif ended:
                return
            await send(message)

        if scope["method"] == "POST":
            headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
            self.asked.append((scope["path"], headers))
        await self.app(scope, receive, watched)

    async def _until_well(self) -> None:
        while self.hung:
            await asyncio.sleep(0.01)

    def kill(self) -> None:
        """Take no further connection, and cut every one."""
        assert self.http is not None
        for server in self.http.servers:
            server.close()
        self.cut()

    def cut(self) -> None:
        """Cut every connection."""
        assert self.http is not None
        for connection in list(self.http.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]


def paced(name: str) -> Engine:
    """An engine that only pretends to compute, and hardly waits."""
    return behind(name, build_paced(EngineConfig(paced=PRESET, pace_factor=1e-6, kv_tokens=4096)))


def behind(name: str, loop: EngineLoop) -> Engine:
    """A server before a loop of the default model."""
    engine = SteppedEngine(loop)
    return Engine(name, engine, create_app(engine, CONFIG, _text()))


@cache
def _text() -> ModelText:
    return ModelText.load(EngineConfig().model)


@contextlib.asynccontextmanager
async def listening(one: Engine) -> AsyncIterator[Engine]:
    """The engine, running and listening."""
    running = asyncio.create_task(one.engine.run())
    try:
        async with serving(one) as (one.url, one.http):
            yield one
            one.hung = False
    finally:
        running.cancel()


@contextlib.asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[Engine]]:
    """So many paced ones, named e0, e1, ..., running and listening."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(listening(paced(f"e{n}"))) for n in range(count)]
