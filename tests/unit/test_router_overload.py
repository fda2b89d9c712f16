"""More requests than the workers take: waiting, shares of tenants, refusals, and nothing that is left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import aiohttp
import httpx
import pytest
from starlette.types import Send

from hotprefix.router.hold import Hold, Rate
from hotprefix.server.config import ServerConfig
from tests.support.routing import (
    SSE,
    Asked,
    FakeWorker,
    Routing,
    answer,
    chunk,
    end,
    event,
    fleet,
    part,
    says,
    start,
)

KEYS = ServerConfig(key_digests=ServerConfig.digests(["greedy", "modest"]))


class Gated:
    """Answers when it is told to. order: prompts in the order in which they came."""

    def __init__(self) -> None:
        self.go = asyncio.Semaphore(0)
        self.now = self.most = 0
        self.order: list[str] = []

    async def __call__(self, asked: Asked, send: Send) -> None:
        import json

        self.order.append(json.loads(asked.body)["prompt"])
        self.now += 1
        self.most = max(self.most, self.now)
        await self.go.acquire()
        self.now -= 1
        await answer(send, 200, {"choices": [{"text": "x"}]})


def ask(before: Routing, prompt: str, key: str | None = None) -> asyncio.Task[httpx.Response]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"model": "m", "prompt": prompt}
    return asyncio.ensure_future(before.http.post("/v1/completions", json=body, headers=headers))


async def test_a_worker_gets_no_more_than_it_takes_and_the_rest_waits_here() -> None:
    gated = Gated()
    async with fleet(FakeWorker("w0", gated), bound=2) as before:
        asked = []
        for number in range(6):
            asked.append(ask(before, f"p{number}"))
            await before.until(lambda n=number: len(gated.order) + before.pool.desk.held == n + 1)
        assert (before.pool.desk.held, gated.now) == (4, 2)
        for _ in range(6):
            gated.go.release()
        assert [(await each).status_code for each in asked] == [200] * 6
        assert gated.most == 2
        assert gated.order == [f"p{number}" for number in range(6)]
        before.nothing_left()


async def test_a_request_that_has_waited_long_enough_is_told_when_to_come_back() -> None:
    gated = Gated()
    async with fleet(FakeWorker("w0", gated), bound=1, hold_s=0.2) as before:
        first = ask(before, "a")
        await before.until(lambda: gated.now == 1)
        found = await ask(before, "b")
        assert (found.status_code, found.json()["error"]["code"]) == (429, "overloaded")
        assert int(found.headers["retry-after"]) >= 1
        gated.go.release()
        assert (await first).status_code == 200
        before.nothing_left()


async def test_a_client_that_leaves_while_it_waits_leaves_nothing() -> None:
    gated = Gated()
    async with fleet(FakeWorker("w0", gated), bound=1, hold_s=100.0) as before:
        first = ask(before, "a")
        await before.until(lambda: gated.now == 1)
        second = ask(before, "b")
        await before.until(lambda: before.pool.desk.held == 1)
        second.cancel()
        await before.until(lambda: before.pool.desk.held == 0)
        gated.go.release()
        await first
        before.nothing_left()
    assert gated.order == ["a"]


async def test_no_tenant_keeps_others_out() -> None:
    gated = Gated()
    async with fleet(FakeWorker("w0", gated), bound=1, max_held=6, server=KEYS) as before:
        greedy = [ask(before, "g0", "greedy")]
        await before.until(lambda: gated.now == 1)
        for number in range(1, 7):
            greedy.append(ask(before, f"g{number}", "greedy"))
            await before.until(lambda n=number: before.pool.desk.held == n)
        assert (await ask(before, "g7", "greedy")).status_code == 429  # its own fault
        modest = ask(before, "m0", "modest")  # takes the place of the newest of the greedy one
        assert (await greedy[6]).status_code == 429
        for _ in range(7):
            gated.go.release()
        assert [(await each).status_code for each in [modest, *greedy[:6]]] == [200] * 7
        before.nothing_left()
    assert gated.order.index("m0") == 1


async def test_nothing_waits_while_a_worker_is_idle() -> None:
    """`dynamo#8163`: long prompts above a threshold were parked for ever."""
    workers = [FakeWorker(f"w{n}", says("x")) for n in range(2)]
    async with fleet(*workers, bound=1) as before:
        for _ in range(4):
            found = await asyncio.gather(*(before.ask("long " * 9000) for _ in range(2)))
            assert [each.status_code for each in found] == [200, 200]
        assert before.pool.desk.fleet.counters.expired == 0


async def test_early_refusal_is_opt_in() -> None:
    async with fleet(FakeWorker("w0", says("x")), refuse_above_s=0.5) as before:
        assert (await before.ask("short")).status_code == 200
        found = await before.ask("long " * 1_000_000)
        assert (found.status_code, found.json()["error"]["code"]) == (429, "too_late")
        assert int(found.headers["retry-after"]) >= 1
        before.nothing_left()


@pytest.mark.parametrize(("bound", "each"), [(0, 100), (3, 40)])
async def test_thousands_of_requests_that_end_in_every_way_leave_nothing(bound: int, each: int) -> None:
    """`production-stack#1072`, `ray#61755`: maps of requests under way that only grew."""
    rng = random.Random(5)

    async def any_end(asked: Asked, send: Send) -> None:
        way = rng.randrange(6)
        if way == 0:
            await answer(send, 500, {})
        elif way == 1:
            await answer(send, 400, {})
        elif way == 2:
            await start(send, 200, SSE)
            await part(send, chunk("a"))
            return  # it breaks off
        elif way == 3:
            await asked.left.wait()
        else:
            await start(send, 200, SSE)
            await end(send, chunk("a") + event("[DONE]"))

    workers = [FakeWorker(f"w{n}", any_end) for n in range(3)]
    statuses: Counter[int | str] = Counter()
    async with fleet(*workers, bound=bound, breaker_failures=1000, hold_s=0.5) as before:

        async def some(http: aiohttp.ClientSession, first: int) -> None:
            for number in range(first, first + each):
                body = {"prompt": f"{number % 7} " * 50, "stream": True, "user": f"u{number % 5}"}
                try:
                    async with http.post("/v1/completions", json=body) as found:
                        await found.read()
                        statuses[found.status] += 1
                except (aiohttp.ClientError, TimeoutError) as error:
                    statuses["late" if isinstance(error, TimeoutError) else "cut"] += 1

        timeout = aiohttp.ClientTimeout(total=0.15)
        async with aiohttp.ClientSession(before.url, timeout=timeout) as http:
            await asyncio.gather(*(some(http, n * 1000) for n in range(20)))
        await before.until(lambda: not any(w.calls for w in before.router.roster.workers.values()))
        await before.until(lambda: before.pool.desk.remembered == 0)
        before.nothing_left()
        assert before.pool.desk.fleet._homes._coming == {}
        assert before.router.gate._active == 0
    assert sum(statuses.values()) == 20 * each
    assert {200, 400, 500, "late"} <= statuses.keys(), statuses


class Waits:
    tokens = 10

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant


def test_the_newest_of_the_fullest_gives_way() -> None:
    hold: Hold[Waits] = Hold(3)
    a1, a2, b1, b2, c1 = (Waits(t) for t in "aabbc")
    assert [hold.add(w) for w in (a1, a2, b1)] == [None, None, None]
    assert hold.add(b2) is b2  # both have two then, so the new one goes
    assert hold.add(c1) is a2
    assert (hold.count, sorted(w.tenant for w in hold)) == (3, ["a", "b", "c"])
    assert hold.heads() == [a1, b1, c1]
    for waiter in (a1, b1, c1):
        assert hold.remove(waiter)
        assert not hold.remove(waiter)
    assert (hold.count, hold._queues) == (0, {})


def test_tenants_take_turns_by_tokens() -> None:
    hold: Hold[Waits] = Hold(100)
    for tenant in "aaaa":
        hold.add(Waits(tenant), under_way=15)
    for tenant in "bbbc":
        hold.add(Waits(tenant))
    order = ""
    while hold.count:
        head = hold.heads()[0]
        order += head.tenant
        hold.served(head)
    assert order == "bcbabaaa"
    hold.add(Waits("d"))
    assert hold._stands["d"] > 0  # who comes later starts where the others stand, and not before them


def test_retry_after_is_what_those_before_take_at_the_present_rate() -> None:
    rate = Rate(window=4)
    assert rate.retry_after(9, 7.2, now=0.0) == 8
    for second in range(10):
        rate.ended(float(second))
    assert rate.per_s(10.0) == 1.0
    assert rate.retry_after(9, 7.2, now=10.0) == 10
    assert rate.retry_after(10**9, 7.2, now=10.0) == 600
