"""Processes that are killed or stopped under streams, behind a router that is a process, too: no stream is
lost, and each has the text that it has without all that. Paced engines, so that texts can be compared; that
the real model goes on with the same text in fp32: test_resume.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server import events
from tests.support.serving import Server

BIN = str(Path(sys.executable).parent / "hotprefix")
KEYS = str(Path(__file__).parents[1] / "fixtures" / "api-keys.txt")
PACED = ["--paced", "llama-3.1-8b.1xh100.fp8", "--kv-tokens", "400000"]
LIMIT_S = 600.0


class Fleet:
    """Workers that can be killed and started again at their address. pace: how much slower they are than what
    they pretend to be. running: by their address."""

    def __init__(self, count: int, pace: int) -> None:
        self._pace = str(pace)
        self.running: dict[str, Server] = {}
        starting = [self._started("0") for _ in range(count)]
        for one in starting:
            one.until_ready()
            self.running[one.url] = one

    @property
    def urls(self) -> list[str]:
        return list(self.running)

    def kill(self, url: str) -> None:
        """kill -9 of the server. Its engine's process ends by itself."""
        self.running[url].signal(signal.SIGKILL)
        self.running[url].wait()

    def start(self, url: str) -> None:
        """A new life at the same address."""
        self.running[url] = self._started(url.rpartition(":")[2])

    def _started(self, port: str) -> Server:
        own = ["--port", port, "--pace-factor", self._pace, "--internal-key-file", KEYS]
        return Server([BIN, "serve", *own, *PACED])

    def close(self) -> None:
        for one in self.running.values():
            one.process.send_signal(signal.SIGCONT)
            one.process.kill()
            one.wait()


@contextlib.contextmanager
def paced(count: int, pace: int) -> Iterator[Fleet]:
    fleet = Fleet(count, pace)
    try:
        yield fleet
    finally:
        fleet.close()


@dataclass
class Client:
    """What one client has so far of its answer."""

    body: dict[str, Any]
    data: bytes = b""
    ended: bool = False

    @property
    def count(self) -> int:
        return self.data.count(b"\n\n")

    def text(self) -> str:
        *some, done = events(self.data.decode())
        assert done == "[DONE]"
        return "".join(each["choices"][0]["text"] for each in some)

    async def run(self, http: httpx.AsyncClient, url: str) -> None:
        async with http.stream("POST", f"{url}/v1/completions", json=self.body) as answer:
            async for part in answer.aiter_raw():
                self.data += part
        self.ended = True


def bodies(count: int, tokens: int) -> list[dict[str, Any]]:
    sampled: dict[str, Any] = {"temperature": 1, "seed": 5}
    return [
        {"prompt": f"Story {n}.", "max_tokens": tokens, "stream": True, **(sampled if n % 2 else {})}
        for n in range(count)
    ]


@contextlib.asynccontextmanager
async def running(url: str, asked: list[dict[str, Any]]) -> AsyncIterator[list[Client]]:
    """Clients that read their answers; at the end all of them have ended."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=LIMIT_S, limits=limits) as http:
        clients = [Client(body) for body in asked]
        tasks = [asyncio.ensure_future(one.run(http, url)) for one in clients]
        yield clients
        await asyncio.gather(*tasks)


async def undisturbed(asked: list[dict[str, Any]]) -> list[str]:
    """What a fast worker answers."""
    with paced(1, pace=1) as fleet:
        async with running(fleet.urls[0], asked) as clients:
            pass
    return [one.text() for one in clients]


@contextlib.contextmanager
def router(fleet: Fleet, *more: str) -> Iterator[Server]:
    named = [part for n, url in enumerate(fleet.urls) for part in ("--worker", f"{url},name=w{n}")]
    command = [BIN, "route", "--port", "0", "--poll", "0.1", "--internal-key-file", KEYS, *named, *more]
    one = Server(command)
    try:
        one.until_ready()
        yield one
    finally:
        one.process.kill()
        one.wait()


def state(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/workers", timeout=60).json()
    return found


def resumed(view: dict[str, Any]) -> dict[str, int]:
    """Answers that went on elsewhere, by why; nothing else came of any."""
    found = view["pools"][0]["migrations"]
    assert {each["outcome"] for each in found} <= {"resumed"}
    return {each["reason"]: each["count"] for each in found}


async def until(holds: Any) -> None:
    end = asyncio.get_running_loop().time() + LIMIT_S
    while not await asyncio.to_thread(holds):
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.05)


async def further(clients: list[Client], events: int) -> None:
    """Until every client that still reads has so many further events."""
    wanted = [(one, one.count + events) for one in clients]
    await until(lambda: all(one.ended or one.count >= least for one, least in wanted))


async def test_workers_are_killed_and_stopped_under_twenty_streams() -> None:
    """Two are killed and one is stopped, so at the end one is left; it has every stream."""
    asked = bodies(20, tokens=200)
    texts = await undisturbed(asked)
    with paced(4, pace=10) as fleet:
        probes = ("--probe-timeout", "0.5", "--probe-failures", "2")
        with router(fleet, "--policy", "round_robin", *probes) as before:
            async with running(before.url, asked) as clients:
                for number, url in enumerate(fleet.urls[:3]):
                    await further(clients, 5)
                    under_way = state(before)["workers"][number]["under_way"]
                    assert under_way >= 5
                    if number == 1:
                        os.kill(fleet.running[url].process.pid, signal.SIGSTOP)
                    else:
                        fleet.kill(url)
                    await until(lambda n=number: state(before)["workers"][n]["state"] == "silent")
            assert [one.text() for one in clients] == texts
            found = resumed(state(before))
            assert found["silent"] >= 5
            assert sum(found.values()) - found["silent"] >= 10
            assert not state(before)["cut"]
            assert state(before)["workers"][3]["under_way"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_workers_are_killed_twenty_times_under_fifty_streams() -> None:
    """Each is started again at once, with an empty cache, and gets requests again."""
    asked = bodies(50, tokens=1200)
    texts = await undisturbed(asked)
    with paced(3, pace=30) as fleet, router(fleet, "--migrations", "20") as before:
        async with running(before.url, asked) as clients:
            for number in range(20):
                await further(clients, 2)
                url = fleet.urls[number % 3]
                fleet.kill(url)
                fleet.start(url)
                await until(lambda n=number: _well(before, n % 3, n // 3 + 1))
        assert [one.text() for one in clients] == texts
        view = state(before)
        assert not view["cut"]
        assert sum(resumed(view).values()) > 100


def _well(before: Server, number: int, lives: int) -> bool:
    """Whether the worker has begun again so often and is ready."""
    worker = state(before)["workers"][number]
    return worker["state"] == "ready" and worker["restarts"] >= lives
