"""The capacity of one instance under an experiment's conditions. Owns: `find_capacity`.

Rules:
1. The conditions are the experiment's first one with its baseline arm, on one instance.
2. A rate is offered by drawing when requests come (Poisson). If the trace has sessions, their starts are
   drawn and their turns follow the answers, so the rate is that of starts times requests per session.
3. All rates see the same draws, stretched, so that a higher rate is the same traffic, denser.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np

from hotprefix.errors import ConfigError
from hotprefix.lab.capacity import Capacity, Conditions, Tried, largest_rate
from hotprefix.lab.experiment.run_plan import PAGE_SIZE, plan
from hotprefix.lab.experiment.spec import Experiment
from hotprefix.lab.experiment.task import ReplayTask
from hotprefix.lab.experiment.trace_source import open_workload
from hotprefix.lab.replay_metrics import metrics
from hotprefix.lab.sim.arrivals import Loop
from hotprefix.lab.sim.simulate import simulate
from hotprefix.lab.table_math import Figures
from hotprefix.lab.trace.info import TraceInfo
from hotprefix.lab.trace.trace_request import TraceRequest


@dataclass(slots=True)
class Offered:
    """A trace's requests, arriving at a rate. starts: how many of them depend on no other, in sessions or
    singly."""

    requests: list[TraceRequest]
    block_size: int
    loop: Loop
    starts: int

    @classmethod
    def of(cls, task: ReplayTask) -> Offered:
        """The trace of a run."""
        trace = open_workload(task.settings.trace, task.settings.load, task.seed)
        requests = list(trace)
        single = sum(request.session is None for request in requests)
        sessions = len({request.session for request in requests} - {None})
        starts = sessions if task.loop is Loop.CLOSED else single + sessions
        return cls(requests, trace.block_size or PAGE_SIZE, task.loop, starts)

    def at(self, rate: float, seed: int) -> Iterator[TraceRequest]:
        """The requests, offered at `rate` requests a second."""
        if self.loop is Loop.OPEN:
            gaps = np.random.default_rng(seed).exponential(1 / rate, len(self.requests))
            for request, at in zip(self.requests, np.cumsum(gaps).tolist(), strict=True):
                yield replace(request, arrival_s=at)
            return
        gap = len(self.requests) / self.starts / rate
        draws = np.random.default_rng(seed)
        begun: dict[str | None, float] = {}
        now = 0.0
        for request in self.requests:
            if request.parent is not None:
                yield request
                continue
            own = request.arrival_s or 0.0
            if request.session not in begun:
                now += float(draws.exponential(gap))
                begun[request.session] = now - own
            yield replace(request, arrival_s=own + begun[request.session])


def find_capacity(
    experiment: Experiment, *, share: float, within: float, told: Callable[[str], None] = lambda text: None
) -> Capacity:
    """Bisect for the largest rate at which at least `share` of the requests meets the experiment's
    objectives. told: called with each rate that is tried. Raises InputError and ConfigError."""
    if not 0 < share <= 1:
        raise ConfigError(f"--share {share}: give a number above 0, at most 1", param="share")
    if not 0.001 <= within <= 1:
        raise ConfigError(f"--within {within}: give a number from 0.001 to 1", param="within")
    slo = experiment.slo.build()
    objectives = experiment.slo.model_dump(exclude_none=True, exclude={"timeout_s"})
    if not slo.limits:
        raise ConfigError(
            "no objective is given: capacity is what meets one; give --set slo.ttft_s=2, for example",
            param="slo",
        )
    planned = plan(experiment)
    tasks = planned.runs[experiment.conditions[0].name, experiment.baseline][: experiment.seeds]
    if tasks[0].settings.cluster.instances > 1:
        raise ConfigError(
            f"cluster.instances={tasks[0].settings.cluster.instances}: capacity is that of one instance; "
            "give --set cluster.instances=1",
            param="cluster.instances",
        )
    offered = [Offered.of(task) for task in tasks]

    def attain(rate: float) -> Tried:
        found = [
            metrics(
                tables.requests, tables.windows, tables.links, slo=slo, page_tokens=task.kernel.page_size,
                end_s=tables.virtual_s,
            )
            for task, one in zip(tasks, offered, strict=True)
            for tables in [
                simulate(
                    replace(task.replay(), concurrency=None, speed=1.0, horizon_s=None),
                    one.at(rate, task.seed), block_size=one.block_size, seed=task.seed,
                )
            ]
        ]  # fmt: skip
        tried = Tried(
            requests_per_s=rate, good_share=_mean(found, "slo_share"), reuse_share=_mean(found, "reuse_share")
        )
        told(f"{rate:.4g} requests/s: {tried.good_share:.1%} meet the objective")
        return tried

    low, high, tried = largest_rate(attain, 1.0, share=share, within=within)
    return Capacity(
        date=dt.date.today(), requests_per_s=low, too_much=high, tried=tried,
        conditions=_conditions(
            planned.surveys[experiment.conditions[0].name].info, tasks, objectives, share, within
        ),
    )  # fmt: skip


def _mean(found: list[Figures], name: str) -> float:
    return sum(one[name] or 0.0 for one in found) / len(found)


def _conditions(
    info: TraceInfo, tasks: tuple[ReplayTask, ...], objectives: dict[str, float], share: float, within: float
) -> Conditions:
    task = tasks[0]
    restore = task.cost.links.restore if task.kernel.tiers is not None else None
    return Conditions(
        cost=task.cost.name, model=task.cost.model, hardware=task.cost.hardware, trace=info.name,
        requests=info.requests, input_tokens=info.input_tokens / info.requests,
        output_tokens=info.output_tokens / info.requests,
        loop="closed" if task.loop is Loop.CLOSED else "open",
        l1_tokens=task.kernel.total_pages * task.kernel.page_size,
        restore_bytes_per_s=None if restore is None else restore.bytes_per_s,
        kernel={name: str(value) for name, value in asdict(task.kernel).items()},
        objectives=objectives, share=share, seeds=len(tasks), within=within,
    )  # fmt: skip
