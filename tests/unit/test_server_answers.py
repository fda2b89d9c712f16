"""Shapes of good answers: a stream's pieces join to the whole answer, counts are right, fields arrive."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import pytest

from hotprefix.engine.executor import TokenLogprob
from hotprefix.engine.messages import Delta, Generate, Usage
from hotprefix.engine.params import StructuredOutput
from hotprefix.kernel.plan import Finish
from tests.support.server import TURN, FakeEngine, chat, client, events, words

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def post(engine: FakeEngine, route: str, body: dict[str, Any], **headers: str) -> Any:
    async with client(engine) as http:
        answer = await http.post(route, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return events(answer.text) if body.get("stream") else answer.json()


def choices(stream: list[Any], index: int) -> list[dict[str, Any]]:
    return [c for e in stream if e != "[DONE]" for c in e["choices"] if c["index"] == index]


async def test_case_149_the_first_chat_piece_has_the_role_and_an_empty_content() -> None:
    stream = await post(FakeEngine(), CHAT, chat(stream=True))
    first, *middle, last = choices(stream, 0)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert [c["delta"] for c in middle] == [{"content": "Hello"}, {"content": " world"}]
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert all(c["finish_reason"] is None for c in (first, *middle))
    assert stream[-1] == "[DONE]"
    assert {e["object"] for e in stream[:-1]} == {"chat.completion.chunk"}
    assert len({e["id"] for e in stream[:-1]}) == 1


@pytest.mark.parametrize("route", [CHAT, TEXT])
@pytest.mark.parametrize("parts", [("a", "", "bc", "é", "", "日本"), (), ("",)])
async def test_case_147_the_stream_joins_to_the_whole_text(route: str, parts: tuple[str, ...]) -> None:
    body = chat() if route == CHAT else {"prompt": "hi"}
    whole = await post(FakeEngine(words(*parts)), route, body)
    stream = await post(FakeEngine(words(*parts)), route, {**body, "stream": True})
    pieces = choices(stream, 0)
    if route == CHAT:
        text = "".join(c["delta"].get("content", "") for c in pieces)
        assert whole["choices"][0]["message"]["content"] == text == "".join(parts)
    else:
        assert whole["choices"][0]["text"] == "".join(c["text"] for c in pieces) == "".join(parts)
    assert pieces[-1]["finish_reason"] == whole["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
async def test_case_86_no_output_at_all_is_an_empty_text(finish: Finish) -> None:
    whole = await post(FakeEngine(words(finish=finish)), CHAT, chat())
    assert whole["choices"][0]["message"]["content"] == ""
    assert whole["choices"][0]["finish_reason"] == finish.value
    assert whole["usage"]["completion_tokens"] == 0


OPTIONS = [
    (None, [], False), ({}, [], False), ({"include_usage": False}, [], False),
    ({"include_usage": None}, [], False), ({"include_usage": True}, [None], True),
]  # fmt: skip


@pytest.mark.parametrize("route", [CHAT, TEXT])
@pytest.mark.parametrize(("options", "others", "wanted"), OPTIONS)
async def test_case_137_usage_in_streams(route: str, options: Any, others: list[None], wanted: bool) -> None:
    body = chat() if route == CHAT else {"prompt": "hi"}
    body = {**body, "stream": True, "stream_options": options}
    *chunks, done = await post(FakeEngine(words("ab")), route, body)
    assert done == "[DONE]"
    last = chunks.pop() if wanted else None
    assert all([*filter(lambda k: k == "usage", c)] == ["usage"] * wanted for c in chunks)
    assert all(c.get("usage") is None and c["choices"] for c in chunks)
    if last is not None:
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 2


async def test_continuous_usage_counts_up() -> None:
    body = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    *chunks, _ = await post(FakeEngine(words("ab", "c")), CHAT, body)
    assert [c["usage"]["completion_tokens"] for c in chunks] == [2, 2, 3, 3, 3]


async def test_case_139_n_choices_interleave_and_the_prompt_counts_once() -> None:
    engine = FakeEngine(words("ab", "c", cached=4))
    stream = await post(
        engine, CHAT, chat("hello", n=3, seed=7, stream=True, stream_options={"include_usage": True})
    )
    order = [c["index"] for e in stream[:-1] for c in e["choices"] if c["delta"].get("content")]
    assert order == [0, 1, 2, 0, 1, 2]
    assert [sum(c["finish_reason"] is not None for c in choices(stream, i)) for i in range(3)] == [1, 1, 1]
    usage = stream[-2]["usage"]
    prompt = len(engine.seen[0].prompt)
    assert usage == {
        "prompt_tokens": prompt, "completion_tokens": 9, "total_tokens": prompt + 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip
    first = [request.params.seed for request in engine.seen]
    assert first[0] == 7
    assert len(set(first)) == 3
    await post(engine, CHAT, chat("hello", n=3, seed=7))
    assert [request.params.seed for request in engine.seen[3:]] == first
    assert len({request.id for request in engine.seen}) == 6


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt() -> None:
    engine = FakeEngine()
    whole = await post(engine, TEXT, {"prompt": ["a", "bc"], "n": 2, "echo": True, "max_tokens": 3})
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    assert [c["text"][:2] for c in whole["choices"]] == ["aH", "aH", "bc", "bc"]
    assert whole["usage"]["prompt_tokens"] == 3


async def test_prompt_forms_give_the_same_request() -> None:
    engine = FakeEngine()
    for prompt in ("hi", ["hi"], [104, 105], [[104, 105]]):
        await post(engine, TEXT, {"prompt": prompt})
    assert {request.prompt for request in engine.seen} == {(104, 105)}


@pytest.mark.parametrize("prompt", ["hi", [104, 105]])
async def test_echo_alone_scores_a_prompt(prompt: Any) -> None:
    engine = FakeEngine(scored)
    whole = await post(engine, TEXT, {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0})
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
    assert choice["logprobs"]["tokens"] == ["h", "i"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert whole["usage"]["completion_tokens"] == 0
    assert engine.seen[0].params.max_tokens == 0


def scored(request: Generate) -> Iterable[Delta]:
    """Log-probabilities for every prompt token but the first, then two output tokens: one of the bytes
    of é each, the second with an impossible alternative."""
    n = len(request.prompt)
    prompt = tuple(TokenLogprob(t, -0.5, 1, ((t, -0.5), (1, -1.0))) for t in request.prompt[1:])
    first = TokenLogprob(0xC3, -0.25, 2, ((7, -0.1), (0xC3, -0.25)))
    second = TokenLogprob(0xA9, -math.inf, 3, ((8, 0.0), (9, -math.inf)))
    wanted = prompt if request.params.prompt_logprobs is not None else None
    if request.params.max_tokens == 0:
        yield Delta(request.id, "", (), Usage(n, 0), finish=Finish.LENGTH, prompt_logprobs=wanted)
        return
    yield Delta(request.id, "", (0xC3,), Usage(n, 1), logprobs=(first,), prompt_logprobs=wanted)
    yield Delta(request.id, "é", (0xA9,), Usage(n, 2), logprobs=(second,))
    yield Delta(request.id, "", (), Usage(n, 2), finish=Finish.LENGTH)


async def test_case_146_echo_with_logprobs_covers_prompt_and_output() -> None:
    body = {"prompt": "hi", "echo": True, "logprobs": 1, "max_tokens": 2}
    engine = FakeEngine(scored)
    choice = (await post(engine, TEXT, body))["choices"][0]
    assert choice["text"] == "hié"
    got = choice["logprobs"]
    assert got["tokens"] == ["h", "i", "bytes:\\xc3", "bytes:\\xa9"]
    assert got["text_offset"] == [0, 1, 2, 2]
    assert got["token_logprobs"] == [None, -0.5, -0.25, -9999.0]
    assert got["top_logprobs"][0] is None
    assert got["top_logprobs"][2] == {"\x07": -0.1, "bytes:\\xc3": -0.25}
    stream = await post(engine, TEXT, {**body, "stream": True})
    pieces = choices(stream, 0)
    for key in got:
        assert [v for c in pieces for v in c["logprobs"][key]] == got[key]


async def test_case_142_chat_logprobs_are_finite_and_stream_with_their_text() -> None:
    body = chat(logprobs=True, top_logprobs=2)
    whole = (await post(FakeEngine(scored), CHAT, body))["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in whole] == [-0.25, -9999.0]
    assert whole[1]["bytes"] == [0xA9]
    assert [top["logprob"] for top in whole[1]["top_logprobs"]] == [0.0, -9999.0]
    pieces = choices(await post(FakeEngine(scored), CHAT, {**body, "stream": True}), 0)
    sent = [entry for c in pieces if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert sent == whole
    assert [len(c["logprobs"]["content"]) for c in pieces if c["delta"].get("content")] == [2]


async def test_prompt_logprobs_have_one_null() -> None:
    for route, body in ((CHAT, chat("hey")), (TEXT, {"prompt": "hey"})):
        engine = FakeEngine(scored)
        choice = (await post(engine, route, {**body, "prompt_logprobs": 1}))["choices"][0]
        entries = choice["prompt_logprobs"]
        assert len(entries) == len(engine.seen[0].prompt)
        assert [entry is None for entry in entries] == [True] + [False] * (len(entries) - 1)
        assert entries[1][str(engine.seen[0].prompt[1])]["rank"] == 1


async def test_every_sampling_field_arrives() -> None:
    engine = FakeEngine()
    fields = {
        "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1,
        "seed": 3, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "ignore_eos": True, "stop_token_ids": [5], "skip_special_tokens": False, "prompt_logprobs": 2,
    }  # fmt: skip
    others = {"logit_bias": {"7": 1}, "stop": "x", "include_stop_str_in_output": True, "priority": 4}
    for route, body in ((CHAT, chat()), (TEXT, {"prompt": "a"})):
        await post(engine, route, {**body, **fields, **others})
        request = engine.seen[-1]
        got = {name: getattr(request.params, name) for name in fields}
        assert got == {**fields, "stop_token_ids": (5,)}
        assert request.params.logit_bias == {7: 1}
        assert (request.params.stop, request.params.include_stop, request.priority) == (("x",), True, 4)
    await post(engine, CHAT, chat(max_completion_tokens=6, top_k=-1, stop=["a", "b"], temperature=0))
    params = engine.seen[-1].params
    assert (params.max_tokens, params.top_k, params.stop, params.greedy) == (6, 0, ("a", "b"), True)
    await post(engine, CHAT, chat())
    assert engine.seen[-1].params.max_tokens is None


SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
SCHEMA_TEXT = '{"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}'


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput("json_object", "")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            StructuredOutput("json_schema", SCHEMA_TEXT),
        ),
        ({"guided_json": SCHEMA}, StructuredOutput("json_schema", SCHEMA_TEXT)),
        ({"guided_json": SCHEMA_TEXT}, StructuredOutput("json_schema", SCHEMA_TEXT)),
        ({"guided_regex": "a+"}, StructuredOutput("regex", "a+")),
        ({"guided_choice": ["yes", "no"]}, StructuredOutput("choice", '["yes", "no"]')),
        ({"guided_grammar": "root ::= x"}, StructuredOutput("grammar", "root ::= x")),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput("json_schema", SCHEMA_TEXT)),
        ({"structured_outputs": {"choice": ["a"], "regex": None}}, StructuredOutput("choice", '["a"]')),
    ],
)
async def test_structured_output_arrives_in_every_dialect(fields: dict[str, Any], wanted: Any) -> None:
    engine = FakeEngine()
    await post(engine, CHAT, chat(**fields))
    await post(engine, TEXT, {"prompt": "a", **fields})
    assert [request.params.structured for request in engine.seen] == [wanted, wanted]


async def test_cached_tokens_and_their_sources_on_request() -> None:
    engine = FakeEngine(words("a", cached=4))
    plain = (await post(engine, CHAT, chat()))["usage"]["prompt_tokens_details"]
    assert plain == {"cached_tokens": 4}
    split = {"cached_tokens": 4, "cached_tokens_by_source": {"device": 4, "host": 0, "storage": 0}}
    for body, headers in (
        (chat(return_cached_tokens_details=True), {}),
        (chat(), {"X-Cached-Tokens-Details": "1"}),
    ):
        assert (await post(engine, CHAT, body, **headers))["usage"]["prompt_tokens_details"] == split


async def test_messages_reach_the_template() -> None:
    engine = FakeEngine()
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": " good"}]},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None},
        {"role": "user", "content": ""},
    ]
    await post(engine, CHAT, {"messages": messages})
    want = [TURN, *b"system:be good", TURN, *b"assistant:", TURN, *b"user:", TURN]
    assert list(engine.seen[0].prompt) == want


async def test_case_14_salts_never_meet() -> None:
    from hotprefix.server.guard import salt

    pairs = [(None, None), (None, "a"), ("a", None), ("a", "b"), ("ab", ""), ("", "ab"),
             (None, '[null, "a"]'), ("a", "bc"), ("ab", "c"), (None, "null"), ('"a', "b")]  # fmt: skip
    assert len({salt(*pair) for pair in pairs}) == len(pairs)
    engine = FakeEngine()
    await post(engine, CHAT, chat(cache_salt="x"))
    await post(engine, CHAT, chat())
    assert [request.salt for request in engine.seen] == [salt(None, "x"), None]


async def test_a_request_has_arrived_before_anything_was_done_for_it() -> None:
    """Times to first token, queue and log count from there; n choices arrive together."""
    engine = FakeEngine()
    before = time.monotonic()
    await post(engine, TEXT, {"prompt": "hi", "n": 2})
    await post(engine, CHAT, {"messages": [{"role": "user", "content": "hi"}]})
    arrived = [request.arrived for request in engine.seen]
    assert all(at is not None and before <= at <= time.monotonic() for at in arrived)
    assert arrived[0] == arrived[1]


# -- token ids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [CHAT, TEXT])
async def test_token_ids_are_shown_where_vllm_shows_them(route: str) -> None:
    """Chat: the prompt's beside the choices; completions: in each choice. In a stream: with a choice's first
    event."""
    engine = FakeEngine(words("ab", "", "é"))
    body = {**(chat() if route == CHAT else {"prompt": "hi"}), "n": 2, "return_token_ids": True}
    whole = await post(engine, route, body)
    prompt = list(engine.seen[0].prompt)
    assert [c["token_ids"] for c in whole["choices"]] == [list("abé".encode())] * 2
    assert whole["usage"]["completion_tokens"] == 8
    if route == CHAT:
        assert whole["prompt_token_ids"] == prompt
    else:
        assert "prompt_token_ids" not in whole
        assert [c["prompt_token_ids"] for c in whole["choices"]] == [prompt] * 2
    *stream, _ = await post(engine, route, {**body, "stream": True})
    for index in range(2):
        events_ = [e for e in stream if e["choices"][0]["index"] == index]
        pieces = [e["choices"][0] for e in events_]
        assert [token for c in pieces for token in c["token_ids"]] == list("abé".encode())
        places = [e if route == CHAT else e["choices"][0] for e in events_]
        assert [place.get("prompt_token_ids") for place in places] == [prompt] + [None] * (len(places) - 1)
        assert pieces[0]["token_ids"] == ([] if route == CHAT else list(b"ab"))
        assert pieces[-1]["token_ids"] == []


@pytest.mark.parametrize("asked", [False, None])
@pytest.mark.parametrize("route", [CHAT, TEXT])
async def test_token_ids_are_shown_only_if_they_are_asked_for(route: str, asked: bool | None) -> None:
    body = {**(chat() if route == CHAT else {"prompt": "hi"}), "return_token_ids": asked}
    answers = await post(FakeEngine(), route, body), await post(FakeEngine(), route, {**body, "stream": True})
    assert "token_ids" not in str(answers)


async def test_ids_of_tokens_whose_text_is_held_come_with_the_next_event() -> None:
    """None is lost where a tool call holds text back (vllm#27482)."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    text = 'No. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    engine = FakeEngine(words(*text))
    whole = await post(engine, CHAT, chat(tools=tools, return_token_ids=True))
    stream = await post(engine, CHAT, chat(tools=tools, return_token_ids=True, stream=True))
    assert whole["choices"][0]["token_ids"] == list(text.encode())
    assert [token for c in choices(stream, 0) for token in c["token_ids"]] == list(text.encode())
    assert any(len(c["token_ids"]) > 5 for c in choices(stream, 0))


async def test_each_prompts_ids_are_its_own() -> None:
    whole = await post(FakeEngine(), TEXT, {"prompt": ["a", [1, 2]], "n": 2, "return_token_ids": True})
    assert [c["prompt_token_ids"] for c in whole["choices"]] == [[97], [97], [1, 2], [1, 2]]


async def test_the_client_s_trace_goes_to_the_engine() -> None:
    engine, trace = FakeEngine(), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await post(engine, TEXT, {"prompt": "hi", "n": 2}, traceparent=trace)
    await post(engine, CHAT, {"messages": [{"role": "user", "content": "hi"}]}, traceparent=trace)
    await post(engine, TEXT, {"prompt": "hi"})
    assert [request.trace for request in engine.seen] == [trace] * 3 + [None]
