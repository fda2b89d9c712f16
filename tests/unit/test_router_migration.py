"""Streams that break and go on at another engine: over sockets, between real servers whose engines pretend
to compute. With processes that are killed: e2e/test_router_kills.py; the splice alone: test_splice.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Send

from hotprefix.fleet.config import FleetConfig
from hotprefix.fleet.records import Stage
from hotprefix.router.desk import Desk
from hotprefix.router.prompt import Prompt
from hotprefix.router.ticket import Limits
from hotprefix.server.errors import ApiError
from hotprefix.server.internal import INTERNAL_HEADER
from hotprefix.server.resume import RESUME_PATH
from tests.support.fleet import profile
from tests.support.inline import KEY, by_choice
from tests.support.routing import (
    SSE,
    Asked,
    FakeWorker,
    Routing,
    chunk,
    end,
    fleet,
    part,
    refuses,
    report,
    routing,
    says,
    start,
    up,
)
from tests.support.server import events
from tests.support.stepped import MODEL, Engine, engines

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Say something."}]
CARDS = [{"id": MODEL, "object": "model", "root": MODEL}]
OWN = {"internal_key": KEY, "policy": "round_robin"}
FAST = {"probe_timeout_s": 0.2, "probe_failures": 2}


def body(path: str, **fields: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "The sun is"}
    return {**usual, "stream": True, "temperature": 0, "max_tokens": 12, **fields}


def same(stream: bytes) -> Any:
    """A complete stream without its id and date, which are the same in all of its events, and without what
    was cached, which is not the same each time."""
    found = by_choice(stream)
    for value in found.get(None, ()):
        value["usage"].pop("prompt_tokens_details")
    heads = {(value.pop("id"), value.pop("created")) for values in found.values() for value in values}
    assert len(heads) == 1
    return found


async def undisturbed(one: Engine, path: str, asked: dict[str, Any]) -> Any:
    async with httpx.AsyncClient(timeout=60) as http:
        return same((await http.post(f"{one.url}{path}", json=asked)).content)


@contextlib.asynccontextmanager
async def before(*workers: Engine | FakeWorker, **settings: Any) -> AsyncIterator[Routing]:
    named = [f"{one.url},name={one.name}" for one in workers]
    async with routing(*named, **{**OWN, **settings}) as found:
        yield found


async def until_stopped(found: Routing, one: Engine) -> None:
    """Until the engine has made the steps that it may make, and what came of them could go out."""
    await found.until(lambda: one.engine.left < 1)
    await asyncio.sleep(0.05)


def moved(found: Routing) -> dict[tuple[str, str], int]:
    return dict(found.pool.desk.tally.migrations)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {}),
    "completion": (TEXT, {}),
    "seeded": (TEXT, {"temperature": 1, "seed": 7}),
    "two choices": (CHAT, {"n": 2, "temperature": 1, "seed": 7}),
    "counts": (CHAT, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "token ids": (TEXT, {"return_token_ids": True}),
}


async def broken_off(found: Routing, those: list[Engine], path: str, asked: Any, steps: int) -> bytes:
    """An answer whose connection is cut after so many steps."""
    for one in those:
        one.engine.let(steps)
    answer = asyncio.ensure_future(found.http.post(path, json=asked))
    await found.until(lambda: answer.done() or any(one.engine.left < 1 for one in those))
    await asyncio.sleep(0.05)
    for one in those:
        if one.engine.left < 1:
            one.cut()
        one.engine.let(math.inf)
        found.router.roster.workers[one.name].succeeded()
    content = (await answer).content
    found.nothing_left()
    return content


@pytest.mark.parametrize("case", CASES)
async def test_a_stream_that_breaks_anywhere_is_the_one_that_did_not(case: str) -> None:
    path, fields = CASES[case]
    asked = body(path, **fields)
    async with engines(2) as those, before(*those) as found:
        whole = await undisturbed(those[1], path, asked)
        for steps in (1, 4, 11):
            assert same(await broken_off(found, those, path, asked, steps)) == whole
        assert moved(found) == {("cut", "resumed"): 3}
        assert found.router.forward.cut == {}
        text = (await found.http.get("/metrics")).text
    labels = f'model="{MODEL}",outcome="resumed",reason="cut"'
    assert f"hotprefix_router_migrations_total{{{labels}}} 3.0" in text


async def test_stop_strings_match_across_the_seam() -> None:
    async with engines(2) as those, before(*those) as found:
        said = (await undisturbed(those[0], TEXT, body(TEXT)))[0]
        words = "".join(each["choices"][0]["text"] for each in said)
        asked = body(TEXT, stop=[words[len(words) // 2 :][:12]])
        whole = await undisturbed(those[0], TEXT, asked)
        assert whole[0][-1]["choices"][0]["finish_reason"] == "stop"
        for steps in range(1, 9):
            assert same(await broken_off(found, those, TEXT, asked, steps)) == whole
        assert sum(moved(found).values()) >= 3


async def test_an_answer_may_break_again_and_again_and_come_back() -> None:
    asked = body(CHAT, n=2, temperature=1, seed=3, max_tokens=20)
    async with engines(2) as those, before(*those) as found:
        whole = await undisturbed(those[1], CHAT, asked)
        for one in those:
            one.engine.let(5)
        answer = asyncio.ensure_future(found.http.post(CHAT, json=asked))
        for _ in range(3):
            await found.until(lambda: any(one.engine.left < 1 for one in those))
            (one,) = [each for each in those if each.engine.left < 1]
            await until_stopped(found, one)
            one.cut()
            one.engine.let(5)
        for one in those:
            one.engine.let(math.inf)
        assert same((await answer).content) == whole
        assert moved(found) == {("cut", "resumed"): 3}
        stays = list(found.pool.desk.recent)
        assert [stay.stage for stay in stays] == ["failed"] * 3 + ["ended"]
        assert len({stay.decision.worker for stay in stays}) == 2
        prompts = [stay.decision.prompt for stay in stays]
        assert prompts == sorted(set(prompts))  # each booking has the outputs so far in its prompt
        assert all(stay.first_s is not None for stay in stays)
        found.nothing_left()


async def test_the_rest_does_not_go_to_the_worker_that_has_just_failed() -> None:
    """Although it has the prompt, and takes connections."""
    asked = body(TEXT, prompt=list(range(100, 200)))
    async with engines(2) as those, before(*those, policy="affinity") as found:
        whole = await undisturbed(those[0], TEXT, asked)
        assert same(await broken_off(found, those, TEXT, asked, 4)) == whole
        assert len({stay.decision.worker for stay in found.pool.desk.recent}) == 2


async def test_a_worker_that_hangs_is_left_in_time() -> None:
    async with engines(2) as (one, two), before(one, two, **FAST) as found:
        whole = await undisturbed(two, CHAT, body(CHAT))
        one.engine.let(5)
        answer = asyncio.ensure_future(found.http.post(CHAT, json=body(CHAT)))
        await until_stopped(found, one)
        one.hung = True
        assert same((await answer).content) == whole
        assert moved(found) == {("silent", "resumed"): 1}
        found.nothing_left()


async def test_a_worker_that_sends_nothing_for_too_long_is_left() -> None:
    async with engines(2) as (one, two), before(one, two, silence_s=0.3) as found:
        whole = await undisturbed(two, CHAT, body(CHAT))
        one.engine.let(5)
        assert same((await found.http.post(CHAT, json=body(CHAT))).content) == whole
        assert moved(found) == {("timeout", "resumed"): 1}


async def test_an_engine_that_says_that_it_cannot_complete_an_answer_is_left() -> None:
    async with engines(2) as (one, two), before(one, two) as found:
        whole = await undisturbed(two, CHAT, body(CHAT))
        one.engine.let(5)
        answer = asyncio.ensure_future(found.http.post(CHAT, json=body(CHAT)))
        await until_stopped(found, one)
        one.engine.die()
        assert same((await answer).content) == whole
        assert moved(found) == {("gave_up", "resumed"): 1}


SPOILED: dict[str, tuple[str, Any]] = {
    "bytes": ("garbage", lambda n, data: b"\x00\xffgarbage\n\n" if n == 4 else data),
    "an error page": ("garbage", lambda n, data: b"<html>Bad Gateway</html>\n\n" if n == 4 else data),
    "a mark that is none": ("garbage", lambda n, data: b':hp [0,"x"]\ndata: {}\n\n' if n == 4 else data),
    "half an event": ("end", lambda n, data: data[:20] if n == 4 else data if n < 4 else None),
    "an early end": ("end", lambda n, data: data if n < 4 else None),
}


@pytest.mark.parametrize("what", SPOILED)
async def test_a_worker_that_sends_garbage_after_its_first_byte_is_left(what: str) -> None:
    kind, spoil = SPOILED[what]
    async with engines(2) as (one, two), before(one, two) as found:
        whole = await undisturbed(two, CHAT, body(CHAT))
        one.spoil = spoil
        assert same((await found.http.post(CHAT, json=body(CHAT))).content) == whole
        assert moved(found) == {(kind, "resumed"): 1}
        assert found.router.roster.workers["e0"].failures == {kind: 1}
        found.nothing_left()


# -- what cannot go on --------------------------------------------------------------------------------


async def broken(found: Routing, one: Engine, asked: dict[str, Any] | None = None) -> list[Any]:
    """The events of an answer whose engine is killed after four steps."""
    one.engine.let(4)
    answer = asyncio.ensure_future(found.http.post(CHAT, json=asked or body(CHAT)))
    await until_stopped(found, one)
    one.kill()
    return events((await answer).text)


async def test_without_another_worker_the_stream_ends_with_a_clear_error() -> None:
    async with engines(1) as (one,), before(one) as found:
        *some, last = await broken(found, one)
        assert len(some) >= 4
        assert last["error"]["code"] == "worker_lost"
        assert last["error"]["message"].startswith("worker e0 failed in the middle of the answer (")
        assert "no other could go on with it: there is no other that can" in last["error"]["message"]
        assert moved(found) == {("cut", "no_worker"): 1}
        assert found.router.forward.cut == {"cut": 1}
        found.nothing_left()


@pytest.mark.parametrize("status", [409, 429, 500, 503, 404, 401])
async def test_a_worker_that_does_not_take_the_rest_is_passed_over(status: int) -> None:
    other = FakeWorker("other", refuses(status), load=own(), models=CARDS)
    async with engines(2) as (one, two), up(other), before(one, other, two) as found:
        whole = await undisturbed(two, CHAT, body(CHAT))
        one.engine.let(4)
        answer = asyncio.ensure_future(found.http.post(CHAT, json=body(CHAT)))
        await until_stopped(found, one)
        one.kill()
        assert same((await answer).content) == whole
        assert [asked.path for asked in other.asked] == [RESUME_PATH]
        assert moved(found) == {("cut", "resumed"): 1}
        found.nothing_left()


@pytest.mark.parametrize(("status", "outcome"), [(400, "refused"), (409, "no_worker")])
async def test_an_answer_that_nobody_takes_up_ends_with_what_was_said(status: int, outcome: str) -> None:
    others = [FakeWorker(f"w{n}", refuses(status), load=own(), models=CARDS) for n in range(2)]
    async with engines(1) as (one,), up(others[0]), up(others[1]), before(one, *others) as found:
        *_, last = await broken(found, one)
        assert f"status {status}" in last["error"]["message"]
        assert sum(len(w.asked) for w in others) == (1 if status == 400 else 2)
        assert moved(found) == {("cut", outcome): 1}
        found.nothing_left()


async def test_retries_bound_the_workers_that_are_asked_for_the_rest() -> None:
    others = [FakeWorker(f"w{n}", refuses(503), load=own(), models=CARDS) for n in range(4)]
    async with contextlib.AsyncExitStack() as stack:
        (one,) = await stack.enter_async_context(engines(1))
        for worker in others:
            await stack.enter_async_context(up(worker))
        found = await stack.enter_async_context(before(one, *others, retries=1))
        await broken(found, one)
        assert sum(len(w.asked) for w in others) == 2
        assert moved(found) == {("cut", "failed"): 1}


async def test_an_answer_is_taken_up_so_often_and_no_more() -> None:
    async with engines(3) as (one, two, three), before(one, two, three, migrations=1) as found:
        two.engine.let(4)
        three.engine.let(4)
        one.engine.let(4)
        answer = asyncio.ensure_future(found.http.post(CHAT, json=body(CHAT)))
        await until_stopped(found, one)
        one.kill()
        await found.until(lambda: min(two.engine.left, three.engine.left) < 1)
        second = two if two.engine.left < 1 else three
        await until_stopped(found, second)
        second.kill()
        *_, last = events((await answer).text)
        assert "it was taken up 1 times (--migrations)" in last["error"]["message"]
        assert moved(found) == {("cut", "resumed"): 1, ("cut", "too_often"): 1}
        found.nothing_left()


@pytest.mark.parametrize("settings", [{"migrations": 0}, {"internal_key": None}])
async def test_without_the_key_or_with_no_migrations_a_broken_stream_ends(settings: dict[str, Any]) -> None:
    async with engines(2) as (one, two), before(one, two, **settings) as found:
        *_, last = await broken(found, one)
        assert last["error"]["code"] == "worker_lost"
        assert INTERNAL_HEADER not in one.asked[0][1]
        assert not two.asked
        assert moved(found) == {}


# -- who is asked, and with what ------------------------------------------------------------------------


ID = {"id": "a-1", "created": 7, "model": "m", "system_fingerprint": "f", "prompts": "00"}


def own(*, resume: bool = True) -> dict[str, Any]:
    return {**report(model=MODEL), "resume": resume}


def marked(*words: str) -> bytes:
    """Events with marks, a token each."""
    return b"".join(b":hp [0,false,[%d],[0,0,0]]\n" % len(word) + chunk(word) for word in words)


HEAD = b":hp " + json.dumps(ID).encode() + b"\n"
DONE = b"data: [DONE]\n\n"


async def test_the_internal_key_goes_to_own_engines_that_take_answers_up_and_to_no_other() -> None:
    vllm = 'vllm:num_requests_running{engine="0"} 0\n'
    workers = [
        FakeWorker("own", says("a"), load=own(), models=CARDS),
        FakeWorker("closed", says("a"), load=own(resume=False), models=CARDS),
        FakeWorker("vllm", says("a"), metrics=vllm, models=CARDS),
        FakeWorker("plain", says("a"), models=CARDS),
    ]
    forged = {INTERNAL_HEADER: "forged", "x-hotprefix-other": "forged"}
    async with fleet(*workers, **OWN) as found:
        for path in (TEXT, "/v1/embeddings"):
            for _ in workers:
                answer = await found.http.post(path, json={"model": MODEL}, headers=forged)
                assert KEY not in str(answer.headers)
    for worker in workers:
        assert len(worker.asked) == 2, worker.name
        for asked in worker.asked:
            wanted = KEY if (worker.name, asked.path) == ("own", TEXT) else None
            assert asked.headers.get(INTERNAL_HEADER) == wanted
            assert "x-hotprefix-other" not in asked.headers


async def test_the_rest_is_asked_for_with_the_client_s_headers_and_body() -> None:
    async def breaks(asked: Asked, send: Send) -> None:
        await start(send, 200, SSE)
        await part(send, HEAD + marked("a", "bb"))
        raise ConnectionError

    async def goes_on(asked: Asked, send: Send) -> None:
        await start(send, 200, SSE)
        await end(send, HEAD + marked("ccc") + DONE)

    one = FakeWorker("one", breaks, load=own(), models=CARDS)
    two = FakeWorker("two", goes_on, load=own(), models=CARDS)
    closed = FakeWorker("closed", says("x"), load=own(resume=False), models=CARDS)
    sent = b'{"stream":true,\n "prompt": "\xc3\xa4"}'
    headers = {"content-type": "application/json", "traceparent": "00-1-2-01", "x-request-id": "mine",
               INTERNAL_HEADER: "forged"}  # fmt: skip
    async with fleet(one, closed, two, **OWN) as found:
        answer = await found.http.post(f"{TEXT}?a=b", content=sent, headers=headers)
        found.nothing_left()
    assert answer.content == chunk("a") + chunk("bb") + chunk("ccc") + DONE
    assert not closed.asked
    (asked,) = two.asked
    assert (asked.path, asked.query) == (RESUME_PATH, b"")
    assert {name: asked.headers[name] for name in headers} == {**headers, INTERNAL_HEADER: KEY}
    told = json.loads(asked.body)
    assert sent in asked.body
    assert (told["path"], told["head"], told["body"]) == (TEXT, ID, json.loads(sent))
    assert told["choices"] == [
        {"index": 0, "ids": [1, 2], "events": 2, "cached": [0, 0, 0], "ended": False}
    ]  # fmt: skip


async def test_a_stream_that_breaks_after_its_last_event_is_complete() -> None:
    async def breaks(asked: Asked, send: Send) -> None:
        await start(send, 200, SSE)
        await part(send, HEAD + marked("a") + DONE)
        raise ConnectionError

    one = FakeWorker("one", breaks, load=own(), models=CARDS)
    for settings in (OWN, {**OWN, "internal_key": None}):
        async with fleet(one, **settings) as found:
            answer = await found.http.post(TEXT, json={"model": MODEL, "stream": True})
            assert answer.text.endswith(DONE.decode())
            assert "error" not in answer.text
            assert found.router.forward.cut == {}
            assert not found.router.roster.workers["one"].failures


# -- clients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["here", "there"])
async def test_a_client_that_leaves_while_its_answer_moves_frees_everything(where: str) -> None:
    """It waits here for a worker that is full, or there for one that does not answer."""

    async def waits(asked: Asked, send: Send) -> None:
        await asked.left.wait()

    other = FakeWorker("other", waits, load=own(), models=CARDS)
    async with engines(1) as (one,), up(other), before(one, other, bound=1) as found:
        one.engine.let(4)
        leaving = asyncio.ensure_future(found.http.post(CHAT, json=body(CHAT)))
        await until_stopped(found, one)
        fills = None
        if where == "here":
            fills = asyncio.ensure_future(found.http.post(CHAT, json=body(CHAT)))
            await found.until(lambda: other.asked)
        one.kill()
        if where == "here":
            await found.until(lambda: found.pool.desk.held == 1)
        else:
            await found.until(lambda: other.asked)
        leaving.cancel()
        await found.until(lambda: found.router.forward.clients_left == 1)
        if fills is not None:
            fills.cancel()
            await found.until(lambda: found.router.forward.clients_left == 2)
        found.nothing_left()
        await found.until(lambda: other.left == 1)


async def test_an_answer_that_has_begun_waits_behind_no_other_and_is_never_too_late() -> None:
    nobody_is_in_trouble: Any = lambda now: frozenset()  # noqa: E731
    for limits, waits in ((Limits(10, 10, 0), True), (Limits(10, 10, 1e-12), False)):
        desk = Desk(FleetConfig(page_size=16, bound=1), limits, lambda n: 0, nobody_is_in_trouble,
                    lambda name, now: False, lambda name: None)  # fmt: skip
        for name in ("w0", "w1"):
            desk.fleet.join(name, profile(), 0.0, None)
        first, *new, begun = [desk.ticket(Prompt(tokens=100), "t") for _ in range(4)]
        begun.begun = True
        begun.avoid = {"w0"}
        if waits:
            first.avoid = {"w1"}
            await desk.place(first)
            new[0].avoid = {"w1"}
            tasks = [asyncio.ensure_future(desk.place(each)) for each in new]
            await asyncio.sleep(0)
            assert desk.held == 2
        else:
            with pytest.raises(ApiError):
                await desk.place(new[0])
        assert (await asyncio.wait_for(desk.place(begun), 5)).worker == "w1"
        if waits:
            for ticket, task in zip(new, tasks, strict=True):
                task.cancel()
                desk.close(ticket, Stage.CANCELLED)


async def test_an_answer_that_moves_has_begun() -> None:
    async with engines(2) as (one, two), before(one, two) as found:
        whole = await undisturbed(two, CHAT, body(CHAT))
        one.engine.let(4)
        answer = asyncio.ensure_future(found.http.post(CHAT, json=body(CHAT)))
        await until_stopped(found, one)
        found.pool.desk._limits = found.pool.desk._limits._replace(refuse_above_s=1e-12)
        assert (await found.http.post(CHAT, json=body(CHAT))).status_code == 429
        one.kill()
        assert same((await answer).content) == whole


async def test_what_a_slow_client_was_being_given_is_not_lost_when_its_worker_falls_silent() -> None:
    """A client that does not read holds its answer up in the middle of an event; then the worker hangs."""
    large = ["x" * 400_000 + str(n) for n in range(40)]

    async def floods(asked: Asked, send: Send) -> None:
        await start(send, 200, SSE)
        for number, word in enumerate(large):
            await part(send, (HEAD if not number else b"") + marked(word))
        await asked.left.wait()

    async def goes_on(asked: Asked, send: Send) -> None:
        (choice,) = json.loads(asked.body)["choices"]
        await start(send, 200, SSE)
        await end(send, HEAD + marked(*large[choice["events"] :]) + DONE)

    one = FakeWorker("one", floods, load=own(), models=CARDS)
    two = FakeWorker("two", goes_on, load=own(), models=CARDS)
    async with fleet(one, two, **OWN, **FAST) as found:
        reader, writer = await asyncio.open_connection("127.0.0.1", found.port, limit=1 << 30)
        sent = json.dumps({"model": MODEL, "stream": True}).encode()
        head = f"POST {TEXT} HTTP/1.1|host: 127.0.0.1|connection: close|content-type: application/json|"
        head += f"content-length: {len(sent)}||"
        writer.write(head.replace("|", "\r\n").encode() + sent)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        call = found.router.roster.workers["one"].calls
        await found.until(lambda: any(each.giving for each in call))
        one.hung = True
        await found.until(lambda: found.router.roster.workers["one"].state == "silent")
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        data = await reader.read()
        writer.close()
        found.nothing_left()
    for word in large:
        assert data.count(word.encode() + b'"') == 1
    assert moved_text(data).endswith(DONE)


def moved_text(data: bytes) -> bytes:
    """The body of a chunked answer, which ends the connection."""
    return data.removesuffix(b"0\r\n\r\n").removesuffix(b"\r\n")
