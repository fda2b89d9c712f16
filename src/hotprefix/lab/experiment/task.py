"""One replay as a task for a sweep. Owns: `ReplayTask`.

Rule: a task is all that a process needs to do the run. This module imports no more than that, because each
run pays for its imports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from hotprefix.cost.model import CostModel
from hotprefix.kernel.config import KernelConfig
from hotprefix.lab.experiment.bounds import bound_facts
from hotprefix.lab.experiment.finished_runs import Output
from hotprefix.lab.experiment.settings import Settings
from hotprefix.lab.experiment.trace_source import open_workload
from hotprefix.lab.sim.arrivals import Loop
from hotprefix.lab.sim.replay import Death, Replay, Routing, Worker
from hotprefix.lab.sim.simulate import simulate

TABLES = ("requests", "windows", "links", "routes", "loads")


@dataclass(frozen=True, slots=True)
class ReplayTask:
    """One replay, sent to another process. Equal keys mean equal results.

    workers: what each instance has of its own; empty = nothing.
    bound: also compute the clairvoyant bound (bounds.py).
    """

    key: str
    settings: Settings
    kernel: KernelConfig
    cost: CostModel
    workers: tuple[Worker, ...]
    routing: Routing
    loop: Loop
    seed: int
    bound: bool = False

    def replay(self) -> Replay:
        """What is held fixed. Raises ConfigError."""
        chosen, load = self.settings, self.settings.load
        return Replay(
            kernel=self.kernel,
            cost=self.cost,
            instances=chosen.cluster.instances,
            workers=self.workers,
            routing=self.routing,
            deaths=tuple(Death(one.worker, one.at_s, one.back_s) for one in chosen.cluster.failures),
            storage_pages=chosen.cluster.storage_pages,
            loop=self.loop,
            concurrency=load.concurrency,
            speed=load.speed,
            horizon_s=load.horizon_s,
            warm_up=load.warm_up,
            window_s=chosen.window_s,
        )

    def run(self, progress: Callable[[int], None]) -> Output:
        """Replay. Raises InputError (the trace) and what the simulator raises."""
        trace = open_workload(self.settings.trace, self.settings.load, self.seed)
        tables = simulate(
            self.replay(),
            trace,
            seed=self.seed,
            block_size=trace.block_size,
            progress=lambda done, _: progress(done),
        )
        facts = {
            "virtual_s": tables.virtual_s,
            "wall_s": tables.wall_s,
            "counters": [asdict(counters) for counters in tables.counters],
            "fleet": tables.fleet,
        }
        if self.bound:
            facts["bound"] = bound_facts(trace, tables.requests, self.kernel, trace.block_size)
        return Output({name: getattr(tables, name) for name in TABLES}, facts)
