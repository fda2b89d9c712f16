"""Bodies: bounds come first, work after; who waits for whom; what memory they hold."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import platform
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotprefix.server import bodies, intake
from hotprefix.server.bodies import bounded
from hotprefix.server.config import ServerConfig
from hotprefix.server.errors import ApiError
from tests.support.server import BytesText, FakeEngine, chat, client
from tests.support.sockets import listening, raw

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


# -- what a body may hold ---------------------------------------------------------------------------

HUGE = {
    "messages": b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * 1_000_000) + b"]}",
    "unknown fields": b"{" + b",".join(b'"f%d":0' % n for n in range(1_500_000)) + b"}",
    "lists": b'{"prompt":' + b"[],".join([b"["] * 3_000_000) + b"]}",
    "objects in a message": b'{"messages":[{"role":"user","x":[' + b"{}," * 500_000 + b"0]}]}",
    "numbers": b'{"prompt":[' + b"1," * 12_000_000 + b"1]}",
}


@pytest.mark.parametrize("what", HUGE)
async def test_what_a_body_holds_is_counted_before_it_is_parsed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, parsed = FakeEngine(), 0

    def parse(*args: Any, **kwargs: Any) -> Any:
        nonlocal parsed
        parsed += 1

    monkeypatch.setattr(bodies, "from_json", parse)
    async with client(engine) as http:
        for route in (CHAT, TEXT, "/tokenize", "/detokenize"):
            answer = await http.post(route, content=HUGE[what], headers=JSON)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "body_too_complex")
            assert "--max-json-" in error["message"]
    assert not parsed
    assert not engine.seen


SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.text('a",:[]{}\\/\n\u00e9', max_size=6)
NAMES = st.text('a"\\,', max_size=3)
ITEMS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int]:
    """(items, separators): what the limits are about, from the parsed value."""
    if isinstance(value, str):
        return 1, 0
    if isinstance(value, dict):
        inner = [counted(part) for part in value.values()]
        return 1 + len(value) + sum(i for i, _ in inner), max(0, len(value) - 1) + sum(s for _, s in inner)
    if isinstance(value, list):
        inner = [counted(part) for part in value]
        return 1 + sum(i for i, _ in inner), max(0, len(value) - 1) + sum(s for _, s in inner)
    return 0, 0


@settings(deadline=None, max_examples=100)
@given(ITEMS, st.booleans(), st.sampled_from([None, 1]))
def test_the_count_is_exact_whatever_texts_hold(value: Any, ascii_only: bool, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    items, separators = counted(value)
    bounded(body, ServerConfig(max_json_items=max(1, items), max_json_values=separators + 1))
    if items > 1:
        with pytest.raises(ApiError, match=str(items)):
            bounded(body, ServerConfig(max_json_items=items - 1))
    if separators > 0:
        with pytest.raises(ApiError, match=f"{separators + 1} values"):
            bounded(body, ServerConfig(max_json_values=separators))


async def test_a_long_text_full_of_separators_is_no_complex_body() -> None:
    config = ServerConfig(max_json_items=100, max_json_values=100)
    async with client(FakeEngine(), config) as http:
        for text in ("a,b" * 900, '{"a":[1,2]}' * 300, '\\"' * 1000, '"' * 2000):
            answer = await http.post(TEXT, json={"prompt": text})
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", ["messages", "tools"])
async def test_the_number_of_messages_and_tools_is_limited(name: str) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    entry = {"messages": {"role": "user", "content": "a"}, "tools": tool}[name]
    async with client(FakeEngine(), ServerConfig(max_messages=3)) as http:
        for route in (CHAT, "/tokenize"):
            fits = await http.post(route, json={"messages": chat()["messages"], name: [entry] * 3})
            assert fits.status_code == 200, fits.text
            answer = await http.post(route, json={"messages": chat()["messages"], name: [entry] * 4})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, name)
            assert "4 entries" in error["message"]
            assert "--max-messages" in error["message"]


@pytest.mark.parametrize("where", ["body", "message"])
async def test_an_object_of_very_many_fields_is_refused_as_one(where: str) -> None:
    """Each unknown field would be an error of its own, with a copy of its value."""
    many = {f"f{n}": n for n in range(50_000)}
    body = chat(**many) if where == "body" else {"messages": [{"role": "user", "content": "a", **many}]}
    async with client(FakeEngine()) as http:
        answer = await http.post(CHAT, json=body)
    assert answer.status_code == 400
    assert "1000" in answer.json()["error"]["message"]


# -- who waits for whom -----------------------------------------------------------------------------


class Held(BytesText):
    """Tokenizing a text that begins with a letter of `held` waits until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.begun: list[str] = []
        self.at_once = self.most = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.begun.append(text[0])
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        if text[0] == "L":
            self.go_on.wait(60)
        self.at_once -= 1
        return [1]


async def test_long_documents_wait_for_each_other_and_nobody_waits_for_them() -> None:
    import httpx

    from hotprefix.server.app import create_app

    text = Held()
    app = create_app(FakeEngine(), ServerConfig(), text)
    large, between = intake.LARGE_BYTES + 1, intake.INLINE_BYTES + 1
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        attack = [asyncio.create_task(http.post(TEXT, json={"prompt": "L" * large})) for _ in range(6)]
        while not text.begun:
            await asyncio.sleep(0.001)
        for name, size in (("s", 1), ("m", between), ("s", 1), ("m", between)):
            assert (await http.post(TEXT, json={"prompt": name * size})).status_code == 200
            assert (await http.get("/health")).status_code == 200
        assert text.begun == ["L", "s", "m", "s", "m"]
        text.go_on.set()
        assert [(await task).status_code for task in attack] == [200] * 6
    assert text.begun.count("L") == 6
    assert text.most == 2
    assert app.state.service.intake.held == 0


# -- what they hold ---------------------------------------------------------------------------------


async def test_bodies_that_do_not_come_to_their_end_give_way_to_those_that_do() -> None:
    """Twenty clients hold back the last byte of large bodies: whoever sends a whole one is answered."""
    size = 64 * 1024
    config = ServerConfig(body_limit=size)
    engine = FakeEngine()
    head = POST + b"content-length: %d\r\n\r\n" % size
    value = b'{"prompt":"hi"}'
    async with listening(config, engine) as server, contextlib.AsyncExitStack() as stack:
        room = intake.BODIES_HELD * size
        attackers = [await stack.enter_async_context(raw(server)) for _ in range(20)]
        for attacker in attackers:
            await attacker.send(head + b" " * (size - 1))
        while server.service.intake.held < room - size:
            await asyncio.sleep(0.001)
        for _ in range(5):
            async with raw(server) as innocent:
                await innocent.send(head + value + b" " * (size - len(value)))
                assert (await innocent.answer())[0] == 200
            assert server.service.intake.held <= room
        assert len(engine.seen) == 5
        assert server.errors(503) >= 10
        for attacker in attackers:
            attacker.close()
        async with asyncio.timeout(60):
            while server.service.intake.held:
                await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "send",
    [lambda: (JSON, b'{"prompt":"a"}'), lambda: (JSON, b"{"), lambda: (JSON, b"x" * 200), lambda: ({}, b"{}"),
     lambda: (JSON, b'{"prompt":"a","nope":1}')],
)  # fmt: skip
async def test_whatever_became_of_a_body_its_room_is_given_back(
    send: Callable[[], tuple[dict[str, str], bytes]],
) -> None:
    async with listening(ServerConfig(body_limit=100)) as server, raw(server) as one:
        headers, body = send()
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        begin = (
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{lines}transfer-encoding: chunked\r\n\r\n"
        )
        await one.send(begin.encode() + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        await one.answer() if len(body) <= 100 else await one.until_closed()
        assert server.service.intake.held == 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no malloc_trim")
async def test_memory_for_long_texts_goes_back_to_the_system() -> None:
    """Tokenizing takes a hundred times a text's size; the allocator would keep most of it."""
    import httpx

    from hotprefix.server.app import create_app
    from hotprefix.server.model_text import ModelText

    text = ModelText.load("default")
    app = create_app(FakeEngine(), ServerConfig(), text)
    words = "A document of many words, all of them ordinary. "
    process = psutil.Process()

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:

        async def tokenize(size: int) -> None:
            answer = await http.post("/tokenize", json={"prompt": words * (size // len(words))})
            assert answer.status_code == 200

        await tokenize(100_000)
        gc.collect()
        intake.give_memory_back()
        before = process.memory_info().rss
        await asyncio.gather(*(tokenize(1_000_000) for _ in range(3)))
        gc.collect()
        async with asyncio.timeout(60):  # the last of it goes back after the answer
            while process.memory_info().rss > before + 48 * 2**20:
                await asyncio.sleep(0.05)
