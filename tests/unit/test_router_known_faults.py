"""Faults that other routers had, over real HTTP; those of the choice alone: test_fleet_known_faults.py."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from starlette.types import Send

from hotprefix.router.worker_spec import parse
from tests.support.routing import (
    SSE,
    Asked,
    FakeWorker,
    answer,
    chunk,
    end,
    event,
    fleet,
    part,
    refuses,
    report,
    routing,
    says,
    start,
    up,
)


class Gate:
    """Workers that answer when the gate opens."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    def worker(self, name: str, **more: Any) -> FakeWorker:
        async def serve(asked: Asked, send: Send) -> None:
            await self.open.wait()
            await answer(send, 200, {"choices": [{"text": name}]})

        return FakeWorker(name, serve, **more)


async def test_a_burst_uses_all_workers_before_any_answers() -> None:
    """`sglang#27547`: load that counted when the answer began sent a burst to one worker."""
    gate = Gate()
    workers = [gate.worker(f"w{n}") for n in range(5)]
    async with fleet(*workers) as before:
        asked = [asyncio.ensure_future(before.ask(f"{n} " * 16_000)) for n in range(10)]
        await before.until(lambda: sum(len(w.asked) for w in workers) == 10)
        assert [len(w.asked) for w in workers] == [2] * 5
        gate.open.set()
        await asyncio.gather(*asked)
        before.nothing_left()


@pytest.mark.parametrize("tail", ["", "and a question of its own, number "])
async def test_a_burst_of_one_cold_prefix_is_computed_once_or_a_copy_is_chosen(tail: str) -> None:
    """`llm-d-router#1726`: all scores were 0, so it was scattered."""
    gate = Gate()
    workers = [gate.worker(f"w{n}", load=report()) for n in range(4)]
    async with fleet(*workers, cost="smollm2-135m.cpu-1-thread") as before:
        prompts = ["common! " * 520 + (tail and f"{tail}{n}") for n in range(8)]  # 65 whole pages
        asked = [asyncio.ensure_future(before.ask(prompt)) for prompt in prompts]
        await before.until(lambda: sum(len(w.asked) for w in workers) == 8)
        used = [w.name for w in workers if w.asked]
        gate.open.set()
        await asyncio.gather(*asked)
        copies = [o.decision for o in before.pool.desk.recent if o.decision.copying is not None]
        assert len(used) == 1 + len(copies) < 4
        assert [each.copying for each in copies] == ["earlier_here"] * len(copies)
        assert sum(before.pool.desk.fleet.copies.values()) == sum(each.copied for each in copies)
        assert tail or not copies


async def test_questions_to_a_busy_worker_do_not_take_its_load_off() -> None:
    """`vllm-project/router#197`: every tenth health check set the load to 0."""
    go = asyncio.Event()

    async def streams(asked: Asked, send: Send) -> None:
        await start(send, 200, SSE)
        await part(send, chunk("a"))
        await go.wait()
        await end(send, event("[DONE]"))

    w0, w1 = FakeWorker("w0", streams), FakeWorker("w1", streams)
    async with up(w0), up(w1), routing(w0, poll_s=0.01) as before:
        asked = [asyncio.ensure_future(before.ask(f"{n}", stream=True)) for n in range(20)]
        await before.until(lambda: len(w0.asked) == 20)
        worker = before.router.roster.workers["w0"]
        fleet_ = before.pool.desk.fleet
        for _ in range(30):
            asked_at = worker.asked
            await before.until(lambda a=asked_at: worker.asked > a)
            assert len(fleet_._bookings.work["w0"].all) == 20
        before.router.roster.add(parse(f"{w1.url},name=w1"))
        await before.until(lambda: "w1" in before.pool.workers)
        asked.append(asyncio.ensure_future(before.ask("new prefix " * 100, stream=True)))
        await before.until(lambda: len(w1.asked) == 1)
        go.set()
        await asyncio.gather(*asked)
        before.nothing_left()


async def test_a_worker_without_figures_is_unknown_and_not_idle() -> None:
    """`llm-d-router#2650`: a default stood in for what was not known."""
    told, silent = FakeWorker("told", says("a"), load=report()), FakeWorker("plain", says("b"))
    async with fleet(told, silent) as before:
        await before.until(lambda: before.pool.desk.fleet.members()["told"].report is not None)
        for number in range(4):
            await before.ask(f"{number} " * 100)
        view = (await before.http.get("/workers")).json()["pools"][0]
        unknown = [each for each in view["recent"] if each["unknown"] == ["report"]]
        assert {each["worker"] for each in unknown} == {"plain"}
        assert view["counters"]["unknown"] == len(unknown) > 0
        text = (await before.http.get("/metrics")).text
        assert f'hotprefix_router_unknown_total{{model="m"}} {len(unknown)}.0' in text


async def session_homes(before: Any, workers: list[FakeWorker], names: list[str]) -> dict[str, str]:
    """Where each session is answered."""
    homes = {}
    for name in names:
        found = await before.http.post(
            "/v1/completions", json={"model": "m", "prompt": name}, headers={"x-session-id": name}
        )
        homes[name] = found.json()["choices"][0]["text"]
    return homes


async def test_a_session_stays_and_only_those_of_a_gone_worker_move() -> None:
    """`production-stack#15`, `dynamo#9920`, `aibrix#1751` (two routers agree without talking)."""
    workers = [FakeWorker(f"w{n}", says(f"w{n}")) for n in range(4)]
    names = [f"s{n}" for n in range(30)]
    async with fleet(*workers, policy="session") as before, routing(*workers, policy="session") as other:
        homes = await session_homes(before, workers, names)
        assert set(Counter(homes.values())) == {"w0", "w1", "w2", "w3"}
        assert await session_homes(other, workers, names) == homes
        before.router.roster.remove("w2")
        await before.until(lambda: len(before.pool.workers) == 3)
        later = await session_homes(before, workers, names)
        assert {name for name in names if later[name] != homes[name]} == {
            name for name in names if homes[name] == "w2"
        }


async def test_a_failed_first_turn_leaves_no_home() -> None:
    w0, w1 = FakeWorker("w0", refuses(400)), FakeWorker("w1", refuses(400))
    async with fleet(w0, w1, policy="session") as before:
        for name in ("prompt_cache_key", "session_id", "user"):
            await before.ask("x", **{name: "s"})
        assert len(before.pool.desk.fleet._homes) == 0
        w0.serve = w1.serve = says("fine")
        await before.ask("x", session_id="s")
        assert len(before.pool.desk.fleet._homes) == 1


async def test_a_slow_first_token_says_nothing_of_what_is_cached() -> None:
    """`semantic-router#1774`: warmth was guessed from the time to the first token."""

    async def slow(asked: Asked, send: Send) -> None:
        await asyncio.sleep(0.3)
        await says("x")(asked, send)

    async with fleet(FakeWorker("w0", slow)) as before:
        for _ in range(2):
            await before.ask("p" * 640, stream=True)
        assert [o.decision.found.total for o in before.pool.desk.recent] == [0, 159]


async def test_every_decision_shows_what_was_predicted_and_what_came() -> None:
    async with fleet(FakeWorker("w0", says("a"), load=report()), FakeWorker("w1", says("b"))) as before:
        await before.ask("p" * 640, stream=True)
        view = (await before.http.get("/workers")).json()
        (seen,) = view["pools"][0]["recent"]
        assert (seen["worker"], seen["ended"], seen["prompt"]) == ("w0", "ended", 160)
        assert seen["first_s"] > 0
        assert seen["parts"]["first"] > 0
        assert [each["worker"] for each in seen["runners_up"]] == ["w1"]
        text = (await before.http.get("/metrics")).text
        for line in (
            'hotprefix_router_routed_total{model="m"} 1.0',
            'hotprefix_router_first_token_observed_seconds_count{model="m"} 1.0',
            'hotprefix_router_first_token_error_seconds_bucket{le="+Inf",model="m"} 1.0',
            'hotprefix_router_ended_total{ending="ended",model="m"} 1.0',
            'hotprefix_router_worker_state{state="ready",worker="w0"} 1.0',
            'hotprefix_router_worker_load{component="prefill",worker="w0"} 0.0',
            'hotprefix_router_matched_tokens_total{model="m",tier="l1"} 0.0',
        ):
            assert line in text, line
