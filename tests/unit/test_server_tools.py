"""Tool calls and grammars on the wire. How calls are found in text is tested with the parser."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from hotprefix.engine.params import StructuredOutput
from hotprefix.kernel.plan import Finish
from hotprefix.server.app import create_app
from hotprefix.server.config import ServerConfig
from tests.support.server import BytesText, FakeEngine, chat, client, events, words

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
RAW = '{"b":  1.0,\n"a": "é\\u00e9"}'
TWO = words(
    "Well. <tool", f'_call>\n{{"name": "f", "arguments": {RAW[:9]}', f"{RAW[9:]}}}\n</tool_call>",
    '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
)  # fmt: skip


async def ask(engine: FakeEngine, **fields: Any) -> Any:
    async with client(engine) as http:
        answer = await http.post(CHAT, json=chat(tools=TOOLS, **fields))
    assert answer.status_code == 200, answer.text
    return events(answer.text) if fields.get("stream") else answer.json()["choices"][0]


async def test_arguments_come_through_byte_for_byte_whole_and_streamed() -> None:
    whole = await ask(FakeEngine(TWO))
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "Well."
    calls = whole["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "f", "arguments": RAW},
        {"name": "g", "arguments": "{}"},
    ]
    assert len({call["id"] for call in calls}) == 2
    stream = await ask(FakeEngine(TWO), stream=True)
    pieces = [c for e in stream[:-1] for c in e["choices"]]
    assert "".join(c["delta"].get("content") or "" for c in pieces) == "Well."
    deltas = [call for c in pieces for call in c["delta"].get("tool_calls", ())]
    for index, call in enumerate(calls):
        first, *rest = [d for d in deltas if d["index"] == index]
        assert (first["type"], first["function"]["name"]) == ("function", call["function"]["name"])
        assert re.fullmatch("[a-zA-Z0-9]{9}", first["id"])  # the one form that every known template takes
        assert all("id" not in d and "name" not in d["function"] for d in rest)
        text = "".join(d["function"]["arguments"] for d in [first, *rest])
        assert text == call["function"]["arguments"]
    assert pieces[-1]["finish_reason"] == "tool_calls"


async def test_only_calls_have_no_content_and_a_cut_call_says_length() -> None:
    only = words('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    assert (await ask(FakeEngine(only)))["message"]["content"] is None
    cut = words('<tool_call>\n{"name": "f", "arguments": {"a', finish=Finish.LENGTH)
    choice = await ask(FakeEngine(cut))
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a'


async def test_what_only_began_like_a_call_is_content_in_the_end() -> None:
    stream = await ask(FakeEngine(words("a <tool", "_ca")), stream=True)
    pieces = [c for e in stream[:-1] for c in e["choices"]]
    assert "".join(c["delta"].get("content") or "" for c in pieces) == "a <tool_ca"
    assert pieces[-1]["finish_reason"] == "stop"


async def test_parallel_false_gives_one_call_and_none_gives_text() -> None:
    assert len((await ask(FakeEngine(TWO), parallel_tool_calls=False))["message"]["tool_calls"]) == 1
    plain = await ask(FakeEngine(TWO), tool_choice="none")
    assert "tool_calls" not in plain["message"]
    assert plain["message"]["content"].count("<tool_call>") == 2
    assert plain["finish_reason"] == "stop"


async def test_the_prompt_is_the_same_whatever_the_choice() -> None:
    engine = FakeEngine()
    named = {"type": "function", "function": {"name": "g"}}
    for choice in (None, "none", "auto", "required", named):
        await ask(engine, tool_choice=choice)
    assert len({request.prompt for request in engine.seen}) == 1
    wanted = [
        None,
        None,
        None,
        StructuredOutput("lark", "required True"),
        StructuredOutput("lark", "name:g True"),
    ]
    assert [request.params.structured for request in engine.seen] == wanted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"guided_regex": "too hard"}, "guided_regex"),
        ({"structured_outputs": {"regex": "too hard"}}, "structured_outputs.regex"),
    ],
)
async def test_tools_and_grammars_that_cannot_be_are_refused(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        answer = await http.post(CHAT, json=chat(**fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not engine.seen


async def test_every_grammar_is_checked_before_the_engine_sees_it() -> None:
    text, engine = BytesText(), FakeEngine()
    app = create_app(engine, ServerConfig(), text)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        for route, body in ((CHAT, chat()), ("/v1/completions", {"prompt": "a"})):
            await http.post(route, json={**body, "guided_regex": "a+"})
    assert text.checked == [StructuredOutput("regex", "a+")] * 2
    assert len(engine.seen) == 2


async def test_hidden_marks_are_shown_when_there_are_tools() -> None:
    class Hides(BytesText):
        hides_tool_marks = True

    engine = FakeEngine()
    app = create_app(engine, ServerConfig(), Hides())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        await http.post(CHAT, json=chat(tools=TOOLS))
        await http.post(CHAT, json=chat())
    assert [request.params.skip_special_tokens for request in engine.seen] == [False, True]


async def test_a_conversation_with_calls_can_be_sent_back() -> None:
    engine = FakeEngine()
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": RAW}, "index": 0}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call], "function_call": None, "audio": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "b"},
    ]
    async with client(engine) as http:
        assert (await http.post(CHAT, json={"messages": messages, "tools": TOOLS})).status_code == 200
