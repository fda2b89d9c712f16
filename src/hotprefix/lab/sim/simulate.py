"""One replay. Owns: `Replay`, what is held fixed, and `simulate`, which runs it.

Rules:
1. The kernel is the engine's; only time comes from the cost model.
2. The same replay, trace and seed give the same tables and the same log, byte for byte, in any process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from hotprefix.cost.model import CostModel, Links
from hotprefix.cost.return_times import ThinkTimes
from hotprefix.errors import ConfigError, HotprefixError
from hotprefix.kernel.config import KernelConfig
from hotprefix.kernel.counters import Counters
from hotprefix.lab.sim.arrivals import Item, Loop, Workload
from hotprefix.lab.sim.block_prompts import PromptMaker
from hotprefix.lab.sim.cluster import ARRIVAL, WAKE, Clock, Route, Router
from hotprefix.lab.sim.instance import Instance
from hotprefix.lab.sim.lower_tiers import HostSide, Store
from hotprefix.lab.sim.replay_log import ReplayLog
from hotprefix.lab.sim.replay_recorder import Recorder, Row, WindowRows
from hotprefix.lab.sim.rows import LINK_COLUMNS, REQUEST_COLUMNS, WINDOW_COLUMNS
from hotprefix.lab.sim.wires import wires
from hotprefix.lab.trace.ideal import EndlessCache
from hotprefix.lab.trace.trace_request import TraceRequest


@dataclass(frozen=True, slots=True)
class Replay:
    """What one replay holds fixed. Raises ConfigError.

    kernel: the configuration of every instance's kernel.
    cost: the cost model.
    instances: how many.
    route: which of them a request goes to.
    loop: how arrivals come about.
    concurrency: closed loop: how many sessions are alive at a time; None = they begin as recorded.
    speed: open loop: how many times as fast as recorded.
    horizon_s: when the replay stops; None = when everything has ended. What has not finished by then counts
    as unfinished.
    warm_up: how many requests, the first to arrive, fill the caches and are not reported.
    window_s: length of the windows in the window table.
    links: the links of the tiers below L1; None = the cost model's.
    storage_pages: pages of the shared L3.
    log: the file to which every event is written; None = no log.
    repeats: the most repeats of a plan. The outcome does not depend on it.
    """

    kernel: KernelConfig
    cost: CostModel
    instances: int = 1
    route: Route = Route.SESSION
    loop: Loop = Loop.OPEN
    concurrency: int | None = None
    speed: float = 1.0
    horizon_s: float | None = None
    warm_up: int = 0
    window_s: float = 30.0
    links: Links | None = None
    storage_pages: int = 1 << 20
    log: Path | None = None
    repeats: int = 1 << 20

    def __post_init__(self) -> None:
        for name in ("instances", "concurrency", "storage_pages", "repeats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: give a whole number >= 1", param=name)
        for name in ("speed", "window_s", "horizon_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value}: give a number > 0", param=name)
        if self.speed != 1 and self.loop is Loop.CLOSED:
            raise ConfigError(
                f"load.speed={self.speed:g}: in closed loop a turn follows the answer before it, when that "
                "comes; leave it out (load.concurrency makes the load there), or replay in open loop "
                "(load.loop=open)",
                param="load.speed",
            )
        if self.concurrency is not None and self.loop is Loop.OPEN:
            raise ConfigError(
                f"load.concurrency={self.concurrency}: in open loop requests arrive as recorded, however "
                "many sessions that makes; leave it out (--set load.concurrency=; load.speed makes the load "
                "there), or replay in closed loop (load.loop=closed)",
                param="load.concurrency",
            )
        if self.warm_up < 0:
            raise ConfigError(f"warm_up={self.warm_up}: give 0 or more", param="warm_up")


@dataclass(frozen=True, slots=True)
class Tables:
    """What came of a replay; columns as in rows.py.

    requests: one row each, in order of arrival.
    windows, links: the window table and the link table.
    counters: each instance's kernel's.
    virtual_s: when the last thing happened, on the virtual clock.
    wall_s: how long the replay took.
    """

    requests: pl.DataFrame
    windows: pl.DataFrame
    links: pl.DataFrame
    counters: tuple[Counters, ...]
    virtual_s: float
    wall_s: float


def simulate(
    replay: Replay, trace: Iterable[TraceRequest], *, block_size: int, seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Tables:  # fmt: skip
    """Run a replay. progress: called with (requests ended, requests in all). Raises InputError if the trace
    lacks what the loop needs, and ConfigError if a link's figures are missing."""
    begun = time.perf_counter()
    with ExitStack() as stack:
        log = stack.enter_context(ReplayLog(replay.log)) if replay.log is not None else None
        simulation = _Simulation(replay, trace, block_size, seed, progress, log)
        simulation.run()
    return simulation.tables(time.perf_counter() - begun)


class IdealBroken(HotprefixError):
    """More was reused than an endless cache could have reused. That is a bug of ours; it is told instead of
    impossible figures."""


def items(
    trace: Iterable[TraceRequest], block_size: int, endless: EndlessCache | None = None
) -> Iterator[Item]:
    """Each request of a trace with what an endless cache would give it."""
    endless = endless or EndlessCache(block_size)
    for request in trace:
        found = endless.add(request)
        yield Item(request, found.tokens, found.heat)


class _Simulation:
    def __init__(
        self, replay: Replay, trace: Iterable[TraceRequest], block_size: int, seed: int,
        progress: Callable[[int, int], None] | None, log: ReplayLog | None,
    ) -> None:  # fmt: skip
        self._replay, self._progress = replay, progress
        self._clock = Clock()
        self._router = Router(replay.route, replay.instances)
        self._endless = EndlessCache(block_size)
        self._workload = Workload(
            items(trace, block_size, self._endless), replay.loop, seed=seed, concurrency=replay.concurrency,
            speed=replay.speed,
        )  # fmt: skip
        self._prompts = PromptMaker(block_size)
        self._think = ThinkTimes()
        self._rows: list[Row] = []
        self._arrived = self._done = 0
        tiers = replay.kernel.tiers
        store = Store(replay.storage_pages) if tiers is not None and tiers.storage else None
        self._sides: list[HostSide] = []
        self._instances = [self._instance(i, store, log) for i in range(replay.instances)]

    def _instance(self, index: int, store: Store | None, log: ReplayLog | None) -> Instance:
        replay, config = self._replay, self._replay.kernel
        links = replay.links or replay.cost.links
        page_bytes = config.page_size * replay.cost.kv_token_bytes
        side = HostSide(
            wires(links, config.tiers is not None, store is not None), page_bytes, store,
            lambda when: self._clock.at(when, ARRIVAL, lambda now: self._instances[index].disturb(now)),
        )  # fmt: skip
        self._sides.append(side)
        return Instance(
            index, config, replay.cost,
            schedule=lambda when, instance: self._clock.at(when, WAKE, instance.wake),
            ended=self._ended, recorder=Recorder(index, log.put if log is not None else None),
            windows=WindowRows(index, replay.window_s, config.total_pages), prompts=self._prompts, host=side,
            most=replay.repeats, next_use=self._next_use,
        )  # fmt: skip

    def run(self) -> None:
        for when, item in self._workload.initial():
            self._clock.at(when, ARRIVAL, self._arrival(item))
        self._clock.run(self._replay.horizon_s if self._replay.horizon_s is not None else math.inf)
        self._rows += [row for instance in self._instances for row in instance.stop(self._clock.now)]
        self._check_ideal()

    def _check_ideal(self) -> None:
        """Raise IdealBroken if all requests together reused more than an endless cache would. They are
        summed, because they do not run in the trace's order."""
        reused = sum(row[tier] or 0 for row in self._rows for tier in ("cached_l1", "cached_l2", "cached_l3"))
        ideal = sum(row["ideal_tokens"] for row in self._rows) + self._endless.late
        if reused > ideal:
            raise IdealBroken(f"{reused} tokens were reused, an endless cache would have had {ideal}")

    def _next_use(self, item: Item) -> float | None:
        """Predicted seconds from the request's end to its session's next one, by what was seen so far."""
        request = item.request
        return None if request.session is None else self._think.expected(self._workload.awaited(request))

    def _arrival(self, item: Item) -> Callable[[float], None]:
        def arrive(now: float) -> None:
            self._arrived += 1
            if item.request.parent is not None:
                self._think.learn(item.request.kind, item.request.think_s or 0.0)
            name = f"{self._arrived:07d}" if self._arrived > self._replay.warm_up else f"w{self._arrived}"
            self._router.choose(item, self._instances).arrive(name, item, now)

        return arrive

    def _ended(self, item: Item, row: Row, now: float) -> None:
        self._rows.append(row)
        self._done += 1
        for when, following in self._workload.completed(item.request, now):
            self._clock.at(when, ARRIVAL, self._arrival(following))
        if self._progress is not None:
            self._progress(self._done, self._workload.size)

    def tables(self, wall_s: float) -> Tables:
        reported = sorted((r for r in self._rows if not r["id"].startswith("w")), key=lambda r: r["id"])
        since = reported[0]["arrival_s"] if reported and self._replay.warm_up else 0.0
        windows = [
            row
            for instance in self._instances
            for row in instance.windows.close(self._clock.now)
            if row["start_s"] + row["seconds"] > since
        ]
        return Tables(
            pl.DataFrame(reported, schema=REQUEST_COLUMNS),
            pl.DataFrame(windows, schema=WINDOW_COLUMNS),
            pl.DataFrame(self._link_rows(), schema=LINK_COLUMNS),
            tuple(instance.kernel.counters for instance in self._instances),
            self._clock.now,
            wall_s,
        )

    def _link_rows(self) -> list[Row]:
        return [
            {
                "instance": index, "link": wire.name, "bytes": wire.bytes, "seconds": wire.seconds,
                "transfers": wire.transfers, "cancels": wire.cancels,
            }
            for index, side in enumerate(self._sides)
            for wire in side.wires.all
        ]  # fmt: skip
