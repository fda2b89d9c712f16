"""`hotprefix bench fleet`. Owns: which runs are made in which order, and the files that they leave.

Rules: the same engines serve all arms; each arm has a router of its own before them, and only one is asked at
a time. Before each run all caches are flushed. Runs are interleaved over the arms, and every second one goes
backwards. One run that is thrown away comes first. A request that is lost ends the bench, except where a
worker is killed: there it is counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import aiohttp
from rich.console import Console

from hotprefix.bench.bench_prompts import Material, TextMaterial
from hotprefix.bench.bench_summary import Setup
from hotprefix.bench.drive import BenchError
from hotprefix.bench.fleet_drive import play
from hotprefix.bench.fleet_page import render
from hotprefix.bench.fleet_summary import FleetRun, FleetSummary, FleetWorkloadResult, summarise
from hotprefix.bench.fleet_tables import print_workload
from hotprefix.bench.fleet_workloads import FULL, QUICK, FleetName, FleetScale, build
from hotprefix.bench.runner import load_average, make_folder, setup_of
from hotprefix.engine.model.files import resolve_model
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.errors import InputError
from hotprefix.localfleet.children import Child
from hotprefix.localfleet.config import LocalFleetConfig
from hotprefix.localfleet.fleet import LocalFleet
from hotprefix.server.config import ServerConfig

ARMS: Final = ("round_robin", "least_requests", "affinity", "predicted")
POLL_S: Final = 0.1
PATIENCE_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What to run. given: the command's parameters for engines. runs: of each arm; None = 3, or 1 if
    `quick`."""

    given: Mapping[str, Any]
    workers: int = 2
    names: tuple[FleetName, ...] = tuple(FleetName)
    runs: int | None = None
    quick: bool = False
    scale: FleetScale | None = None

    @property
    def run_count(self) -> int:
        return self.runs if self.runs is not None else (1 if self.quick else 3)


@dataclass(frozen=True, slots=True)
class Stand:
    """Engines that run, and a router for each arm. routers: their addresses."""

    fleet: LocalFleet
    http: aiohttp.ClientSession
    routers: dict[str, str]
    model: str
    material: Material

    async def state(self, arm: str) -> dict[str, Any]:
        """What a router says at /workers."""
        async with self.http.get(f"{self.routers[arm]}/workers") as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def flush(self) -> None:
        """Empty all caches, and let all routers know. A request whose client has its last byte may still be
        ending, so it is tried for a while. Raises BenchError."""
        for url in self.routers.values():
            await _until(self._flushed(url), f"{url}/flush_cache does not succeed")

    def _flushed(self, url: str) -> Callable[[], Awaitable[bool]]:
        async def flushed() -> bool:
            async with self.http.post(f"{url}/flush_cache") as answer:
                return answer.status == 200

        return flushed

    async def whole(self) -> None:
        """Wait until every router can use every worker, in the life that it has now. Raises BenchError."""

        async def all_ready() -> bool:
            if not all(worker.ready.is_set() for worker in self.fleet.workers):
                return False
            lives = {engine.name: await self._life(engine.url) for engine in self.fleet.engines}
            states = [await self.state(arm) for arm in self.routers]
            told = [worker for state in states for worker in state["workers"]]
            return all(w["state"] == "ready" and w["incarnation"] == lives[w["name"]] for w in told)

        await _until(all_ready, "not all workers are ready")

    async def _life(self, url: str) -> object:
        """The number of the engine's present life."""
        async with self.http.get(f"{url}/load") as answer:
            return (await answer.json())["incarnation"]

    async def kill(self, arm: str) -> None:
        """Kill the worker with the most requests under way."""
        workers = (await self.state(arm))["workers"]
        busiest = max(workers, key=lambda worker: worker["under_way"])["name"]
        _named(self.fleet.workers, busiest).kill()


def run_fleet_bench(options: FleetOptions, out: Path, console: Console) -> FleetSummary:
    """Run the workloads, print their tables, write `out/summary.json` and `out/report.html`. Raises
    InputError, EngineDead, or BenchError if a request fails."""
    if options.run_count < 1:
        raise InputError(f"runs={options.run_count}: give a whole number >= 1", param="runs")
    make_folder(out)
    summary = asyncio.run(_run(options, console))
    (out / "summary.json").write_text(summary.model_dump_json(indent=1) + "\n", encoding="utf-8")
    (out / "report.html").write_text(render(summary), encoding="utf-8")
    return summary


async def _run(options: FleetOptions, console: Console) -> FleetSummary:
    given = {**options.given, "poll": POLL_S}
    material = TextMaterial(Tokenizer.load(resolve_model(given.get("model", "default")).path).encode)
    started, clock, load = datetime.now(UTC), time.perf_counter(), load_average()
    async with (
        LocalFleet(LocalFleetConfig(options.workers), given, lambda line: None) as fleet,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2)) as http,
    ):
        with console.status(f"starting {options.workers} engines and {len(ARMS)} routers"):
            stand = await _stand(fleet, http, material)
        results: list[FleetWorkloadResult] = []
        await fleet.going(_measure(stand, options, console, results))
        setup = await _setup(stand, options, started, load, time.perf_counter() - clock)
        await fleet.stop(0.0)
    return FleetSummary(setup=setup, workers=options.workers, workloads=tuple(results))


async def _stand(fleet: LocalFleet, http: aiohttp.ClientSession, material: Material) -> Stand:
    await fleet.start_engines()
    ports = {arm: fleet.port(ServerConfig(port=0)) for arm in ARMS}
    await asyncio.gather(*(fleet.start_router(arm, port, policy=arm) for arm, port in ports.items()))
    routers = {arm: f"http://127.0.0.1:{port}" for arm, port in ports.items()}
    stand = Stand(fleet, http, routers, "", material)
    await stand.whole()
    return replace(stand, model=(await stand.state(ARMS[0]))["workers"][0]["model"])


async def _measure(
    stand: Stand, options: FleetOptions, console: Console, results: list[FleetWorkloadResult]
) -> None:
    scale = options.scale or (QUICK if options.quick else FULL)
    page_size = (await stand.state(ARMS[0]))["pools"][0]["page_size"]
    await _one(stand, ARMS[0], FleetName.BURST, QUICK, "warm-up")
    for name in options.names:
        runs: dict[str, list[FleetRun]] = {arm: [] for arm in ARMS}
        for turn in range(options.run_count):
            for arm in ARMS if turn % 2 == 0 else reversed(ARMS):
                with console.status(f"{name}: {arm}, run {turn + 1} of {options.run_count}"):
                    runs[arm].append(await _one(stand, arm, name, scale, str(turn)))
        result = summarise(runs, page_size)
        print_workload(console, result)
        results.append(result)


async def _one(stand: Stand, arm: str, name: FleetName, scale: FleetScale, turn: str) -> FleetRun:
    """One run of one arm. Raises BenchError."""
    workload = build(name, stand.material, scale, turn, f"{arm} {turn}")
    await stand.flush()
    before = await stand.state(arm)
    played = await play(stand.http, stand.routers[arm], stand.model, workload, lambda: stand.kill(arm))
    run = FleetRun(workload, played, before, await stand.state(arm))
    if workload.kills:
        await stand.whole()
    elif run.lost:
        why = next(record.lost for record in played.records if record.lost)
        raise BenchError(f"{name}, {arm}: {run.lost} requests were lost: {why}")
    return run


async def _setup(
    stand: Stand, options: FleetOptions, started: datetime, load: float | None, wall_s: float
) -> Setup:
    async with stand.http.get(f"{stand.fleet.engines[0].url}/server_info") as answer:
        info = (await answer.json())["engine"]
    told = info["details"]
    return setup_of(
        model=stand.model, dtype=str(told.get("dtype")), device=str(told.get("device")), versions={},
        started=started, load=load, page_size=info["page_size"],
        max_batched_tokens=told["max_batched_tokens"], runs=options.run_count, quick=options.quick,
        wall_s=wall_s,
    )  # fmt: skip


async def _until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not await holds():
        if time.monotonic() > end:
            raise BenchError(what)
        await asyncio.sleep(0.05)


def _named(children: Sequence[Child], name: str) -> Child:
    return next(child for child in children if child.name == name)
