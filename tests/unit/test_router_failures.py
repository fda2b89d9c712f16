"""Workers that fail: before the first byte, after it, and slowly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
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
    refuses,
    report,
    routing,
    says,
    start,
    up,
)
from tests.support.server import events

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
MODELS = b'{"object":"list","data":[{"id":"m","root":"m"}]}'


@contextlib.asynccontextmanager
async def raw_worker(says: bytes, *, close: bool = True) -> AsyncIterator[str]:
    """A worker that answers questions well and a request with these bytes, whatever they are."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /v1/models"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(MODELS), MODELS))
            elif head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n")
            else:
                writer.write(says)
                await writer.drain()
                if not close:
                    await reader.read()
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]},name=bad"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.mark.parametrize("status", [500, 502, 503, 429])
async def test_a_request_goes_elsewhere_before_its_first_byte(status: int) -> None:
    bad, good = FakeWorker("bad", refuses(status)), FakeWorker("good", says("fine"))
    async with fleet(bad, good, policy="round_robin") as before:
        for _ in range(2):
            found = await before.ask()
            assert (found.status_code, found.json()["choices"][0]["text"]) == (200, "fine")
        before.nothing_left()
        assert before.pool.desk.tally.retries == len(bad.asked) == 2
    assert len(good.asked) == 2


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_another_4xx_goes_nowhere_else_and_harms_no_worker(status: int) -> None:
    """A breaker that counts what clients did wrong takes away workers that are well."""
    w0, w1 = FakeWorker("w0", refuses(status)), FakeWorker("w1", refuses(status))
    async with fleet(w0, w1) as before:
        for number in range(10):
            assert (await before.ask(f"{number}")).status_code == status
        assert len(w0.asked) + len(w1.asked) == 10
        assert [w.state for w in before.router.roster.workers.values()] == ["ready", "ready"]
        assert not before.router.roster.workers["w0"].failures


async def test_the_last_answer_is_given_if_all_fail() -> None:
    workers = [FakeWorker(f"w{n}", refuses(503, retry_after=f"{n + 3}")) for n in range(2)]
    async with fleet(*workers, retries=5) as before:
        found = await before.ask()
        before.nothing_left()
    assert found.status_code == 503
    assert found.headers["retry-after"] in ("3", "4")
    assert [len(w.asked) for w in workers] == [1, 1]


async def test_retries_are_bounded() -> None:
    workers = [FakeWorker(f"w{n}", refuses(500)) for n in range(5)]
    async with fleet(*workers, retries=2) as before:
        assert (await before.ask()).status_code == 500
    assert sum(len(w.asked) for w in workers) == 3


async def test_a_503_whose_body_never_ends_leaves_nothing_behind() -> None:
    """`vllm-project/router#211`: the load of the first worker was never taken off."""

    async def stalls(asked: Asked, send: Send) -> None:
        await start(send, 503, JSON)
        await part(send, b"{")
        await asked.left.wait()

    bad, good = FakeWorker("bad", stalls), FakeWorker("good", says("fine"))
    async with fleet(bad, good, policy="round_robin") as before:
        for _ in range(4):
            assert (await before.ask()).status_code == 200
        before.nothing_left()
        await before.until(lambda: bad.left == len(bad.asked) > 0)


GARBAGE = {
    "nothing": b"",
    "no http": b"\x00\x01garbage\r\n\r\n",
    "half a head": b"HTTP/1.1 200 OK\r\ncontent-le",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
    "huge header": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
    "bad chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "head only": b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n",
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_garbage_instead_of_an_answer_is_a_failure_of_the_worker(what: str) -> None:
    good = FakeWorker("good", says("fine"))
    async with raw_worker(GARBAGE[what]) as bad, up(good), routing(bad, good, policy="round_robin") as before:
        for _ in range(2):
            assert (await before.ask()).status_code == 200, what
        before.nothing_left()
        assert sum(before.router.roster.workers["bad"].failures.values()) == 2


CUT = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


BROKEN = {
    "cut": (CUT + chunked(chunk("one")), [chunk("one")]),
    "cut in an event": (CUT + chunked(chunk("one") + b'data: {"half'), [chunk("one")]),
    "no end": (CUT + chunked(chunk("one")) + b"0\r\n\r\n", [chunk("one")]),
    "no length": (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + chunk("one"),
        [chunk("one")],
    ),
}


@pytest.mark.parametrize("what", BROKEN)
async def test_a_stream_that_breaks_ends_with_an_error_and_runs_nowhere_else(what: str) -> None:
    data, parts = BROKEN[what]
    good = FakeWorker("good", says("fine"))
    async with raw_worker(data) as bad, up(good), routing(bad, good, policy="round_robin") as before:
        first, second = [await before.ask(stream=True) for _ in range(2)]
        before.nothing_left()
    broken = first if b"worker_lost" in first.content else second
    assert broken.content.startswith(b"".join(parts))
    *_, last = events(broken.text)
    assert last["error"]["code"] == "worker_lost"
    assert "[DONE]" not in broken.text
    assert len(good.asked) == 1


async def test_a_whole_answer_that_breaks_is_cut_for_the_client_too() -> None:
    bad = raw_worker(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\ncontent-type: application/json\r\n\r\n{")
    async with bad as named, routing(named) as before:
        with pytest.raises(httpx.RemoteProtocolError):
            await before.ask()
        await before.until(lambda: before.router.forward.cut == {"cut": 1})
        before.nothing_left()


async def test_an_error_event_of_the_worker_is_the_only_one() -> None:
    async def serve(asked: Asked, send: Send) -> None:
        await start(send, 200, SSE)
        await end(send, chunk("one") + event({"error": {"message": "out of memory"}}))

    async with fleet(FakeWorker("w0", serve)) as before:
        found = events((await before.ask(stream=True)).text)
    assert [each.get("error", {}).get("message") for each in found] == [None, "out of memory"]


async def test_a_breaker_opens_on_failures_tries_one_and_closes() -> None:
    bad, good = FakeWorker("bad", refuses(500)), FakeWorker("good", says("fine"))
    async with fleet(bad, good, policy="round_robin", breaker_open_s=0.3) as before:
        worker = before.router.roster.workers["bad"]
        while worker.breaker.state != "open":
            assert (await before.ask()).status_code == 200
        assert len(bad.asked) == 3
        for _ in range(5):
            await before.ask()
        assert len(bad.asked) == 3
        assert any("bad" in line and "status 500" in line for line in before.said)
        await before.until(lambda: not worker.refuses(before.router.clock()))
        bad.serve = refuses(400)
        while len(bad.asked) < 4:
            await before.ask()
        assert worker.breaker.state == "half_open"  # a 400 says nothing of the worker
        bad.serve = refuses(500)
        while len(bad.asked) < 5:
            await before.ask()
        assert worker.breaker.state == "open"
        await before.until(lambda: not worker.refuses(before.router.clock()))
        bad.serve = says("again")
        while worker.breaker.state != "closed":
            await before.ask()
        assert worker.state == "ready"


async def test_a_half_open_worker_is_tried_by_one_request_at_a_time() -> None:
    go = asyncio.Event()

    async def slow(asked: Asked, send: Send) -> None:
        await go.wait()
        await answer(send, 200, {"choices": []})

    w0 = FakeWorker("w0", slow)
    async with fleet(w0, hold_s=0.3) as before:
        worker = before.router.roster.workers["w0"]
        for _ in range(3):
            worker.failed("5xx", "status 500", before.router.clock() - 10)
        found = [asyncio.ensure_future(before.ask(f"{n}")) for n in range(4)]
        await before.until(lambda: sum(f.done() for f in found) == 3)
        assert len(w0.asked) == 1
        go.set()
        assert sorted([(await f).status_code for f in found]) == [200, 503, 503, 503]
        before.nothing_left()


async def test_a_probe_that_its_client_gives_up_frees_the_way_for_the_next() -> None:
    async def waits(asked: Asked, send: Send) -> None:
        await asked.left.wait()

    w0 = FakeWorker("w0", waits)
    async with fleet(w0) as before:
        worker = before.router.roster.workers["w0"]
        for _ in range(3):
            worker.failed("5xx", "status 500", before.router.clock() - 10)
        client = asyncio.ensure_future(before.http.post("/v1/completions", json={"prompt": "x"}))
        await before.until(lambda: bool(w0.asked))
        client.cancel()
        await before.until(lambda: w0.left == 1)
        w0.serve = says("fine")
        assert (await before.ask()).status_code == 200
        assert worker.breaker.state == "closed"


async def test_a_worker_that_is_not_there_is_left_and_found_again() -> None:
    w0, w1 = FakeWorker("w0", says("a")), FakeWorker("w1", says("b"))
    port = free_port()
    w1.url = f"http://127.0.0.1:{port}"
    async with up(w0), routing(w0, w1) as before:
        assert any("w1" in line and "asked again" in line for line in before.said)
        assert (await before.ask()).json()["choices"][0]["text"] == "a"
        assert (await before.http.get("/health")).status_code == 200
        async with up(w1, port):
            await before.until(lambda: before.router.roster.workers["w1"].state == "ready")
        await before.until(lambda: before.router.roster.workers["w1"].state == "silent")
        assert (await before.ask()).json()["choices"][0]["text"] == "a"
    assert len([line for line in before.said if line.startswith("worker w1")]) <= 4


@pytest.mark.parametrize("begun", [False, True])
async def test_a_worker_that_hangs_is_left_in_time(begun: bool) -> None:
    async def hangs(asked: Asked, send: Send) -> None:
        if begun:
            await start(send, 200, SSE)
            await part(send, chunk("one"))
        bad.hung = True
        await asked.left.wait()

    bad, good = FakeWorker("bad", hangs, load=report()), FakeWorker("good", says("fine"), load=report())
    settings = {"policy": "round_robin", "probe_timeout_s": 0.1, "probe_failures": 2}
    async with fleet(bad, good, **settings) as before:
        found = [await before.ask(stream=True) for _ in range(2)]
        texts = [each.text for each in found]
        assert before.router.roster.workers["bad"].state == "silent"
        before.nothing_left()
        assert len(good.asked) == (1 if begun else 2)
        if begun:
            (cut,) = [text for text in texts if "worker_lost" in text]
            assert cut.startswith(chunk("one").decode())
        bad.hung = False
        await before.until(lambda: before.router.roster.workers["bad"].state == "ready")


async def test_a_worker_that_took_a_request_and_is_slow_is_not_doubled() -> None:
    async def slow(asked: Asked, send: Send) -> None:
        await asked.left.wait()

    w0, w1 = FakeWorker("w0", slow), FakeWorker("w1", slow)
    async with fleet(w0, w1, silence_s=0.3) as before:
        found = await before.ask()
        before.nothing_left()
    assert (found.status_code, found.json()["error"]["code"]) == (504, "worker_failed")
    assert len(w0.asked) + len(w1.asked) == 1


async def test_one_worker_that_closes_a_resting_connection_is_tried_again() -> None:
    calls = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"POST"):
                    calls += 1
                    await reader.read(10)
                    if calls == 1:
                        break
                body = MODELS if head.startswith((b"GET /v1/models", b"POST")) else b""
                status = b"200 OK" if body else b"404 No"
                writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with routing(url) as before:
            assert (await before.ask()).status_code == 200
            before.nothing_left()
    assert calls == 2
