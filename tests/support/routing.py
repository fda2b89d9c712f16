"""Routers before scripted workers, all on real sockets of this machine. Owns: `FakeWorker` and `routing`.

Rules: 127.0.0.1 and free ports only. What a worker answers is decided by the test; nothing depends on time
but what a test sets short. Whatever a test leaves open is closed at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.types import Receive, Scope, Send

from hotprefix.router.config import RouterConfig
from hotprefix.router.router import Router
from hotprefix.server.config import ServerConfig
from hotprefix.server.listening import http_server

Serve = Callable[["Asked", Send], Awaitable[None]]
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]
WAIT_S = 10.0


@dataclass
class Asked:
    """One request as a worker got it. left: the client has gone."""

    method: str
    path: str
    query: bytes
    headers: dict[str, str]
    raw_headers: list[tuple[bytes, bytes]]
    body: bytes
    left: asyncio.Event


@dataclass
class FakeWorker:
    """A worker. serve: answers what is not about the worker itself. load: what /load says; None = 404.
    hung: it answers nothing any more."""

    name: str
    serve: Serve
    load: dict[str, Any] | None = None
    metrics: str | None = None
    models: list[dict[str, Any]] = field(
        default_factory=lambda: [{"id": "m", "object": "model", "root": "m"}]
    )
    key: str | None = None
    hung: bool = False
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    left: int = 0
    http: uvicorn.Server | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        gone = asyncio.Event()
        watch = asyncio.ensure_future(self._watch(receive, gone))
        raw = list(scope["headers"])
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in raw}
        method, path, query = scope["method"], scope["path"], scope["query_string"]
        asked = Asked(method, path, query, headers, raw, body, gone)
        try:
            while self.hung:
                await asyncio.sleep(0.01)
            await self._answer(asked, send)
        finally:
            watch.cancel()

    async def _watch(self, receive: Receive, gone: asyncio.Event) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left += 1
        gone.set()

    async def _answer(self, asked: Asked, send: Send) -> None:
        if self.key is not None and asked.headers.get("authorization") != f"Bearer {self.key}":
            await answer(send, 401, {"error": {"message": "wrong key"}})
        elif asked.path == "/load" and self.load is not None:
            await answer(send, 200, self.load)
        elif asked.path == "/metrics" and self.metrics is not None:
            await start(send, 200, [(b"content-type", b"text/plain")])
            await end(send, self.metrics.encode())
        elif asked.path == "/v1/models":
            await answer(send, 200, {"object": "list", "data": self.models})
        elif asked.path in ("/load", "/metrics"):
            await answer(send, 404, {"error": {"message": "no route"}})
        else:
            self.asked.append(asked)
            await self.serve(asked, send)


async def start(send: Send, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def end(send: Send, body: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def answer(send: Send, status: int, value: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    body = json.dumps(value).encode()
    await start(send, status, [*JSON, (b"content-length", str(len(body)).encode()), *headers])
    await end(send, body)


def event(value: Any) -> bytes:
    data = value if isinstance(value, str) else json.dumps(value)
    return f"data: {data}\n\n".encode()


def chunk(text: str, by: str = "") -> bytes:
    return event({"object": "chunk", "by": by, "choices": [{"index": 0, "text": text}]})


def says(*words: str, cached: int | None = None) -> Serve:
    """Answers with these words, as a stream where that is asked for."""

    async def serve(asked: Asked, send: Send) -> None:
        wanted = json.loads(asked.body) if asked.body else {}
        if wanted.get("stream"):
            await start(send, 200, SSE)
            for word in words:
                await part(send, chunk(word))
            await end(send, event("[DONE]"))
            return
        usage: dict[str, Any] = {"prompt_tokens": 9, "completion_tokens": len(words)}
        if cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        await answer(send, 200, {"choices": [{"text": "".join(words)}], "usage": usage})

    return serve


def refuses(status: int, **headers: str) -> Serve:
    """Answers with an error."""

    async def serve(asked: Asked, send: Send) -> None:
        raw = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        await answer(send, status, {"error": {"message": f"status {status}"}}, raw)

    return serve


def report(incarnation: int = 1, waiting: int = 0, prefill: int = 0, decodes: int = 0, **worker: Any) -> Any:
    """What /load says."""
    about = {
        "model": "m", "page_size": 16, "total_pages": 1000, "max_batched_tokens": 2048, "max_running": 64,
        "max_model_len": 8192, "kv_token_bytes": 1, **worker,
    }  # fmt: skip
    pages = {"free": 1000, "evictable": 0, "owned": 0, "protected": 0}
    return {
        "incarnation": incarnation, "age_s": 0.0, "waiting": waiting, "prefill_tokens": prefill,
        "decodes": decodes, "pages": pages, "worker": about,
    }  # fmt: skip


@contextlib.asynccontextmanager
async def serving(app: Any, port: int = 0, **more: Any) -> AsyncIterator[tuple[str, uvicorn.Server]]:
    """more: settings of uvicorn."""
    listener = socket.create_server(("127.0.0.1", port))
    http = uvicorn.Server(
        uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False,
                       timeout_graceful_shutdown=1, **more)
    )  # fmt: skip
    task = asyncio.create_task(http._serve([listener]))
    while not http.started:
        await asyncio.sleep(0.001)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", http
    finally:
        http.should_exit = http.force_exit = True
        await task


@contextlib.asynccontextmanager
async def up(worker: FakeWorker, port: int = 0) -> AsyncIterator[FakeWorker]:
    """The worker, listening."""
    async with serving(worker, port) as (worker.url, worker.http):
        yield worker
        worker.hung = False


@dataclass
class Routing:
    """A router under test. said: its lines. port: where it listens."""

    router: Router
    http: httpx.AsyncClient
    url: str
    said: list[str]

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def pool(self) -> Any:
        (pool,) = self.router.pools.all.values()
        return pool

    def nothing_left(self) -> None:
        """Whatever the router keeps for requests is empty."""
        for pool in self.router.pools.all.values():
            pool.desk.fleet.check()
            assert not pool.desk.fleet._bookings.all
            assert not pool.desk.fleet._waiting
            assert not pool.desk.fleet._looked
            assert pool.desk.remembered == 0
        assert not any(worker.calls for worker in self.router.roster.workers.values())
        assert self.router.forward._intake.held == 0

    async def until(self, holds: Callable[[], Any]) -> None:
        end = asyncio.get_running_loop().time() + WAIT_S
        while not holds():
            assert asyncio.get_running_loop().time() < end, self.said
            await asyncio.sleep(0.005)

    async def ask(self, prompt: str = "hello", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "m", "prompt": prompt, **fields})


@contextlib.asynccontextmanager
async def routing(
    *workers: FakeWorker | str, server: ServerConfig | None = None, open_feed: Any = None, **config: Any
) -> AsyncIterator[Routing]:
    """A router before these workers, which listen already; a text is a worker as it is named."""
    server = server or ServerConfig()
    named = tuple(w if isinstance(w, str) else f"{w.url},name={w.name}" for w in workers)
    settings = {"poll_s": 0.05, "probe_timeout_s": 1.0, "breaker_open_s": 0.2, **config}
    said: list[str] = []
    router = Router(RouterConfig(named, **settings), server, said.append, open_feed=open_feed)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    http = http_server(router.app, server, router.metrics.error)
    task = asyncio.create_task(http._serve([listener]))
    await router.begin()
    while not http.started:
        await asyncio.sleep(0.001)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            yield Routing(router, client, url, said)
    finally:
        http.should_exit = http.force_exit = True
        await task
        await router.close()


@contextlib.asynccontextmanager
async def fleet(*workers: FakeWorker, **settings: Any) -> AsyncIterator[Routing]:
    """Workers that begin to listen here, and a router before them."""
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(up(worker))
        yield await stack.enter_async_context(routing(*workers, **settings))
