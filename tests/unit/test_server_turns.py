"""Turns before the one process that checks grammars: by counts and orders, never by time."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from hotprefix.engine.params import StructuredOutput
from hotprefix.engine.sampling.checker import GrammarChecker, Verdict
from hotprefix.engine.sampling.structured import Vocabulary
from hotprefix.errors import HotprefixError, QueueFull
from hotprefix.server.app import create_app
from hotprefix.server.config import ServerConfig
from hotprefix.server.grammar_queue import MAX_WAITING, Turns
from tests.support.server import BytesText, FakeEngine, chat

CHAT = "/v1/chat/completions"


def regex(spec: str) -> StructuredOutput:
    return StructuredOutput("regex", spec)


class Judge:
    """Makes checks one by one as it is told. costs: by the first letter of the grammar."""

    def __init__(self, **costs: float) -> None:
        self.costs = costs
        self.order: list[str] = []
        self.verdicts: dict[StructuredOutput, Verdict] = {}
        self.permits = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def known(self, structured: StructuredOutput) -> Verdict | None:
        return self.verdicts.get(structured)

    def judge(self, structured: StructuredOutput) -> Verdict:
        self.order.append(structured.spec)
        self.begun.release()
        assert self.permits.acquire(timeout=60)
        if structured.spec.startswith("broken"):
            raise HotprefixError("the process did not start")
        verdict = Verdict(None, self.costs.get(structured.spec[0], 1.0))
        self.verdicts[structured] = verdict
        return verdict

    async def is_judging(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=60)


def ask(turns: Turns, owner: str, spec: str) -> asyncio.Task[Verdict]:
    return asyncio.ensure_future(turns.verdict(owner, regex(spec)))


async def settle() -> None:
    """Let every task go as far as it can without a thread."""
    for _ in range(5):
        await asyncio.sleep(0)


async def finish(judge: Judge, *tasks: asyncio.Task[Verdict]) -> None:
    judge.permits.release(1000)
    await asyncio.gather(*tasks)


async def test_a_known_verdict_needs_no_turn() -> None:
    judge = Judge()
    turns = Turns(judge.known, judge.judge)
    judge.verdicts[regex("known")] = Verdict(None, 0.5)
    waiting = [ask(turns, f"hostile {n % 6}", f"h{n}") for n in range(36)]
    await judge.is_judging()
    known = ask(turns, "innocent", "known")
    await settle()
    assert known.done()
    assert judge.order == ["h0"]
    assert not any(task.done() for task in waiting)
    await finish(judge, *waiting)


async def test_a_new_grammar_waits_for_the_check_in_progress_and_not_for_anothers_queue() -> None:
    judge = Judge(i=0.01)
    turns = Turns(judge.known, judge.judge)
    waiting = [ask(turns, "hostile", f"h{n}") for n in range(MAX_WAITING)]
    await judge.is_judging()
    first, second = ask(turns, "innocent", "i1"), ask(turns, "innocent", "i2")
    await settle()
    await finish(judge, first, second, *waiting)
    assert judge.order[0] == "h0"
    # An owner who comes has spent as much as the one served now; after that one's check he has spent less.
    assert judge.order[1:3] == ["i1", "i2"]


async def test_among_many_owners_nobody_waits_longer_than_one_turn_of_each() -> None:
    judge = Judge(i=0.01)
    turns = Turns(judge.known, judge.judge)
    waiting = [ask(turns, f"hostile {n}", f"h{n}-{k}") for k in range(6) for n in range(6)]
    await judge.is_judging()
    innocent = ask(turns, "innocent", "i")
    await settle()
    await finish(judge, innocent, *waiting)
    assert judge.order.index("i") <= 6


async def test_turns_are_shared_by_cost_and_not_by_count() -> None:
    judge = Judge(d=1.0, c=0.1)
    turns = Turns(judge.known, judge.judge)
    dear = [ask(turns, "dear", f"d{n}") for n in range(8)]
    cheap = [ask(turns, "cheap", f"c{n}") for n in range(MAX_WAITING)]
    await settle()
    await finish(judge, *dear, *cheap)
    for at in range(2, 17):
        served = judge.order[:at]
        spent = {kind: sum(judge.costs[kind] for s in served if s[0] == kind) for kind in "dc"}
        assert abs(spent["d"] - spent["c"]) <= 1.0 + 1e-9, "never apart by more than one check"
    assert [s for s in judge.order if s[0] == "c"] == [f"c{n}" for n in range(MAX_WAITING)]


async def test_who_comes_late_has_saved_nothing_up() -> None:
    judge = Judge()
    turns = Turns(judge.known, judge.judge)
    early = [ask(turns, "early", f"e{n}") for n in range(12)]
    judge.permits.release(5)
    for _ in range(6):
        await judge.is_judging()
    late = [ask(turns, "late", f"l{n}") for n in range(6)]
    await settle()
    await finish(judge, *early, *late)
    assert "".join(spec[0] for spec in judge.order) == "eeeeee" + "le" * 6


async def test_one_owner_has_so_many_checks_waiting_and_no_more() -> None:
    judge = Judge()
    turns = Turns(judge.known, judge.judge)
    waiting = [ask(turns, "hostile", f"h{n}") for n in range(MAX_WAITING)]
    await judge.is_judging()
    waiting.append(ask(turns, "hostile", "in the place of the one that is checked"))
    await settle()
    with pytest.raises(QueueFull, match=f"{MAX_WAITING} grammars"):
        await ask(turns, "hostile", "one too many")
    again = ask(turns, "hostile", "h5")
    innocent = ask(turns, "innocent", "i")
    await settle()
    await finish(judge, again, innocent, *waiting)
    assert len(judge.order) == MAX_WAITING + 2


async def test_a_check_that_several_want_is_made_once() -> None:
    judge = Judge()
    turns = Turns(judge.known, judge.judge)
    first = ask(turns, "a", "same")
    await judge.is_judging()
    others = [ask(turns, owner, "same") for owner in ("a", "b", "a", "c")]
    await settle()
    await finish(judge, first, *others)
    assert judge.order == ["same"]
    assert {task.result() for task in [first, *others]} == {first.result()}
    assert turns.waiting == 0


async def test_who_goes_away_leaves_no_wish_behind() -> None:
    judge = Judge()
    turns = Turns(judge.known, judge.judge)
    first = ask(turns, "a", "first")
    await judge.is_judging()
    gone = [ask(turns, "a", f"gone {n}") for n in range(MAX_WAITING)]
    await settle()
    assert turns.waiting == MAX_WAITING
    for task in gone:
        task.cancel()
    await settle()
    assert turns.waiting == 0
    shared = [ask(turns, "a", "shared") for _ in range(2)]
    await settle()
    shared[0].cancel()
    await settle()
    assert turns.waiting == 1, "another request wants it still"
    first.cancel()  # its check has begun: it ends, and the verdict is kept
    await settle()
    await finish(judge, shared[1])
    assert judge.order == ["first", "shared"]
    assert judge.known(regex("first")) is not None


async def test_a_check_that_breaks_is_told_to_its_request_and_the_next_one_is_made() -> None:
    judge = Judge()
    turns = Turns(judge.known, judge.judge)
    broken, good = ask(turns, "a", "broken"), ask(turns, "a", "good")
    await settle()
    judge.permits.release(1000)
    with pytest.raises(HotprefixError, match="did not start"):
        await broken
    assert (await good).problem is None
    assert (await ask(turns, "a", "later")).problem is None


# -- the checker, and over HTTP ---------------------------------------------------------------------


def test_a_known_verdict_is_given_while_a_check_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    asked: list[str] = []

    class Slow(GrammarChecker):
        def _judge(self, structured: StructuredOutput) -> Verdict:
            asked.append(structured.spec)
            if structured.spec == "slow":
                inside.set()
                assert go_on.wait(60)
            return Verdict(None, 0.1)

    checker = Slow(Vocabulary((), 0, (), (), lambda text: []))
    assert checker.judge(regex("fast")) == Verdict(None, 0.1)
    thread = threading.Thread(target=checker.judge, args=(regex("slow"),))
    thread.start()
    assert inside.wait(60)
    assert checker.known(regex("fast")) == Verdict(None, 0.1)
    checker.check(regex("fast"))
    assert checker.known(regex("slow")) is None
    go_on.set()
    thread.join()
    checker.judge(regex("slow"))
    assert asked == ["fast", "slow"]


class JudgedText(BytesText):
    """Grammars are judged by a `Judge`."""

    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self.known_grammar, self.judge_grammar = judge.known, judge.judge  # type: ignore[method-assign]


async def test_requests_with_known_verdicts_are_answered_while_others_checks_wait() -> None:
    judge, engine = Judge(i=0.01), FakeEngine()
    judge.verdicts[regex("known")] = Verdict(None, 0.5)
    app = create_app(
        engine, ServerConfig(key_digests=ServerConfig.digests(["one", "two"])), JudgedText(judge)
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:

        def post(key: str, spec: str) -> asyncio.Task[httpx.Response]:
            headers = {"authorization": f"Bearer {key}"}
            return asyncio.ensure_future(http.post(CHAT, json=chat(guided_regex=spec), headers=headers))

        hostile = [post("one", f"h{n}") for n in range(6)]
        await judge.is_judging()
        assert (await post("two", "known")).status_code == 200
        assert (judge.order, len(engine.seen)) == (["h0"], 1)
        innocent = post("two", "i")
        for _ in range(20):
            await settle()
        judge.permits.release(1000)
        answers = await asyncio.gather(innocent, *hostile)
    assert [answer.status_code for answer in answers] == [200] * 7
    assert judge.order[:2] == ["h0", "i"]


async def test_a_client_that_leaves_releases_its_place_and_reaches_no_engine() -> None:
    judge, engine = Judge(), FakeEngine()
    app = create_app(engine, ServerConfig(), JudgedText(judge))
    leave = asyncio.Event()

    async def request(spec: str, leaves: bool) -> None:
        body = httpx.Request("POST", "http://localhost", json=chat(guided_regex=spec)).content
        messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await (leave if leaves else asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {
            "type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"",
            "headers": headers, "client": ("127.0.0.1", 5), "server": ("localhost", 80), "scheme": "http",
            "root_path": "", "http_version": "1.1", "asgi": {"version": "3.0"},
        }  # fmt: skip
        await app(scope, receive, send)

    stays = asyncio.ensure_future(request("stays", leaves=False))
    await judge.is_judging()
    leavers = [asyncio.ensure_future(request(f"leaves {n}", leaves=True)) for n in range(5)]
    for _ in range(20):
        await settle()
    leave.set()
    await asyncio.gather(*leavers, return_exceptions=True)
    judge.permits.release(1000)
    await stays
    assert judge.order == ["stays"]
    assert [request.params.structured for request in engine.seen] == [regex("stays")]
