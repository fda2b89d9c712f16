"""Parts of the router that need no socket: the way of an answer's bytes, and prompts read as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotprefix.router.matching_text import TextMatcher
from hotprefix.router.passage import Passage
from hotprefix.router.prompt import Prompt
from tests.support.server import events

NO_HEADERS: Mapping[str, str] = {}


def joined(data: bytes, cuts: list[int]) -> tuple[Passage, list[bytes]]:
    """The bytes through a passage, cut at these places."""
    passage = Passage(events=True, must_end=True)
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return passage, [passage.feed(data[a:b]) for a, b in pairwise(places)]


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@given(cuts=st.lists(st.integers(0, 10_000), max_size=12))
def test_a_stream_passes_as_it_is_however_it_is_cut(end: str, cuts: list[int]) -> None:
    data = (
        "data: {1}" + end + ": comment" + end + "event: x\ndata: {2}" + end + "data: [DONE]" + end
    ).encode()
    passage, parts = joined(data, cuts)
    rest = passage.ended()
    assert rest is not None
    assert passage.done
    assert b"".join([*parts, rest]) == data
    assert all(part.endswith(end.encode()) for part in parts if part)


@given(cut=st.integers(0, 30), cuts=st.lists(st.integers(0, 100), max_size=4))
def test_a_stream_that_breaks_anywhere_is_whole_events_and_an_error(cut: int, cuts: list[int]) -> None:
    data = b'data: {"a": 1}\n\ndata: {"b": 2}\n\n'[:cut]
    passage, parts = joined(data, cuts)
    last = passage.broken("it is gone")
    assert last is not None
    found = events(b"".join([*parts, last]).decode())
    assert found[:-1] == [{"a": 1}, {"b": 2}][: data.count(b"\n\n")]
    assert found[-1]["error"]["code"] == "worker_lost"


def test_comments_are_no_beginning() -> None:
    passage = Passage(events=True, must_end=True)
    passage.feed(b": keep-alive\n\n")
    assert not passage.begun
    passage.feed(b"event: chunk\ndata: {}\n\n")
    assert passage.begun


def test_an_event_without_end_is_not_kept_for_ever() -> None:
    passage = Passage(events=True, must_end=True)
    assert passage.feed(b"data: ") == b""
    assert len(passage.feed(b"x" * (2 << 20))) > 1 << 20
    last = passage.broken("it is gone")
    assert last is not None
    assert last.startswith(b"\n\ndata: ")  # the event that the client has a part of ends first


def test_a_stream_is_complete_by_its_last_event_and_not_by_what_a_text_says() -> None:
    passage = Passage(events=True, must_end=True)
    passage.feed(b'data: {"text": "[DONE]"}\n\n')
    assert not passage.done
    assert passage.ended() is None
    passage.feed(b"data: [DONE]")
    assert passage.ended() == b"data: [DONE]"
    assert passage.done


async def read(value: Any, headers: Mapping[str, str] = NO_HEADERS, size: int = 4) -> Prompt:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return await TextMatcher(lambda _: size).read("/v1/completions", body, headers, None)


async def test_what_cannot_be_read_has_no_keys_and_is_not_refused() -> None:
    for body in (b"", b"{", b"[1]", b'"x"', b"\xff", b"null"):
        assert await read(body) == Prompt()
    odd = {"model": 3, "prompt": {"a": 1}, "max_tokens": "many", "n": True, "stream": "yes", "messages": [1]}
    found = await read(odd)
    assert (found.keys, found.tokens, found.model, found.choices, found.stream) == ((), 1, None, 1, False)


async def test_keys_are_equal_as_far_as_texts_are() -> None:
    one, two = await read({"prompt": "a" * 64 + "b" * 64}), await read({"prompt": "a" * 64 + "c" * 64})
    assert (len(one.keys), one.tokens) == (8, 32)
    assert [a == b for a, b in zip(one.keys, two.keys, strict=True)] == [True] * 4 + [False] * 4
    shifted = await read({"prompt": "b" * 64 + "a" * 64})
    assert not set(one.keys) & set(shifted.keys)
    for other in ({"model": "m"}, {"cache_salt": "s"}):
        assert not set((await read({"prompt": "a" * 128, **other})).keys) & set(one.keys)


async def test_a_conversation_goes_on_where_it_was() -> None:
    turns = [{"role": "user", "content": "x" * 100}, {"role": "assistant", "content": "y" * 50}]
    first, second = await read({"messages": turns[:1]}), await read({"messages": turns})
    assert second.keys[: len(first.keys)] == first.keys
    parts = await read({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 100}]}]})
    assert parts.keys
    tools = await read({"messages": turns, "tools": [{"type": "function"}]})
    assert tools.keys[0] != second.keys[0]


async def test_token_ids_count_as_tokens() -> None:
    one = await read({"prompt": list(range(100))})
    assert (one.tokens, len(one.keys)) == (101, 25)
    assert (await read({"prompt": [list(range(100)), [1]]})).keys == one.keys
    assert len((await read({"prompt": ["a" * 64, "b" * 64]})).keys) == 4


async def test_what_else_is_read() -> None:
    found = await read({"stream": True, "max_tokens": 7, "n": 3, "model": "m"})
    assert (found.stream, found.outputs, found.choices, found.model) == (True, 7, 3, "m")
    for headers, body, session in (
        ({"x-session-id": "a"}, {"session_id": "b"}, "a"),
        ({}, {"session_id": "b", "user": "c"}, "b"),
        ({}, {"prompt_cache_key": "d"}, "d"),
        ({}, {"user": ""}, None),
    ):
        assert (await read(body, headers)).session == session


async def test_a_long_body_is_read_beside_the_loop() -> None:
    found = await read({"prompt": "z" * 300_000})
    assert len(found.keys) == 300_000 // 16
