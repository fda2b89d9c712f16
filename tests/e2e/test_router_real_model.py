"""A router before two real engines in fp32: an answer that moves to another engine is the one that stayed."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

import httpx
import pytest

from hotprefix.engine.build import build_engine
from hotprefix.engine.config import EngineConfig
from tests.support.inline import KEY, by_choice
from tests.support.routing import routing
from tests.support.stepped import Engine, behind, listening
from tests.unit.tiny_models import one_thread

ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Name three colours."}], "stream": True, "max_tokens": 16,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded, two choices": {"temperature": 0.9, "top_p": 0.9, "seed": 11, "n": 2},
}


def text(stream: bytes) -> dict[int | None, list[Any]]:
    return {index: [value["choices"] for value in values] for index, values in by_choice(stream).items()}


async def moved(http: httpx.AsyncClient, one: Engine, asked: dict[str, Any]) -> bytes:
    """The answer, whose connection is cut after five steps."""
    one.engine.let(5)
    answer = asyncio.ensure_future(http.post("/v1/chat/completions", json=asked))
    while one.engine.left >= 1:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    one.cut()
    return (await answer).content


@pytest.mark.parametrize("case", CASES)
async def test_an_answer_of_the_real_model_goes_on_as_it_was(case: str) -> None:
    asked = {**ASK, **CASES[case]}
    with one_thread():
        config = EngineConfig(dtype="float32", kv_tokens=4096, threads=1)
        async with contextlib.AsyncExitStack() as stack:
            one, two = [
                await stack.enter_async_context(listening(behind(name, build_engine(config))))
                for name in ("one", "two")
            ]
            named = [f"{each.url},name={each.name}" for each in (one, two)]
            settings = {"internal_key": KEY, "policy": "round_robin", "probe_timeout_s": 30.0}
            found = await stack.enter_async_context(routing(*named, **settings))
            answer = await moved(found.http, one, asked)
            assert dict(found.pool.desk.tally.migrations) == {("cut", "resumed"): 1}
            one.engine.let(math.inf)
            async with httpx.AsyncClient(base_url=one.url, timeout=60) as direct:
                whole = (await direct.post("/v1/chat/completions", json=asked)).content
            assert text(answer) == text(whole)
            found.nothing_left()
