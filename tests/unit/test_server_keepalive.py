"""Comments that keep a silent stream open at proxies, only where they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from hotprefix.engine.client import Stream
from hotprefix.engine.messages import Generate
from hotprefix.errors import QueueFull
from hotprefix.kernel.plan import Finish
from hotprefix.server.config import ServerConfig
from hotprefix.server.generation import KEEPALIVE
from tests.support.server import FakeEngine, chat, client, events, words

CHAT = "/v1/chat/completions"
OFTEN = ServerConfig(stream_keepalive_s=0.02)


class Slow(FakeEngine):
    """Takes long to take a request, and long to answer."""

    async def submit(self, requests: Sequence[Generate]) -> Stream:
        await asyncio.sleep(0.15)
        stream = await super().submit(requests)
        asyncio.get_running_loop().call_later(0.15, self.release)
        return stream


async def streamed(engine: FakeEngine, config: ServerConfig, **fields: Any) -> tuple[int, str]:
    engine.hold = True
    async with client(engine, config) as http:
        answer = await http.post(CHAT, json=chat(stream=True, **fields))
    return answer.status_code, answer.text


def without_comments(text: str) -> list[Any]:
    return events(text.replace(KEEPALIVE.decode(), ""))


async def test_a_long_wait_is_filled_with_comments_and_the_stream_is_the_same() -> None:
    _, quiet = await streamed(Slow(), ServerConfig())
    assert ":" not in [line[:1] for line in quiet.splitlines()]
    status, text = await streamed(Slow(), OFTEN)
    assert status == 200
    assert text.count(KEEPALIVE.decode()) >= 2
    assert text.startswith(KEEPALIVE.decode())  # also before the engine has taken the request

    def said(stream: list[Any]) -> list[Any]:
        return [e if isinstance(e, str) else [c["delta"] for c in e["choices"]] for e in stream]

    assert said(without_comments(text)) == said(without_comments(quiet))
    assert text.endswith("data: [DONE]\n\n")


async def test_without_a_wait_there_is_no_comment() -> None:
    async with client(FakeEngine(), ServerConfig(stream_keepalive_s=60)) as http:
        answer = await http.post(CHAT, json=chat(stream=True))
    assert KEEPALIVE.decode() not in answer.text


@pytest.mark.parametrize("late", [False, True])
async def test_a_refusal_keeps_its_status_unless_a_comment_came_first(late: bool) -> None:
    class Full(Slow):
        async def submit(self, requests: Sequence[Generate]) -> Stream:
            await asyncio.sleep(0.1 * late)
            raise QueueFull("full")

    status, text = await streamed(Full(), OFTEN)
    assert status == (200 if late else 429)
    if late:
        assert without_comments(text)[-1]["error"]["code"] == "queue_full"


async def test_a_failure_after_comments_only_is_an_error_event() -> None:
    status, text = await streamed(Slow(words(finish=Finish.ERROR, error="fell over")), OFTEN)
    found = without_comments(text)
    assert (status, found[-1]["error"]["message"]) == (200, "fell over")
    assert "[DONE]" not in found
