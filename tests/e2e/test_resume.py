"""A stream that breaks off anywhere and is taken up is the stream that did not break off: on the real model,
in fp32, through the server's routes and the router's splice. Only log-probabilities differ, in their last
digits, because positions are computed in other batches."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from hotprefix.engine.build import build_engine
from hotprefix.engine.config import EngineConfig
from hotprefix.server.app import create_app
from hotprefix.server.model_text import ModelText
from tests.support.inline import (
    CONFIG,
    InlineEngine,
    boundaries,
    by_choice,
    marked,
    taken_up,
    unmarked,
    values,
)
from tests.unit.tiny_models import one_thread

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "Name three colours."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"colours": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2}},
    "required": ["colours"],
    "additionalProperties": False,
}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
STOPPED, JAPANESE = '"finish_reason":"stop"', "日本語で「日本」"
GREEDY, SEEDED = {"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "seed": 11}

# name: (path, what the body has, whether its text must show something of what is tested)
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "greedy": (CHAT, {**GREEDY, "max_tokens": 12, "return_token_ids": True, **USAGE}, "content"),
    "seeded": (TEXT, {**SEEDED, "max_tokens": 12, "return_token_ids": True, **USAGE}, "text"),
    "no seed is needed where the draw is certain": (TEXT, {"top_k": 1, "max_tokens": 6}, "text"),
    "two choices": (CHAT, {**SEEDED, "n": 2, "max_tokens": 8, **USAGE}, '"index":1'),
    "two prompts, two choices": (TEXT, {**SEEDED, "n": 2, "max_tokens": 4, "prompt": ["One", "A b"]}, "text"),
    "penalties and least tokens": (
        TEXT,
        {**SEEDED, "max_tokens": 12, "min_tokens": 9, "frequency_penalty": 1.1, "presence_penalty": 0.3,
         "repetition_penalty": 1.3, "logit_bias": {"28": 2.0}},
        "text",
    ),
    "a stop string": (CHAT, {**GREEDY, "max_tokens": 40, "stop": ["s a colour that can"]}, STOPPED),
    "a stop string that is shown": (
        TEXT, {**GREEDY, "max_tokens": 40, "prompt": "One, two, three,", "stop": ["five, six"],
               "include_stop_str_in_output": True}, "five, six",
    ),
    "a stop string that never comes": (
        TEXT,
        {**GREEDY, "max_tokens": 16, "prompt": "One, two, three,", "stop": ["four, five, six, seven!"]},
        "six",
    ),
    "a JSON schema": (
        CHAT,
        {**GREEDY, "max_tokens": 60,
         "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}},
        STOPPED,
    ),
    "a tool call": (
        CHAT, {**GREEDY, "max_tokens": 60, "tools": [WEATHER], "tool_choice": "required"}, '"tool_calls"',
    ),
    "two choices with tool calls": (
        CHAT,
        {**SEEDED, "n": 2, "max_tokens": 60, "tools": [WEATHER], "tool_choice": "required"},
        '"index":1',
    ),
    "tokens that are parts of characters": (TEXT, {**GREEDY, "max_tokens": 10, "prompt": JAPANESE}, "は"),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[InlineEngine]:
    with one_thread():
        yield InlineEngine(build_engine(EngineConfig(dtype="float32", kv_tokens=4096, threads=1)))


@pytest.fixture
async def http(engine: InlineEngine) -> AsyncIterator[httpx.AsyncClient]:
    text = ModelText.load(EngineConfig().model)
    transport = httpx.ASGITransport(create_app(engine, CONFIG, text))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def request(path: str, fields: dict[str, Any]) -> bytes:
    usual = {"messages": ASK} if path == CHAT else {"prompt": "The sun is"}
    return json.dumps({**usual, "stream": True, **fields}).encode()


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_taken_up_behind_any_event_is_the_one_that_was_not_broken(
    name: str, http: httpx.AsyncClient
) -> None:
    path, fields, shows = CASES[name]
    body = request(path, fields)
    stream = await marked(http, path, body)
    whole = unmarked(path, body, stream)
    assert shows in whole.decode()
    several = len(by_choice(whole).keys() - {None}) > 1
    for cut in boundaries(stream):
        found = await taken_up(http, path, body, stream, cut)
        same = by_choice(found) == by_choice(whole) if several else found == whole
        assert same, f"cut behind byte {cut}"


async def test_a_stream_may_break_as_often_as_it_likes(http: httpx.AsyncClient) -> None:
    body = request(CHAT, {**SEEDED, "n": 2, "max_tokens": 8, **USAGE})
    stream = await marked(http, CHAT, body)
    third = boundaries(stream)[2]
    cuts = [third, third - 40, third, 7, third]
    found = await taken_up(http, CHAT, body, stream, *cuts)
    assert by_choice(found) == by_choice(unmarked(CHAT, body, stream))


def near(one: Any, other: Any) -> bool:
    """Whether two values of JSON are equal, numbers up to their last digits."""
    if isinstance(one, float) or isinstance(other, float):
        return other == pytest.approx(one, abs=1e-3)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(near(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(near, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {**GREEDY, "logprobs": True, "top_logprobs": 2, "max_tokens": 8}),
        (CHAT, {**GREEDY, "logprobs": True, "max_tokens": 40, "stop": ["s a colour that can"]}),
        (TEXT, {**SEEDED, "logprobs": 2, "max_tokens": 8}),
        (TEXT, {**GREEDY, "logprobs": 1, "echo": True, "max_tokens": 6}),
        (TEXT, {**GREEDY, "logprobs": 1, "max_tokens": 10, "prompt": JAPANESE}),
    ],
)
async def test_log_probabilities_go_on_with_their_tokens_and_offsets(
    path: str, fields: dict[str, Any], http: httpx.AsyncClient
) -> None:
    body = request(path, fields)
    stream = await marked(http, path, body)
    whole = values(unmarked(path, body, stream))
    assert any(choice["logprobs"] for value in whole for choice in value["choices"])
    for cut in boundaries(stream)[:-1]:
        found = values(await taken_up(http, path, body, stream, cut))
        assert near(found, whole), f"cut behind byte {cut}"


async def test_what_was_said_is_found_in_the_cache(engine: InlineEngine, http: httpx.AsyncClient) -> None:
    """A second break finds prompt and outputs where the first one left them: nothing but the last, incomplete
    page is computed again."""
    body = request(
        TEXT, {**GREEDY, "max_tokens": 40, "prompt": "Once upon a time, far away, there was a king"}
    )
    stream = await marked(http, TEXT, body)
    cut = boundaries(stream)[34]
    await taken_up(http, TEXT, body, stream, cut)
    before = engine.loop.kernel.counters.computed_prompt_tokens
    await taken_up(http, TEXT, body, stream, cut)
    known = len(engine.seen[-1].prompt) + len(engine.seen[-1].outputs)
    assert known > 40
    assert engine.loop.kernel.counters.computed_prompt_tokens - before == known - (known - 1) // 16 * 16
