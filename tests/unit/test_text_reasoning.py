"""Thought apart from answer, however the text is cut; on the wire whole and streamed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotprefix.engine.text.reasoning import ReasoningSplitter
from hotprefix.kernel.plan import Finish
from hotprefix.server.text import Text
from tests.support.server import FakeEngine, chat, client, events, words

CHAT = "/v1/chat/completions"


def split(parts: list[str], *, opened: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened=opened)
    found = [*map(splitter.push, parts), splitter.flush()]
    return "".join(r for r, _ in found), "".join(c for _, c in found)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nso\n\nand\n</think>\n\nYes.\n", False, "so\n\nand", "Yes.\n"),
        (" \n<think>so</think>Yes", False, "so", "Yes"),
        ("so\n</think>\n\nYes", True, "so", "Yes"),
        ("<think>\n\n</think>\n\nYes", False, "", "Yes"),
        ("<think>\ncut sho\n", False, "cut sho", ""),
        ("<think>cut </thi", False, "cut </thi", ""),
        ("cut", True, "cut", ""),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        ("</think>Yes", False, "", "</think>Yes"),
        (" <thi", False, "", " <thi"),
        ("  plain", False, "", "  plain"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("", False, "", ""),
    ],
)
def test_known_outputs_whole_and_by_character(text: str, opened: bool, reasoning: str, content: str) -> None:
    assert split([text], opened=opened) == (reasoning, content)
    assert split(list(text), opened=opened) == (reasoning, content)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "think>", "</", "\n", " ", "a"]), max_size=10).map(
        "".join
    ),
    st.lists(st.integers(0, 60), max_size=6),
    st.booleans(),
)
def test_no_cut_changes_the_outcome(text: str, cuts: list[int], opened: bool) -> None:
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert split(parts, opened=opened) == split([text], opened=opened)


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True), ("…assistant<think>", True),
        ("<think>\n\n</think>\n\n", False), ("assistant\n", False), ("", False),
    ],
)  # fmt: skip
def test_a_prompt_that_opens_a_thought_is_known_by_its_end(prompt: str, opened: bool) -> None:
    reasoning, _ = ReasoningSplitter.after(prompt).push("so")
    assert (reasoning == "so") == opened


THOUGHT = words("<thi", "nk>\nso ", "and\n</think>", "\n\nYes", ".")


async def ask(engine: FakeEngine, **fields: Any) -> Any:
    async with client(engine) as http:
        answer = await http.post(CHAT, json=chat(**fields))
    assert answer.status_code == 200, answer.text
    return events(answer.text) if fields.get("stream") else answer.json()["choices"][0]


async def test_reasoning_is_apart_only_if_asked_for_whole_and_streamed() -> None:
    message = (await ask(FakeEngine(THOUGHT), separate_reasoning=True))["message"]
    assert (message["reasoning_content"], message["content"]) == ("so and", "Yes.")
    stream = await ask(FakeEngine(THOUGHT), separate_reasoning=True, stream=True)
    deltas = [c["delta"] for e in stream[:-1] for c in e["choices"]]
    for field in ("reasoning_content", "content"):
        assert "".join(d.get(field) or "" for d in deltas) == message[field]
    for fields in ({}, {"separate_reasoning": False}):
        plain = (await ask(FakeEngine(THOUGHT), **fields))["message"]
        assert "reasoning_content" not in plain
        assert plain["content"] == "<think>\nso and\n</think>\n\nYes."


async def test_a_model_that_does_not_think_has_no_reasoning() -> None:
    message = (await ask(FakeEngine(words("Yes.")), separate_reasoning=True))["message"]
    assert (message["reasoning_content"], message["content"]) == (None, "Yes.")


async def test_an_answer_cut_inside_its_thought_can_be_sent_back() -> None:
    engine = FakeEngine(words("<think>\nso", finish=Finish.LENGTH))
    message = (await ask(engine, separate_reasoning=True))["message"]
    assert (message["reasoning_content"], message["content"]) == ("so", "")
    async with client(engine) as http:
        for sent in (message, message | {"content": None}):
            body = chat() | {"messages": [*chat()["messages"], sent, *chat()["messages"]]}
            assert (await http.post(CHAT, json=body)).status_code == 200


async def test_a_prompt_with_an_open_thought_starts_in_it() -> None:
    from tests.support.server import BytesText

    class Opens(BytesText):
        def render(self, *args: Any, **kwargs: Any) -> list[int]:
            return [*super().render(*args, **kwargs), *b"<think>\n"]

    import httpx

    from hotprefix.server.app import create_app
    from hotprefix.server.config import ServerConfig

    text: Text = Opens()
    app = create_app(FakeEngine(words("so\n</think>\n\nYes.")), ServerConfig(), text)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        answer = await http.post(CHAT, json=chat(separate_reasoning=True))
    message = answer.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so", "Yes.")
