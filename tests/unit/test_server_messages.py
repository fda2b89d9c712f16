"""What client libraries put inside messages: ignored by a list, used if it says something, else refused."""

from __future__ import annotations

from typing import Any

import pytest

from hotprefix.server import chat
from hotprefix.server.bodies import check
from hotprefix.server.schemas import Chat
from tests.support.server import FakeEngine, client

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CACHE = {"type": "ephemeral"}

HARMLESS: list[dict[str, Any]] = [
    # Anthropic's cache marks, as LiteLLM and OpenRouter pass them on
    {"role": "user", "content": "a", "cache_control": CACHE},
    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": CACHE}]},
    # an answer of OpenAI's, as its package dumps it
    {"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None,
     "function_call": None, "tool_calls": None},
    {"role": "assistant", "content": "a", "annotations": [{"type": "url_citation", "url_citation": {}}]},
    # ids and times of chat front ends
    {"role": "user", "content": "a", "id": "msg_1", "timestamp": 1, "created_at": "now", "metadata": {}},
    {"role": "assistant", "status": "completed",
     "content": [{"type": "text", "text": "a", "annotations": [], "id": "p", "citations": []}]},
    # reasoning of other servers
    {"role": "assistant", "content": "a", "reasoning": "r",
     "reasoning_details": [{"type": "reasoning.text"}]},
    {"role": "assistant", "content": "a", "reasoning": {"effort": "low"}, "thinking_blocks": []},
    {"role": "assistant", "content": "a", "provider_specific_fields": {}, "citations": [], "weight": 1},
    # parts of calls
    {"role": "assistant", "content": None,
     "tool_calls": [{**CALL, "index": 0, "extra_content": {}, "cache_control": CACHE,
                     "provider_specific_fields": {}}]},
]  # fmt: skip


@pytest.mark.parametrize("message", HARMLESS)
async def test_fields_that_change_nothing_are_ignored(message: dict[str, Any]) -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        answer = await http.post(CHAT, json={"messages": [USER, message]})
    assert answer.status_code == 200, answer.text
    known = {"role", "content", "tool_calls", "reasoning_content"}
    told = chat.template_message(check(Chat, {"messages": [message]}).messages[0])
    assert set(told) <= known
    assert set(told.get("tool_calls", [{}])[0]) <= {"id", "type", "function"}


async def test_marks_on_tools_are_ignored_and_reach_no_prompt() -> None:
    tool = {"type": "function", "function": {"name": "f", "cache_control": CACHE}, "cache_control": CACHE}
    body = check(Chat, {"messages": [USER], "tools": [tool]})
    assert chat.template_tools(body) == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (USER | {"colour": "red"}, "messages[0].colour"),
        (USER | {"prefix": True}, "messages[0].prefix"),
        ({"role": "assistant", "content": None, "audio": {"id": "a"}}, "messages[0].audio"),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            "messages[0].function_call",
        ),
        (USER | {"suffix": ""}, "messages[0].suffix"),  # harmless in a body, unknown here
        ({"role": "assistant", "tool_calls": [CALL | {"colour": 1}]}, "messages[0].tool_calls[0].colour"),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": 3}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
async def test_unknown_fields_are_named(message: dict[str, Any], param: str) -> None:
    async with client(FakeEngine()) as http:
        answer = await http.post(CHAT, json={"messages": [message]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


def told(message: dict[str, Any]) -> dict[str, Any]:
    return chat.template_message(check(Chat, {"messages": [message]}).messages[0])


def test_reasoning_has_two_names_and_a_refusal_is_content() -> None:
    said = {"role": "assistant", "content": "a"}
    assert told(said | {"reasoning": "r"}) == said | {"reasoning_content": "r"}
    assert told(said | {"reasoning": "r", "reasoning_content": "s"}) == said | {"reasoning_content": "s"}
    assert told({"role": "assistant", "content": None, "refusal": "no"}) == {
        "role": "assistant",
        "content": "no",
    }
    assert told(said | {"refusal": "no"}) == said
    assert "content" not in told({"role": "assistant", "refusal": "no", "tool_calls": [CALL]})


def test_arguments_may_be_any_text_or_an_object() -> None:
    for arguments in ("", "{", "[1]", "not JSON", {"a": [1]}):
        call = {**CALL, "function": {"name": "f", "arguments": arguments}}
        message = told({"role": "assistant", "tool_calls": [call]})
        assert message["tool_calls"][0]["function"]["arguments"] == arguments
