"""Many clients at once, some of whom leave: nobody loses an end, nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest

from tests.support.server import events
from tests.support.serving import Server, server


async def one(http: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None) -> str:
    """How one streaming request ended: done, left, or a status."""
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            return str(answer.status_code)
        received = b""
        number = 0
        async for chunk in answer.aiter_bytes():
            received += chunk
            number += 1
            if number == leave_after:
                return "left"
    found = events(received.decode())
    assert found[-1] == "[DONE]"
    reasons = [c["finish_reason"] for e in found[:-1] for c in e["choices"] if c["finish_reason"]]
    assert len(reasons) == body.get("n", 1)
    return "done"


async def storm(url: str, clients: int, rounds: int, body: dict[str, Any]) -> Counter[str]:
    """`clients` at once, each `rounds` requests, a third of which are left early."""
    dice = random.Random(1)
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=280, limits=limits) as http:

        async def many(plan: list[int | None]) -> list[str]:
            return [await one(http, body, leave_after) for leave_after in plan]

        plans = [
            [dice.choice([None, None, dice.randint(1, 4)]) for _ in range(rounds)] for _ in range(clients)
        ]
        ends = await asyncio.gather(*map(many, plans))
    return Counter(end for each in ends for end in each)


async def settled(url: str) -> dict[str, int]:
    """The engine's counts once nothing runs or waits."""
    async with httpx.AsyncClient(base_url=url, timeout=100) as http:
        for _ in range(2000):
            stats: dict[str, int] = (await http.get("/server_info")).json()["stats"]
            if stats["running"] == stats["waiting"] == 0:
                return stats
            await asyncio.sleep(0.01)
    raise AssertionError(f"requests stay: {stats}")


def descriptors(running: Server) -> int:
    return sum(psutil.Process(pid).num_fds() for pid in (running.process.pid, running.engine_pid()))


async def test_clients_that_come_and_go_leave_nothing_behind() -> None:
    with server() as running:
        running.until_ready()
        body = {"prompt": [0, 1], "max_tokens": 12, "n": 2}
        await storm(running.url, 50, 1, body)
        await settled(running.url)
        before = descriptors(running)
        ends = await storm(running.url, 100, 4, body)
        await settled(running.url)
        assert set(ends) == {"done", "left"}
        assert sum(ends.values()) == 400
        for _ in range(1000):
            if descriptors(running) <= before:
                break
            await asyncio.sleep(0.02)
        assert descriptors(running) <= before


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_two_hundred_clients_on_the_real_model(live: Server) -> None:
    """Beyond the queue's limit the answer is 429; every page comes back; memory is flat."""
    body = {"prompt": "Once upon a time there was a", "max_tokens": 12, "ignore_eos": True}
    await storm(live.url, 100, 2, body)
    await settled(live.url)
    processes = [psutil.Process(pid) for pid in (live.process.pid, live.engine_pid())]
    before = [process.memory_info().rss for process in processes]
    ends = await storm(live.url, 200, 10, body)
    stats = await settled(live.url)
    assert set(ends) == {"done", "left", "429"}
    assert stats["free_pages"] + stats["evictable_pages"] == stats["total_pages"]
    for process, rss in zip(processes, before, strict=True):
        assert process.memory_info().rss < rss + 64 * 2**20
