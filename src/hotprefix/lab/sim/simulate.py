"""One replay. Owns: `simulate`, which runs it, and `Tables`, what comes of it.

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
from typing import Any

import polars as pl

from hotprefix.cost.answer_lengths import AnswerLengths
from hotprefix.cost.return_times import ThinkTimes
from hotprefix.errors import HotprefixError
from hotprefix.fleet.records import Decision, Keys, RouteRequest
from hotprefix.kernel.counters import Counters
from hotprefix.kernel.request import Namespace
from hotprefix.lab.sim.arrivals import Item, Workload
from hotprefix.lab.sim.block_prompts import PromptMaker
from hotprefix.lab.sim.clock import ARRIVAL, NEWS, REPORT, WAKE, Clock
from hotprefix.lab.sim.fleet_driver import FleetDriver, profile
from hotprefix.lab.sim.instance import Instance
from hotprefix.lab.sim.lower_tiers import HostSide, Store
from hotprefix.lab.sim.pending import Pending
from hotprefix.lab.sim.replay import Death, Replay
from hotprefix.lab.sim.replay_log import ReplayLog
from hotprefix.lab.sim.replay_recorder import Recorder, Row, WindowRows, begin_again, new_row
from hotprefix.lab.sim.route_rows import LoadRows, RouteRows
from hotprefix.lab.sim.rows import (
    LINK_COLUMNS,
    LOAD_COLUMNS,
    REQUEST_COLUMNS,
    WINDOW_COLUMNS,
)
from hotprefix.lab.sim.table_rows import TableRows
from hotprefix.lab.sim.wires import link_rows, wires
from hotprefix.lab.trace.ideal import EndlessCache
from hotprefix.lab.trace.trace_request import TraceRequest


@dataclass(frozen=True, slots=True)
class Tables:
    """What came of a replay; columns as in rows.py.

    requests: one row each, in order of arrival.
    windows, links: the window table and the link table.
    routes, loads: the fleet's decisions, and the loads that it saw; empty with one instance.
    counters: each kernel's, in the order in which they began; one that has died keeps its own.
    fleet: what the fleet core counted (`FleetDriver.facts`).
    virtual_s: when the last thing happened, on the virtual clock.
    wall_s: how long the replay took.
    """

    requests: pl.DataFrame
    windows: pl.DataFrame
    links: pl.DataFrame
    routes: pl.DataFrame
    loads: pl.DataFrame
    counters: tuple[Counters, ...]
    fleet: dict[str, Any]
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
        self._replay, self._progress, self._log = replay, progress, log
        self._clock = Clock()
        self._endless = EndlessCache(block_size)
        self._workload = Workload(
            items(trace, block_size, self._endless), replay.loop, seed=seed, concurrency=replay.concurrency,
            speed=replay.speed,
        )  # fmt: skip
        self._prompts = PromptMaker(block_size)
        self._think = ThinkTimes()
        self._answers = AnswerLengths()
        self._requests = TableRows(REQUEST_COLUMNS)
        self._reused = self._ideal = 0
        self._routes, self._loads = RouteRows(), LoadRows(replay.window_s)
        self._arrived = self._done = 0
        self._look_at = 0.0
        self._counters: list[Counters] = []
        tiers = replay.kernel.tiers
        stores = tiers is not None and tiers.storage
        everyone = range(replay.instances)
        self._windows = [WindowRows(i, replay.window_s, replay.kernel_of(i).total_pages) for i in everyone]
        self._wires = [wires(replay.links_of(i), tiers is not None, stores) for i in everyone]
        self._fleet = FleetDriver(
            replay.routing, [profile(replay, i) for i in everyone], self._clock, seed,
            serve=self._serve, refuse=self._refuse,
        )  # fmt: skip
        gone = self._fleet.store.gone if self._fleet.informed else None
        self._store = Store(replay.storage_pages, gone) if stores else None
        self._instances: dict[int, Instance] = {}
        for index in everyone:
            self._begin(index, 0.0)

    def _begin(self, index: int, now: float) -> None:
        """An instance comes, or comes back, with nothing in its caches."""
        replay = self._replay
        config, cost = replay.kernel_of(index), replay.cost_of(index)
        side = HostSide(
            self._wires[index], config.page_size * cost.kv_token_bytes, self._store,
            lambda when: self._clock.at(when, ARRIVAL, instance.disturb),
            lambda name, page: self._fleet.stored(index, name, page),
        )  # fmt: skip
        instance = Instance(
            index, config, cost,
            schedule=lambda when, instance: self._clock.at(when, WAKE, instance.wake),
            ended=self._ended, stepped=self._fleet.stepped,
            recorder=Recorder(
                index, self._log.put if self._log is not None else None, self._fleet.first_token
            ),
            windows=self._windows[index], host=side, most=replay.repeats, next_use=self._next_use,
        )  # fmt: skip
        self._instances[index] = instance
        self._counters.append(instance.kernel.counters)
        self._fleet.join(index, instance.kernel, now)

    def run(self) -> None:
        for when, item in self._workload.initial():
            self._clock.at(when, ARRIVAL, self._arrival(item))
        for death in self._replay.deaths:
            self._clock.at(death.at_s, NEWS, self._death(death))
        if self._fleet.informed:
            self._clock.at(0.0, REPORT, self._report)
        self._clock.run(self._replay.horizon_s if self._replay.horizon_s is not None else math.inf)
        self._fleet.close()
        for index in sorted(self._instances):
            for row in self._instances[index].stop(self._clock.now):
                self._close(row)
        for pending in self._fleet.held:
            self._close(pending.row)
        self._check_ideal()

    def _check_ideal(self) -> None:
        """Raise IdealBroken if all requests together reused more than an endless cache would. They are
        summed, because they do not run in the trace's order."""
        ideal = self._ideal + self._endless.late
        if self._reused > ideal:
            raise IdealBroken(f"{self._reused} tokens were reused, an endless cache would have had {ideal}")

    def _next_use(self, item: Item) -> float | None:
        """Predicted seconds from the request's end to its session's next one, by what was seen so far."""
        request = item.request
        return None if request.session is None else self._think.expected(self._workload.awaited(request))

    # -- requests ---------------------------------------------------------------------------------

    def _arrival(self, item: Item) -> Callable[[float], None]:
        def arrive(now: float) -> None:
            self._arrived += 1
            request = item.request
            if request.parent is not None:
                self._think.learn(request.kind, request.think_s or 0.0)
            name = f"{self._arrived:07d}" if self._arrived > self._replay.warm_up else f"w{self._arrived}"
            prompt = self._prompts.make(request)
            keys: Keys = ()
            if self._fleet.informed:
                keys = self._fleet.keys.of_prompt(Namespace(model=request.namespace), prompt.tokens)
            asked = RouteRequest(
                name, keys, request.input_length, self._answers.expected, request.session,
                priority=request.priority,
            )  # fmt: skip
            self._fleet.submit(Pending(name, item, prompt, new_row(item, name, now), asked, now), now)

        return arrive

    def _serve(self, index: int, pending: Pending, decision: Decision, now: float) -> None:
        if self._fleet.informed:
            self._routes.decided(decision, pending.row, pending.row["failovers"] + 1, pending.since)
        self._instances[index].arrive(pending, now)

    def _refuse(self, pending: Pending, now: float) -> None:
        pending.row["outcome"] = "rejected"
        self._finish(pending, now)

    def _ended(self, pending: Pending, now: float) -> None:
        self._fleet.ended(pending, now)
        self._finish(pending, now)

    def _close(self, row: Row) -> None:
        """A request's row will not change any more."""
        self._reused += sum(row[tier] or 0 for tier in ("cached_l1", "cached_l2", "cached_l3"))
        self._ideal += row["ideal_tokens"]
        self._routes.ended(row)
        self._requests.add(row)

    def _finish(self, pending: Pending, now: float) -> None:
        self._close(pending.row)
        self._answers.learn(pending.row["output_tokens"])
        self._done += 1
        for when, following in self._workload.completed(pending.item.request, now):
            self._clock.at(when, ARRIVAL, self._arrival(following))
        if self._progress is not None:
            self._progress(self._done, self._workload.size)

    # -- instances --------------------------------------------------------------------------------

    def _death(self, death: Death) -> Callable[[float], None]:
        def die(now: float) -> None:
            left = self._instances.pop(death.worker).die()
            self._fleet.leave(death.worker, now)
            if death.back_s is not None:
                self._clock.at(death.back_s, NEWS, self._return(death.worker))
            for pending in left:
                begin_again(pending.row)
                pending.since = now
                # What its first life stored in L3 may be found by its second one.
                self._endless.late += pending.item.request.input_length
                self._fleet.submit(pending, now)

        return die

    def _return(self, index: int) -> Callable[[float], None]:
        def back(now: float) -> None:
            self._windows[index].begin_again()
            self._wires[index].begin_again(now)
            self._begin(index, now)

        return back

    def _report(self, now: float) -> None:
        """Every instance reports. About ten times a window the loads are noted, as the fleet sees them."""
        fleet = self._fleet
        for index in sorted(self._instances):
            fleet.report(index, self._instances[index].report(now, fleet.life(index)), now)
        if now >= self._look_at:
            self._look_at = now + self._replay.window_s / 10
            for name, load in fleet.fleet.loads(now).items():
                self._loads.seen(int(name), load, now)
        self._clock.at(now + self._replay.routing.report_every_s, REPORT, self._report)

    # -- tables -----------------------------------------------------------------------------------

    def tables(self, wall_s: float) -> Tables:
        of_warm_up = pl.col("id").str.starts_with("w")
        requests = self._requests.frame().filter(~of_warm_up).sort("id")
        since = requests["arrival_s"][0] if len(requests) and self._replay.warm_up else 0.0
        windows = [row for one in self._windows for row in one.close(self._clock.now)]
        loads = self._loads.close()
        return Tables(
            requests,
            pl.DataFrame([r for r in windows if r["start_s"] + r["seconds"] > since], schema=WINDOW_COLUMNS),
            pl.DataFrame(link_rows(self._wires), schema=LINK_COLUMNS),
            self._routes.frame().filter(~of_warm_up),
            pl.DataFrame(
                [r for r in loads if r["start_s"] + self._replay.window_s > since], schema=LOAD_COLUMNS
            ),
            tuple(self._counters),
            self._fleet.facts,
            self._clock.now,
            wall_s,
        )
