"""What a client may send and how long it may take, before anything looks at a key; over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from hotprefix.errors import ConfigError
from hotprefix.server.config import ServerConfig
from hotprefix.server.connections import Connections
from hotprefix.server.protocol import SLICE_BYTES, BoundedHttp
from tests.support.server import FakeEngine
from tests.support.sockets import Raw, listening, raw

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
LIMIT = 8 * 1024
SMALL = ServerConfig(max_header_bytes=LIMIT, max_headers=20)


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hi", **fields}).encode()


class Counted:
    """Bytes that went into HTTP parsers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fed = 0
        original = BoundedHttp._feed

        def feed(protocol: BoundedHttp, part: memoryview) -> None:
            self.fed += len(part)
            original(protocol, part)

        monkeypatch.setattr(BoundedHttp, "_feed", feed)


async def flood(client: Raw, begin: bytes, piece: bytes, pieces: int) -> int:
    """How many pieces the server took after `begin`."""
    taken = 0
    if await client.send(begin):
        for _ in range(pieces):
            if not await client.send(piece):
                break
            taken += 1
            await asyncio.sleep(0)
    return taken


ENDLESS = {
    "a header": GET + b"x: ",
    "a header's name": GET,
    "the path": b"GET /",
    "the query": b"GET /health?",
    "blank lines": b"\r\n",
    "a trailer": POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: ",
    "a chunk's extension": POST + b"transfer-encoding: chunked\r\n\r\n2;x=",
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_what_never_ends_is_cut_off_after_the_limit(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is sent, the parser sees no more than the limit and a slice of it."""
    counted = Counted(monkeypatch)
    piece = b"\r\n" * 2048 if what == "blank lines" else b"a" * 4096
    config = ServerConfig(max_header_bytes=LIMIT, key_digests=ServerConfig.digests(["secret"]))
    async with listening(config) as server, raw(server) as client:
        sending = asyncio.create_task(flood(client, ENDLESS[what], piece, 500))
        said = await asyncio.wait_for(client.until_closed(), 60)
        await sending
        async with raw(server) as innocent:
            await innocent.send(GET + b"\r\n")
            assert (await innocent.answer())[0] == 200
        assert server.errors(431) == 1 or b" 401 " in said
    assert counted.fed <= LIMIT + 2 * SLICE_BYTES + len(ENDLESS[what])
    if b" 401 " not in said:
        assert said.startswith(b"HTTP/1.1 431 ")
        error = json.loads(said.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "headers_too_large"
        assert str(LIMIT) in error["message"]
        assert "--max-header-bytes" in error["message"]


async def test_who_goes_on_sending_after_a_refusal_is_not_read_for_ever() -> None:
    async with listening(SMALL) as server, raw(server) as client:
        sending = asyncio.create_task(flood(client, GET + b"x: ", b"a" * 65536, 10_000))
        assert (await client.until_closed()).startswith(b"HTTP/1.1 431 ")
        taken = await sending
    assert taken * 65536 < 64 * 2**20  # what lies in the buffers of both systems comes on top of the limit


@pytest.mark.parametrize(("size", "status"), [(LIMIT, 200), (LIMIT + 1, 431)])
async def test_the_limit_of_a_head_is_exact(size: int, status: int) -> None:
    async with listening(SMALL) as server, raw(server) as client:
        used = len("/health") + len("host") + len("localhost") + 4 + len("x") + 4
        await client.send(GET + b"x: " + b"a" * (size - used) + b"\r\n\r\n")
        assert (await client.answer())[0] == status


@pytest.mark.parametrize(("count", "status"), [(20, 200), (21, 431)])
async def test_the_number_of_headers_is_limited(count: int, status: int) -> None:
    async with listening(SMALL) as server, raw(server) as client:
        await client.send(GET + b"".join(b"x%d: y\r\n" % n for n in range(count - 1)) + b"\r\n")
        found, _, body = await client.answer()
        assert found == status
        if status == 431:
            assert "20" in body["error"]["message"]


async def test_trailers_and_chunks_within_the_limit_are_read() -> None:
    engine = FakeEngine()
    value = completion()
    async with listening(SMALL, engine) as server, raw(server) as client:
        chunks = b"".join(b"1;ext=%s\r\n%c\r\n" % (b"e" * 3000, byte) for byte in value)
        await client.send(POST + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\nx: y\r\n\r\n")
        assert (await client.answer())[0] == 200
    assert [bytes(request.prompt) for request in engine.seen] == [b"hi"]


@pytest.mark.parametrize(
    "begin",
    [
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        GET + b"\x00: 1\r\n\r\n",
        GET + b"no colon\r\n\r\n",
    ],
)
async def test_what_is_no_http_gets_the_same_error_body(begin: bytes) -> None:
    async with listening(SMALL) as server, raw(server) as client:
        await client.send(begin)
        status, headers, body = await client.answer()
        assert (status, headers["content-type"], body["error"]["code"]) == (
            400,
            "application/json",
            "invalid_http",
        )


async def test_headers_that_do_not_come_to_an_end_are_a_408_and_silence_is_closed() -> None:
    config = ServerConfig(header_timeout_s=0.2)
    async with listening(config) as server, raw(server) as slow, raw(server) as silent:
        await slow.send(GET)
        status, _, body = await slow.answer()
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert "--header-timeout" in body["error"]["message"]
        assert await silent.until_closed() == b""


async def test_a_second_request_has_the_same_time_for_its_headers() -> None:
    async with listening(ServerConfig(header_timeout_s=0.2)) as server, raw(server) as client:
        await client.send(GET + b"\r\n")
        assert (await client.answer())[0] == 200
        await asyncio.sleep(0.4)  # resting between requests is not limited by it
        await client.send(GET)
        assert (await client.answer())[0] == 408


async def test_a_body_that_does_not_come_is_a_408_and_one_that_comes_slowly_is_read() -> None:
    engine = FakeEngine()
    config = ServerConfig(body_timeout_s=0.3, min_body_rate=10)
    value = completion()
    head = POST + b"content-length: %d\r\n\r\n" % len(value)
    async with listening(config, engine) as server:
        async with raw(server) as client:
            await client.send(head)
            status, _, body = await client.answer()
            assert (status, body["error"]["code"]) == (408, "request_timeout")
            assert "--body-timeout" in body["error"]["message"]
        assert not engine.seen
        async with raw(server) as client:
            await client.send(head + value[:10])
            await asyncio.sleep(0.6)  # ten bytes have bought another second
            await client.send(value[10:])
            assert (await client.answer())[0] == 200


async def test_a_connection_that_rests_is_closed_after_its_time() -> None:
    async with listening(ServerConfig(idle_timeout_s=0.2)) as server, raw(server) as client:
        await client.send(GET + b"\r\n")
        assert (await client.answer())[0] == 200
        assert await asyncio.wait_for(client.until_closed(), 30) == b""


async def test_idle_connections_never_lock_anybody_out() -> None:
    """Twice as many silent sockets as there are places: everybody who asks is answered."""
    places = 20
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(listening(ServerConfig(max_connections=places)))
        idle = [await stack.enter_async_context(raw(server)) for _ in range(2 * places)]
        for _ in range(5):
            async with raw(server) as innocent:
                await innocent.send(GET + b"\r\n")
                assert (await innocent.answer())[0] == 200
        assert server.connections <= places
        assert await asyncio.wait_for(idle[0].until_closed(), 30) == b""


async def test_who_works_is_not_closed_and_who_comes_then_is_told() -> None:
    engine = FakeEngine()
    engine.hold = True
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(listening(ServerConfig(max_connections=3), engine))
        value = completion()
        working = [await stack.enter_async_context(raw(server)) for _ in range(3)]
        for client in working:
            await client.send(POST + b"content-length: %d\r\n\r\n" % len(value) + value)
        while len(engine.seen) < 3:
            await asyncio.sleep(0.001)
        refused = await stack.enter_async_context(raw(server))
        status, headers, body = await refused.answer()
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
        assert "3 connections" in body["error"]["message"]
        assert headers["retry-after"] == "1"
        engine.release()
        for client in working:
            assert (await client.answer())[0] == 200
        # Those three rest now, so the next one finds a place.
        async with raw(server) as late:
            await late.send(GET + b"\r\n")
            assert (await late.answer())[0] == 200


async def test_a_client_that_reads_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.server import words

    engine = FakeEngine(words(*["x" * 50_000] * 400))
    async with listening(ServerConfig(send_timeout_s=0.3), engine) as server, raw(server) as client:
        value = completion(stream=True)
        client._writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(POST + b"content-length: %d\r\n\r\n" % len(value) + value)
        async with asyncio.timeout(60):
            while not engine.aborted:
                await asyncio.sleep(0.01)
        assert engine.aborted == [request.id for request in engine.seen]


async def test_what_is_sent_ahead_is_not_parsed_and_the_first_answer_says_so() -> None:
    engine = FakeEngine()
    engine.hold = True
    value = completion()
    async with listening(ServerConfig(), engine) as server, raw(server) as client:
        one = POST + b"content-length: %d\r\n\r\n" % len(value) + value
        await client.send(one * 50)
        await asyncio.wait_for(engine.arrived.wait(), 30)
        await asyncio.sleep(0.05)
        engine.release()
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await client.until_closed() == b""
        assert len(engine.seen) == 1


async def test_a_client_that_sent_ahead_and_leaves_aborts_its_request() -> None:
    engine = FakeEngine()
    engine.hold = True
    value = completion()
    async with listening(ServerConfig(), engine) as server:
        async with raw(server) as client:
            await client.send(POST + b"content-length: %d\r\n\r\n" % len(value) + value + GET + b"\r\n")
            await asyncio.wait_for(engine.arrived.wait(), 30)
        async with asyncio.timeout(30):
            while not engine.aborted:
                await asyncio.sleep(0.001)


async def test_an_answer_that_came_before_the_body_keeps_the_connection() -> None:
    """A refusal for want of a key is often on its way before the body is."""
    config = ServerConfig(key_digests=ServerConfig.digests(["k"]))
    value = completion()
    async with listening(config) as server, raw(server) as client:
        for _ in range(3):
            await client.send(POST + b"content-length: %d\r\n\r\n" % len(value))
            assert (await client.answer())[0] == 401
            await client.send(value)
            await asyncio.sleep(0.01)
        await client.send(POST + b"content-length: 99999999\r\n\r\n")
        assert (await client.answer())[0] == 401
        sending = asyncio.create_task(flood(client, b"", b"x" * 65536, 10**9))
        await asyncio.wait_for(client.until_closed(), 60)
        await sending


async def test_an_upgrade_leaves_nothing_to_be_taken_for_a_request() -> None:
    async with listening(ServerConfig()) as server, raw(server) as client:
        await client.send(GET + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n" + GET + b"\r\n")
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await client.until_closed() == b""


class Place:
    def __init__(self) -> None:
        self.closed = False

    def give_way(self) -> None:
        self.closed = True


def test_who_never_asked_goes_before_who_rests_and_the_longest_wait_first() -> None:
    places = Connections(3)
    rests, silent, works = Place(), Place(), Place()
    for one in (rests, silent, works):
        assert places.join(one)
    for one in (rests, works):
        places.busy(one)
    places.idle(rests)
    newest = Place()
    assert places.join(newest)
    assert (silent.closed, rests.closed) == (True, False)
    places.busy(newest)
    assert places.join(Place())
    assert rests.closed
    assert (len(places), places.closed_for_room) == (3, 2)


WRONG: list[dict[str, Any]] = [
    {"max_headers": 0}, {"header_timeout_s": 0}, {"body_timeout_s": float("nan")}, {"max_connections": 0},
    {"stream_keepalive_s": -1}, {"cors_origin": "("},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_limit_that_cannot_be_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServerConfig(**wrong)


def test_every_limit_is_an_option_with_the_same_default() -> None:
    """The messages name options: each of them exists, and says what the server does without it."""
    import dataclasses
    import inspect

    from hotprefix import cli

    options = inspect.signature(cli.serve).parameters
    elsewhere = {
        "key_digests": "api_key_file", "served_names": "served_model_name", "drain_s": "drain_seconds",
        "allowed_hosts": "allowed_host", "internal_digest": "internal_key_file",
    }  # fmt: skip
    for setting in dataclasses.fields(ServerConfig):
        option = elsewhere.get(setting.name, setting.name.removesuffix("_s"))
        assert option in options, setting.name
        if setting.name not in ("key_digests", "served_names", "allowed_hosts", "cors_origin"):
            assert options[option].default == setting.default, setting.name
