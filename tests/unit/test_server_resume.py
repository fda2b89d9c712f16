"""An answer that another engine began: the marks that tell a router of it, and the route that goes on with
it. The engine is scripted, so that held text, calls and thoughts can be cut anywhere."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from hotprefix.engine.client import Health
from hotprefix.engine.messages import Delta, Generate, Usage
from hotprefix.kernel.plan import Finish
from hotprefix.router.splice import Splice
from hotprefix.server.app import create_app
from hotprefix.server.config import ServerConfig
from hotprefix.server.internal import INTERNAL_HEADER
from hotprefix.server.resume import RESUME_PATH
from tests.support.inline import CONFIG, INTERNAL, boundaries, by_choice, marked, taken_up, unmarked, values
from tests.support.server import BytesText, FakeEngine, Script, chat, words

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
SAYS = f"<think>\nHm.\n</think>\n\nWell, é. {CALL} <tool"
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def said(text: str, finish: Finish = Finish.STOP, error: str | None = None) -> Script:
    """A script with a token for each byte. A token in the middle of a character has no text."""

    def deltas(request: Generate) -> Iterable[Delta]:
        made, held = 0, b""
        raw = text.encode()
        for byte in raw:
            made += 1
            held += bytes([byte])
            try:
                shown, held = held.decode(), b""
            except UnicodeDecodeError:
                shown = ""
            last = made == len(raw) and error is None
            yield Delta(request.id, shown, (byte,), Usage(len(request.prompt), made, cached_host=3),
                        finish if last else None)  # fmt: skip
        if error is not None:
            yield Delta(request.id, "", (), Usage(len(request.prompt), made), finish, error=error)

    return deltas


@asynccontextmanager
async def serving(engine: FakeEngine, config: ServerConfig = CONFIG) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(engine, config, BytesText()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield http


def body(**fields: Any) -> bytes:
    return json.dumps(chat(stream=True, **fields)).encode()


FULL = body(
    tools=TOOLS, separate_reasoning=True, return_token_ids=True, return_cached_tokens_details=True, **USAGE
)


@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
async def test_a_chat_is_taken_up_behind_any_event(finish: Finish) -> None:
    """Thoughts, content, calls, held blanks, an opener without an end: each piece comes once, with the same
    ids of calls, tokens and counts."""
    async with serving(FakeEngine(said(SAYS, finish))) as http:
        stream = await marked(http, CHAT, FULL)
        whole = unmarked(CHAT, FULL, stream)
        assert all(word in whole.decode() for word in ("reasoning_content", "tool_calls", "é", "<tool"))
        for cut in boundaries(stream):
            assert await taken_up(http, CHAT, FULL, stream, cut) == whole, f"cut behind byte {cut}"


async def test_a_completion_is_taken_up_behind_any_event_also_with_echo() -> None:
    asked = json.dumps({"prompt": ["ab", "c"], "n": 2, "echo": True, "stream": True}).encode()
    async with serving(FakeEngine(said("Sé!"))) as http:
        stream = await marked(http, TEXT, asked)
        whole = by_choice(unmarked(TEXT, asked, stream))
        assert set(whole) == {0, 1, 2, 3}
        for cut in boundaries(stream):
            found = await taken_up(http, TEXT, asked, stream, cut)
            assert by_choice(found) == whole, f"cut behind byte {cut}"


async def test_choices_that_ended_are_not_run_again_and_open_ones_bring_their_outputs() -> None:
    engine = FakeEngine(said("abc"))
    asked = body(n=2, seed=5, **USAGE)
    async with serving(engine) as http:
        stream = await marked(http, CHAT, asked)
        ends = boundaries(stream)
        splice = Splice(CHAT, asked)
        splice.feed(stream[: ends[-3]])  # the second choice's end is missing, and so are the counts
        wanted = splice.continuation()
        assert wanted is not None
        first, second = engine.seen
        engine.seen.clear()
        rest = splice.feed(await marked(http, wanted.path, wanted.body))
        (again,) = engine.seen
        assert (again.prompt, again.params, again.outputs) == (second.prompt, second.params, tuple(b"abc"))
        assert again.id not in (first.id, second.id)  # the first one may still run here
        assert rest.endswith(b'"prompt_tokens_details":{"cached_tokens":3}}}\n\ndata: [DONE]\n\n')
        assert rest.count(b"data:") == 3
        engine.seen.clear()
        over = Splice(CHAT, asked)
        over.feed(stream[: ends[-2]])  # only the counts and the stream's own end are missing
        wanted = over.continuation()
        assert wanted is not None
        assert over.feed(await marked(http, wanted.path, wanted.body)) == stream[ends[-2] :]
        assert not engine.seen


# -- marks ------------------------------------------------------------------------------------------


def marks(stream: bytes) -> list[Any]:
    return [json.loads(line[4:]) for line in stream.split(b"\n") if line.startswith(b":hp ")]


async def test_marks_have_the_ids_that_the_events_have() -> None:
    async with serving(FakeEngine(said(SAYS))) as http:
        stream = await marked(http, CHAT, FULL)
    head, *events = marks(stream)
    values = [json.loads(e.partition(b"data: ")[2]) for e in stream.split(b"\n\n")[:-3]]
    assert len(events) == len(values)
    assert [event[2] for event in events] == [value["choices"][0]["token_ids"] for value in values]
    assert bytes(token for event in events for token in event[2]) == SAYS.encode()
    assert all((event[0], event[3]) == (0, [0, 3, 0]) for event in events)
    assert [event[1] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[0][2] == []  # the role
    assert {key: values[0][key] for key in ("id", "created", "model", "system_fingerprint")} == {
        key: value for key, value in head.items() if key != "prompts"
    }


@pytest.mark.parametrize("key", [None, "", "another", "the internal key "])
@pytest.mark.parametrize("config", [CONFIG, ServerConfig()])
async def test_without_the_key_there_are_no_marks_and_no_route(key: str | None, config: ServerConfig) -> None:
    if config is not CONFIG:
        key = key or INTERNAL[INTERNAL_HEADER]
    headers = {} if key is None else {INTERNAL_HEADER: key}
    async with serving(FakeEngine(), config) as http:
        plain = await http.post(CHAT, json=chat(stream=True), headers=headers)
        assert plain.text.startswith("data: ")
        assert ":hp" not in plain.text
        refused = await http.post(RESUME_PATH, json={}, headers=headers)
    assert refused.status_code == (401 if config is CONFIG else 404)


async def test_a_whole_answer_has_no_marks() -> None:
    async with serving(FakeEngine()) as http:
        answer = await http.post(CHAT, json=chat(), headers=INTERNAL)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello world"


async def test_the_head_comes_before_a_comment_that_keeps_the_stream_alive() -> None:
    import asyncio

    engine = FakeEngine()
    engine.hold = True
    async with serving(engine, replace(CONFIG, stream_keepalive_s=0.01)) as http:
        asked = asyncio.create_task(marked(http, CHAT, body()))
        await engine.arrived.wait()
        await asyncio.sleep(0.05)
        engine.release()
        stream = await asked
    head, rest = stream.split(b"\n", 1)
    assert head.startswith(b':hp {"id"')
    assert rest.startswith(b": keep-alive\n\n")
    assert unmarked(CHAT, body(), stream).startswith(b": keep-alive\n\n")


@pytest.mark.parametrize(("dead", "lost"), [(True, True), (False, False)])
async def test_an_error_says_whether_another_engine_may_go_on(dead: bool, lost: bool) -> None:
    """If the engine died, another one may; what fails in a healthy engine would fail elsewhere."""
    engine = FakeEngine(said("ab", Finish.ERROR, "it broke"))
    engine.ok = Health(not dead, "dead" if dead else "ready")
    async with serving(engine) as http:
        stream = await marked(http, CHAT, body())
        plain = await http.post(CHAT, content=body(), headers={"content-type": "application/json"})
    assert ("lost" in marks(stream)) is lost
    assert ":hp" not in plain.text
    splice = Splice(CHAT, body())
    shown = splice.feed(stream)
    assert (splice.lost, splice.done) == ("gave_up" if lost else "", not lost)
    assert (b"it broke" in shown) is not lost
    assert (splice.continuation() is not None) is lost


# -- what cannot be taken up ------------------------------------------------------------------------


async def wanted(http: httpx.AsyncClient, events: int) -> dict[str, Any]:
    """What a router asks after so many events of a chat that says abc."""
    stream = await marked(http, CHAT, body())
    splice = Splice(CHAT, body())
    splice.feed(stream[: boundaries(stream)[events - 1]])
    found = splice.continuation()
    assert found is not None
    value: dict[str, Any] = json.loads(found.body)
    return value


def changed(value: Any, path: Sequence[Any], new: Any) -> Any:
    """A copy with another value at the path."""
    if not path:
        return new
    copied = list(value) if isinstance(value, list) else dict(value)
    inner = copied[path[0]] if len(path) > 1 else None
    copied[path[0]] = changed(inner, path[1:], new)
    return copied


CHOICE = ("choices", 0)
BAD: list[tuple[tuple[Any, ...], Any, int, str]] = [
    ((*CHOICE, "events"), 1, 409, "1 events that were sent do not fit the 2 tokens"),
    ((*CHOICE, "events"), 2, 409, "2 events that were sent do not fit the 2 tokens"),
    ((*CHOICE, "events"), 4, 409, "4 events that were sent do not fit the 2 tokens"),
    ((*CHOICE, "ids"), [97, 98, 99], 409, "3 events that were sent do not fit the 3 tokens"),
    ((*CHOICE, "ids"), [97], 409, "3 events that were sent do not fit the 1 tokens"),
    ((*CHOICE, "ids"), [], 400, "3 events came with no ids"),
    ((*CHOICE, "events"), 0, 400, "2 ids came with no event"),
    ((*CHOICE, "index"), 1, 400, "the answer has only 1"),
    ((*CHOICE, "index"), -1, 400, "index"),
    ((*CHOICE, "ids"), ["a"], 400, "choices[0].ids[0]='a'"),
    ((*CHOICE, "cached"), [0, 0], 400, "cached"),
    (("choices",), [], 200, ""),
    (("head", "prompts"), "0" * 32, 409, "the prompt has other token ids here"),
    (("body", "messages", 0, "content"), "hi there", 409, "the prompt has other token ids here"),
    (("body", "stream"), False, 400, "only a stream can be taken up"),
    (("body", "model"), "another", 404, "the model 'another' is not here"),
    (("body", "n"), 0, 400, "n=0"),
    (("body", "nonsense"), 1, 400, "nonsense is not a field"),
    (("path",), "/tokenize", 400, "path="),
    (("body",), [], 400, "body="),
]  # fmt: skip


@pytest.mark.parametrize(("path", "new", "status", "says"), BAD)
async def test_what_does_not_fit_is_refused_before_anything_is_sent(
    path: tuple[Any, ...], new: Any, status: int, says: str
) -> None:
    async with serving(FakeEngine(said("abc"))) as http:
        value = changed(await wanted(http, 3), path, new)
        answer = await http.post(RESUME_PATH, json=value, headers=INTERNAL)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert says in answer.json()["error"]["message"]


async def test_the_answer_keeps_its_id_date_model_and_fingerprint() -> None:
    told = {"id": "chatcmpl-x", "created": 7, "model": "as it was named", "system_fingerprint": "another-1"}
    async with serving(FakeEngine(said("abc"))) as http:
        value = await wanted(http, 3)
        value["head"] |= told
        answer = await http.post(RESUME_PATH, json=value, headers=INTERNAL)
    head, *_ = marks(answer.content)
    assert head == value["head"]
    for event in values(unmarked(CHAT, body(), answer.content)):
        assert {key: event[key] for key in told} == told


async def test_a_choice_twice_and_too_many_messages_are_refused() -> None:
    async with serving(FakeEngine(said("abc")), replace(CONFIG, max_messages=1)) as http:
        value = await wanted(http, 3)
        twice = {**value, "choices": value["choices"] * 2}
        answer = await http.post(RESUME_PATH, json=twice, headers=INTERNAL)
        assert "it comes twice" in answer.json()["error"]["message"]
        value["body"]["messages"] *= 2
        answer = await http.post(RESUME_PATH, json=value, headers=INTERNAL)
        assert answer.json()["error"]["code"] == "too_many_entries"


async def test_metrics_count_what_was_made_here() -> None:
    engine = FakeEngine(said("abcdefgh"))
    async with serving(engine) as http:
        value = await wanted(http, 6)
        service = http._transport.app.state.service  # type: ignore[attr-defined]
        tokens = "hotprefix_inter_token_seconds_count"
        outputs = "hotprefix_output_tokens_sum"

        def read(name: str) -> float:
            lines = service.metrics.text().decode().splitlines()
            return float(next(line for line in lines if line.startswith(name + " ")).split()[1])

        before = read(tokens), read(outputs)
        assert before == (7, 8)
        await http.post(RESUME_PATH, json=value, headers=INTERNAL)
        assert (read(tokens), read(outputs)) == (9, 11)  # three new tokens, so two gaps


async def test_words_in_one_delta_are_one_piece_also_when_they_come_again() -> None:
    async with serving(FakeEngine(words("Hello", " world"))) as http:
        stream = await marked(http, CHAT, body())
        whole = unmarked(CHAT, body(), stream)
        for cut in boundaries(stream):
            assert await taken_up(http, CHAT, body(), stream, cut) == whole
