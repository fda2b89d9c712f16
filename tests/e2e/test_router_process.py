"""The router as a process: before engines in processes of their own, and before the real model."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support import loops
from tests.support.server import events
from tests.support.serving import Server, server

READY = re.compile("ready: ")
ASK: Any = [{"role": "user", "content": "Name three colours."}]


@contextlib.contextmanager
def router(*arguments: str) -> Iterator[Server]:
    """`hotprefix route` on a free port."""
    command = [str(Path(sys.executable).parent / "hotprefix"), "route", "--port", "0", "--poll", "0.05"]
    running = Server([*command, *arguments])
    try:
        running.until_says(READY)
        yield running
    finally:
        running.process.kill()
        running.wait()


def body(count: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": [loops.RUN, 1, 2], "max_tokens": count, **fields}


def workers(running: Server) -> dict[str, Any]:
    return {each["name"]: each for each in httpx.get(f"{running.url}/workers").json()["workers"]}


async def test_two_engines_one_of_which_is_killed() -> None:
    with server() as one, server() as two:
        for each in (one, two):
            each.until_ready()
        named = (f"{one.url},name=one", f"{two.url},name=two")
        with router("--worker", named[0], "--worker", named[1], "--policy", "round_robin") as before:
            direct = httpx.post(f"{one.url}/v1/completions", json=body(5)).json()["choices"]
            async with httpx.AsyncClient(base_url=before.url, timeout=60) as http:
                found = [await http.post("/v1/completions", json=body(5)) for _ in range(4)]
                assert [each.json()["choices"] for each in found] == [direct] * 4
                assert {name: each["requests"] for name, each in workers(before).items()} == {
                    "one": 2, "two": 2
                }  # fmt: skip
                streams = [
                    asyncio.ensure_future(http.post("/v1/completions", json=body(300, stream=True)))
                    for _ in range(6)
                ]
                while workers(before)["one"]["under_way"] < 3:
                    await asyncio.sleep(0.01)
                one.signal(signal.SIGKILL)
                ends = [events((await each).text)[-1] for each in streams]
                assert ends.count("[DONE]") == 3
                lost = [end for end in ends if end != "[DONE]"]
                assert [end["error"]["code"] for end in lost] == ["worker_lost"] * 3
                for _ in range(4):
                    assert (await http.post("/v1/completions", json=body(5))).status_code == 200
            before.signal()
            assert before.wait() == 0


def test_the_openai_package_sees_what_it_sees_without_the_router(live: Server) -> None:
    with router("--worker", live.url) as before:
        told: list[Any] = []
        for url in (live.url, before.url):
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=200)
            (model,) = client.models.list().data
            settings: Any = {"model": model.id, "messages": ASK, "temperature": 0, "max_tokens": 12}
            whole = client.chat.completions.create(**settings)
            stream = client.chat.completions.create(**settings, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            with pytest.raises(openai.NotFoundError) as wrong:
                client.chat.completions.create(**{**settings, "model": "other"})
            told.append((model.id, whole.choices[0].message.content, text, wrong.value.body))
        assert told[0] == told[1]
        assert told[0][1] == told[0][2]
