"""Every refusal has the right status, OpenAI's shape, and names the field. Nothing reaches the engine."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import pytest

from hotprefix.engine.client import Health
from hotprefix.errors import ContextLengthExceeded, EngineDead, HotprefixError, QueueFull
from hotprefix.kernel.plan import Finish
from hotprefix.server.app import create_app
from hotprefix.server.config import ServerConfig
from tests.support.server import CONTEXT, VOCAB, BytesText, FakeEngine, chat, client, words

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": "hi", **fields}


REFUSED: list[tuple[str, dict[str, Any], str | None]] = [
    (CHAT, chat(top_kk=3), "top_kk"),
    (CHAT, chat(bootstrap_host="10.0.0.1"), "bootstrap_host"),
    (CHAT, chat(kv_transfer_params={}), "kv_transfer_params"),
    (CHAT, chat(chat_template="{{ x }}"), "chat_template"),
    (CHAT, chat(web_search_options={}), "web_search_options"),
    (CHAT, chat(best_of=2), "best_of"),
    (CHAT, chat(use_beam_search=True), "use_beam_search"),
    (CHAT, chat(modalities=["text", "audio"]), "modalities"),
    (CHAT, chat(truncate_prompt_tokens=5), "truncate_prompt_tokens"),
    (CHAT, chat(temperature=2.5), "temperature"),
    (CHAT, chat(temperature="hot"), "temperature"),
    (CHAT, chat(top_p=0), "top_p"),
    (CHAT, chat(top_k=-2), "top_k"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n=10**6), "n"),
    (CHAT, chat(n=True), "n"),
    (CHAT, chat(n=1.5), "n"),
    (CHAT, chat(seed=2**80), "seed"),
    (CHAT, chat(max_tokens=0), "max_tokens"),
    (CHAT, chat(max_tokens=-1), "max_tokens"),
    (CHAT, chat(max_tokens=5, max_completion_tokens=6), "max_tokens"),
    (CHAT, chat(max_tokens=5, min_tokens=6), "min_tokens"),
    (CHAT, chat(stop=[""]), "stop"),
    (CHAT, chat(stop=[1]), "stop"),
    (CHAT, chat(stop_token_ids=[True]), "stop_token_ids[0]"),
    (CHAT, chat(stop_token_ids=[-1]), "stop_token_ids"),
    (CHAT, chat(stop_token_ids=[VOCAB]), "stop_token_ids"),
    (CHAT, chat(stop_token_ids=[2**63]), "stop_token_ids"),
    (CHAT, chat(logit_bias={"x": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"-1": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"1.5": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={str(2**32 - 1): 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"1": 101}), "logit_bias"),
    (CHAT, chat(logit_bias={"1": True}), "logit_bias.1"),
    (CHAT, chat(logprobs=2), "logprobs"),
    (CHAT, chat(top_logprobs=2), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(prompt_logprobs=-1), "prompt_logprobs"),
    (CHAT, chat(prompt_logprobs=1, stream=True), "prompt_logprobs"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
    (CHAT, chat(stream=True, stream_options={"include_usages": True}), "stream_options.include_usages"),
    (CHAT, chat(priority=2**40), "priority"),
    (CHAT, chat(cache_salt=""), "cache_salt"),
    (CHAT, chat(response_format={"type": "yaml"}), "response_format.type"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
    (CHAT, chat(response_format={"type": "json_object"}, guided_regex="a"), "guided_regex"),
    (CHAT, chat(structured_outputs={}), "structured_outputs"),
    (CHAT, chat(structured_outputs={"json_object": False}), "structured_outputs"),
    (CHAT, chat(structured_outputs={"regex": None}), "structured_outputs"),
    (CHAT, chat(structured_outputs={"regex": "a", "choice": ["a"]}), "structured_outputs.choice"),
    (CHAT, chat(response_format={"type": "json_object", "pattern": "a"}), "response_format.pattern"),
    (CHAT, chat(functions=[{"name": "f"}]), "functions"),
    (CHAT, chat(continue_final_message=True), "continue_final_message"),
    (CHAT, {"model": "fake"}, "messages"),
    (CHAT, {"model": "fake", "messages": []}, "messages"),
    (CHAT, {"model": "fake", "messages": "hi"}, "messages"),
    (CHAT, {"model": "fake", "messages": [{"role": "god", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"model": "fake", "messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    (TEXT, text(logprobs=6), "logprobs"),
    (TEXT, text(logprobs=True), "logprobs"),
    (TEXT, text(max_tokens=0), "max_tokens"),
    (TEXT, text(suffix="x"), "suffix"),
    (TEXT, text(messages=[]), "messages"),
    (TEXT, {"model": "fake"}, "prompt"),
]


@pytest.mark.parametrize(("route", "body", "param"), REFUSED)
async def test_a_wrong_field_is_a_400_that_names_it(route: str, body: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        answer = await http.post(route, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert re.split(r"[.\[]", param)[0] in error["message"]
    assert not engine.seen


# Token ids that are none, and empty prompts.
PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt"), ([], "prompt"), ([""], "prompt"), ([[]], "prompt"), (["", "a"], "prompt[0]"),
    (["a", ""], "prompt[1]"), (5, "prompt"), ({}, "prompt"), ([-1], "prompt"), ([VOCAB], "prompt"),
    ([2**32 - 1], "prompt"), ([2**63], "prompt"), ([1, True], "prompt[1]"), ([True], "prompt[0]"),
    ([1, 1.5], "prompt[1]"), ([1, "a"], "prompt[1]"), ([[1], 2], "prompt[1]"),
    ([[1], [None]], "prompt[1][0]"), ([[1], [VOCAB]], "prompt[1]"),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "param"), PROMPTS)
async def test_case_84_and_144_a_wrong_prompt_is_a_400_that_names_the_place(prompt: Any, param: str) -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        answer = await http.post(TEXT, json={"prompt": prompt})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert not engine.seen
        assert (await http.post(TEXT, json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"null", b"\xff", b'{"prompt":"\\ud800"}', b'{"prompt":"a","temperature":NaN}',
     b'{"prompt":"a","metadata":{"a":NaN}}', b'{"prompt":"a","temperature":Infinity}',
     b'{"prompt":"a","temperature":1e999}', b"[" * 100_000],
)  # fmt: skip
async def test_what_is_not_json_is_a_400(body: bytes) -> None:
    async with client(FakeEngine()) as http:
        answer = await http.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_other_content_types_are_refused() -> None:
    async with client(FakeEngine()) as http:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "", None):
            headers = {} if kind is None else {"content-type": kind}
            answer = await http.post(TEXT, content=b'{"prompt":"a"}', headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-type")
        for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
            headers = {"content-type": kind}
            answer = await http.post(TEXT, content=b'{"prompt":"a"}', headers=headers)
            assert answer.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_case_141_and_91_too_long_is_a_400_with_the_numbers_also_in_a_stream(stream: bool) -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        for body in (chat("x" * CONTEXT, stream=stream), chat("x", max_tokens=CONTEXT, stream=stream)):
            answer = await http.post(CHAT, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
            assert str(CONTEXT) in error["message"]
    assert not engine.seen


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT, CONTEXT + 1])
async def test_case_71_a_prompt_that_leaves_no_room_is_refused_and_one_less_runs(length: int) -> None:
    async with client(FakeEngine()) as http:
        answer = await http.post(TEXT, json={"prompt": [1] * length, "max_tokens": 1})
    assert answer.status_code == (200 if length < CONTEXT else 400)


async def test_explicit_null_is_the_same_as_absent_for_every_optional_field() -> None:
    from hotprefix.server.schemas import HARMLESS, NEUTRAL, Chat, Completion

    engine = FakeEngine()
    async with client(engine) as http:
        for route, kind, needed in ((CHAT, Chat, chat()), (TEXT, Completion, text())):
            nulls = dict.fromkeys([*kind.model_fields, *NEUTRAL, *HARMLESS, "never_heard_of"])
            answer = await http.post(route, json={**nulls, **needed})
            assert answer.status_code == 200, answer.text
            plain = await http.post(route, json=needed)
            assert engine.seen[-1].params == engine.seen[-2].params
            assert plain.json()["choices"] == answer.json()["choices"]


async def test_what_clients_send_without_meaning_is_accepted() -> None:
    body = chat(
        user="u", metadata={"a": "b"}, store=False, service_tier="auto", safety_identifier="s", best_of=1,
        prompt_cache_key="k", use_beam_search=False, modalities=["text"], parallel_tool_calls=True,
        length_penalty=1.0, functions=[], reasoning_effort="low", stream=True,
        stream_options={"include_obfuscation": False},
    )  # fmt: skip
    async with client(FakeEngine()) as http:
        assert (await http.post(CHAT, json=body)).status_code == 200


async def test_unknown_models_routes_and_methods() -> None:
    async with client(FakeEngine()) as http:
        wrong = await http.post(CHAT, json={**chat(), "model": "gpt-9"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
        assert wrong.json()["error"]["param"] == "model"
        assert (await http.get("/v1/models/gpt-9")).status_code == 404
        assert (await http.post("/v1/embeddings", json={})).json()["error"]["code"] == "not_found"
        answer = await http.get(CHAT)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFull("the queue is full", retry_after=2.2), 429, "queue_full"),
        (EngineDead("gone"), 503, "engine_unavailable"),
        (ContextLengthExceeded("too long for the pool"), 400, "context_length_exceeded"),
        (HotprefixError("odd"), 500, "internal_error"),
        (RuntimeError("a secret path"), 500, "internal_error"),
    ],
)
async def test_a_refusal_by_the_engine_has_its_status(
    error: Exception, status: int, code: str, stream: bool
) -> None:
    engine = FakeEngine()
    engine.refuse = error
    async with client(engine) as http:
        answer = await http.post(CHAT, json=chat(stream=stream))
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/json"
    assert "secret" not in answer.text
    if status == 429:
        assert answer.headers["retry-after"] == "3"


@pytest.mark.parametrize("finish", [Finish.ERROR, Finish.ABORT])
@pytest.mark.parametrize("stream", [False, True])
async def test_case_2_a_failure_before_the_first_token_is_never_a_200(finish: Finish, stream: bool) -> None:
    async with client(FakeEngine(words(finish=finish, error="kernel fell over"))) as http:
        answer = await http.post(CHAT, json=chat(stream=stream))
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed")


@pytest.mark.parametrize("finish", [Finish.ERROR, Finish.ABORT])
async def test_case_2_a_failure_in_a_started_stream_is_an_error_event_and_no_done(finish: Finish) -> None:
    from tests.support.server import events

    async with client(FakeEngine(words("Hel", finish=finish, error="kernel fell over"))) as http:
        stream = events((await http.post(CHAT, json=chat(stream=True))).text)
        whole = await http.post(CHAT, json=chat())
    assert stream[-1]["error"]["code"] == "generation_failed"
    assert "[DONE]" not in stream
    assert all(c.get("finish_reason") is None for e in stream[:-1] for c in e["choices"])
    assert (whole.status_code, whole.json()["error"]["message"]) == (500, "kernel fell over")


async def test_one_failed_choice_ends_the_others() -> None:
    engine = FakeEngine(words("a", finish=Finish.ERROR, error="no"))
    async with client(engine) as http:
        assert (await http.post(CHAT, json=chat(n=3))).status_code == 500
    assert len(engine.aborted) == 2


async def test_a_dead_engine_is_a_503_during_a_request_too() -> None:
    engine = FakeEngine(words(finish=Finish.ERROR, error="the engine process ended"))
    engine.ok = Health(False, "restarting")
    async with client(engine) as http:
        assert (await http.post(CHAT, json=chat())).status_code == 503
        assert (await http.get("/health")).status_code == 503


async def test_while_the_model_loads_everything_says_so() -> None:
    import httpx

    app = create_app(FakeEngine(), ServerConfig())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        assert (await http.get("/health")).status_code == 503
        for route, body in ((CHAT, chat()), (TEXT, text()), ("/tokenize", {"prompt": "a"})):
            assert (await http.post(route, json=body)).status_code == 503
        app.state.service.text = BytesText()
        assert (await http.get("/health")).status_code == 200


async def test_our_own_bug_is_a_500_in_the_same_shape(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(BytesText):
        def render(self, *_: Any, **__: Any) -> list[int]:
            raise ZeroDivisionError("inner detail")

    import httpx

    app = create_app(FakeEngine(), ServerConfig(), Broken())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    with caplog.at_level(logging.ERROR):
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answer = await http.post(CHAT, json=chat())
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "inner detail" not in answer.text


@pytest.mark.parametrize(
    ("most", "n", "status"), [(8, 8, 200), (8, 9, 400), (None, 128, 200), (None, 129, 400)]
)
async def test_more_choices_than_can_ever_run_and_wait_are_a_400(
    most: int | None, n: int, status: int
) -> None:
    """As a 429 the client would try again for ever."""
    engine = FakeEngine()
    engine.info = replace(engine.info, max_requests=most)
    async with client(engine) as http:
        answer = await http.post(CHAT, json=chat(n=n))
        assert answer.status_code == status
        prompts = await http.post(TEXT, json=text(prompt=["a"] * n))
        assert prompts.status_code == status
    if status == 400:
        error = answer.json()["error"]
        assert (error["param"], f"1 to {n - 1}" in error["message"]) == ("n", True)
        assert ("--max-running" if most else "--max-choices") in error["message"]
