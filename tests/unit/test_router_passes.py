"""What goes through the router: bytes as they are, headers as they should be."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Send

from tests.support.routing import (
    JSON,
    SSE,
    Asked,
    FakeWorker,
    answer,
    chunk,
    end,
    event,
    fleet,
    part,
    report,
    routing,
    says,
    start,
    up,
)

KINDS = {
    "own": {"load": report()},
    "vllm": {"metrics": 'vllm:num_requests_running{engine="0"} 0\n'},
    "openai": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_passes_byte_for_byte(kind: str) -> None:
    worker = FakeWorker("w0", says("Hel", "lo"), **KINDS[kind])
    async with fleet(worker) as before:
        found = await before.ask(stream=True)
    assert found.content == chunk("Hel") + chunk("lo") + event("[DONE]")
    assert found.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_a_body_passes_byte_for_byte_in_both_directions() -> None:
    sent = b'  {"model": "m",\t"prompt":"\\u00e4\xc3\xa4", "odd": 1e400x'  # not even JSON
    back = bytes(range(256)) * 50

    async def serve(asked: Asked, send: Send) -> None:
        await start(send, 218, [(b"content-type", b"x/y"), (b"content-encoding", b"gzip"), (b"x-own", b"1")])
        await part(send, back[:7])
        await end(send, back[7:])

    worker = FakeWorker("w0", serve)
    async with (
        fleet(worker) as before,
        before.http.stream(
            "POST",
            "/v1/chat/completions?a=%20b&c",
            content=sent,
            headers={"content-type": "application/json"},
        ) as found,
    ):
        raw = b"".join([p async for p in found.aiter_raw()])
    assert (worker.asked[0].body, worker.asked[0].query) == (sent, b"a=%20b&c")
    assert (found.status_code, raw, found.headers["x-own"]) == (218, back, "1")
    assert found.headers["content-encoding"] == "gzip"


async def test_each_event_comes_when_the_worker_sends_it() -> None:
    go = asyncio.Event()

    async def serve(asked: Asked, send: Send) -> None:
        await start(send, 200, SSE)
        await part(send, chunk("one"))
        await go.wait()
        await end(send, chunk("two") + event("[DONE]"))

    async with (
        fleet(FakeWorker("w0", serve)) as before,
        before.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as found,
    ):
        parts = found.aiter_raw()
        assert await anext(parts) == chunk("one")
        go.set()
        assert b"".join([p async for p in parts]) == chunk("two") + event("[DONE]")


async def test_headers_of_the_connection_keys_and_cookies_end_at_the_router() -> None:
    async def serve(asked: Asked, send: Send) -> None:
        await answer(
            send,
            200,
            {},
            [
                (b"x-kept", b"1"),
                (b"x-hop", b"1"),
                (b"connection", b"x-hop"),
                (b"access-control-allow-origin", b"*"),
                (b"x-request-id", b"worker's"),
            ],
        )

    worker = FakeWorker("w0", serve)
    sent = {
        "authorization": "Bearer client", "cookie": "a=b", "te": "trailers", "x-drop": "1",
        "connection": "x-drop", "x-hotprefix-internal": "forged", "x-hotprefix-tenant": "forged",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1",
        "baggage": "k=v", "x-other": "kept", "x-request-id": "mine", "proxy-authorization": "Basic x",
    }  # fmt: skip
    async with fleet(worker) as before:
        found = await before.http.post("/v1/completions", json={"prompt": "x"}, headers=sent)
        got = worker.asked[0].headers
    for name in ("authorization", "cookie", "te", "x-drop", "x-hotprefix-internal", "x-hotprefix-tenant",
                 "proxy-authorization"):  # fmt: skip
        assert name not in got, name
    for name in ("traceparent", "tracestate", "baggage", "x-other", "x-request-id"):
        assert got[name] == sent[name]
    assert got["host"] == worker.url.removeprefix("http://")
    assert found.headers["x-kept"] == "1"
    assert "x-hop" not in found.headers
    assert "access-control-allow-origin" not in found.headers
    assert found.headers.get_list("x-request-id") == ["mine"]


async def test_a_worker_gets_its_own_key_and_a_client_s_only_where_that_is_said(tmp_path: Path) -> None:
    w0, w1 = FakeWorker("w0", says("a"), key="secret-of-w0"), FakeWorker("w1", says("b"))
    key = tmp_path / "key"
    key.write_text("secret-of-w0\n")
    async with up(w0), up(w1):
        named = f"{w0.url},key-file={key},name=w0", f"{w1.url},client-key=pass,name=w1"
        async with routing(*named, policy="round_robin") as before:
            for _ in range(2):
                found = await before.http.post(
                    "/v1/completions", json={"prompt": "x"}, headers={"authorization": "Bearer client"}
                )
                assert found.status_code == 200
    assert [a.headers["authorization"] for a in w0.asked] == ["Bearer secret-of-w0"]
    assert [a.headers["authorization"] for a in w1.asked] == ["Bearer client"]


async def test_an_error_of_the_request_is_the_worker_s_answer_as_it_is() -> None:
    body = b'{"error": {"message": "too long"}}'

    async def serve(asked: Asked, send: Send) -> None:
        await start(send, 400, JSON)
        await end(send, body)

    w0, w1 = FakeWorker("w0", serve), FakeWorker("w1", serve)
    async with fleet(w0, w1) as before:
        found = await before.ask()
        before.nothing_left()
    assert (found.status_code, found.content) == (400, body)
    assert len(w0.asked) + len(w1.asked) == 1


async def test_redirects_are_not_followed() -> None:
    other = FakeWorker("other", says("never"))

    async def serve(asked: Asked, send: Send) -> None:
        await start(send, 307, [(b"location", f"{other.url}/v1/completions".encode())])
        await end(send)

    async with up(other), fleet(FakeWorker("w0", serve)) as before:
        found = await before.ask()
    assert found.status_code == 307
    assert not other.asked


async def test_the_whole_answer_s_cached_tokens_are_counted_and_teach_no_time() -> None:
    async with fleet(FakeWorker("w0", says("a", cached=5))) as before:
        await before.ask("x" * 64)
        await before.ask("x" * 64, stream=True)
        fleet_ = before.pool.desk.fleet
        assert (fleet_.hits.delivered, fleet_.hits.requests, fleet_.hits.unknown) == (5, 1, 1)
        assert fleet_.error.count == 1


async def test_a_big_body_passes() -> None:
    worker = FakeWorker("w0", says("a"))
    big: dict[str, Any] = {"model": "m", "prompt": "y" * 3_000_000}
    async with fleet(worker) as before:
        assert (await before.http.post("/v1/completions", json=big)).status_code == 200
    assert json.loads(worker.asked[0].body) == big


async def test_a_client_that_leaves_frees_its_worker_at_once() -> None:
    async def serve(asked: Asked, send: Send) -> None:
        await start(send, 200, SSE)
        await part(send, chunk("one"))
        await asked.left.wait()

    worker = FakeWorker("w0", serve)
    async with fleet(worker) as before:
        async with before.http.stream("POST", "/v1/completions", json={"prompt": "x"}) as found:
            await anext(found.aiter_raw())
        await before.until(lambda: worker.left == 1)
        await before.until(lambda: before.router.forward.clients_left == 1)
        before.nothing_left()
        assert before.pool.desk.tally.ended == {"cancelled": 1}


async def test_a_client_that_leaves_before_the_first_byte_frees_its_worker_at_once() -> None:
    async def serve(asked: Asked, send: Send) -> None:
        await asked.left.wait()

    worker = FakeWorker("w0", serve)
    async with fleet(worker) as before:
        client = asyncio.ensure_future(before.http.post("/v1/completions", json={"prompt": "x"}))
        await before.until(lambda: bool(worker.asked))
        client.cancel()
        await before.until(lambda: worker.left == 1)
        await before.until(lambda: before.router.forward.clients_left == 1)
        before.nothing_left()
