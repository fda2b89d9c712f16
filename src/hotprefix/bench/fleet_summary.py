"""The fleet bench's result as data. Owns: the schema of its `summary.json`, and how runs become figures.

Rules: every figure keeps its runs. Times are compared run by run with the first arm's, because a slow minute
of the machine falls on all arms of a run. What was not measured is null: the duplication factor of a run in
which a worker was killed or a request was lost, and migrations if the router does not count them. Units:
tokens, seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean, median
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hotprefix.bench.bench_summary import Setup
from hotprefix.bench.fleet_drive import Played
from hotprefix.bench.fleet_workloads import FleetWorkload
from hotprefix.bench.request_costs import required


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Timed(_Frozen):
    """One measured time. None: a run in which every request was lost."""

    runs: tuple[float | None, ...]
    mean: float | None
    ratios: tuple[float | None, ...] = Field(description="run by run, to the first arm's")
    ratio: float | None = Field(description="median of the ratios")


class FleetArm(_Frozen):
    """One policy's runs; each tuple has a figure for each run."""

    policy: str
    requests: int
    prompt_tokens: tuple[int, ...]
    reused_tokens: tuple[int, ...] = Field(description="prompt tokens from a worker's cache")
    computed_tokens: tuple[int, ...]
    required_tokens: tuple[int, ...] = Field(description="what one cache without a limit would compute")
    duplication: tuple[float | None, ...] = Field(description="computed / required; 1 is perfect")
    copied_tokens: tuple[int, ...] = Field(description="computed a further time because the router chose so")
    by_worker: tuple[tuple[int, ...], ...] = Field(description="requests sent to each worker")
    lost: tuple[int, ...] = Field(description="requests without a whole answer")
    retries: tuple[int, ...] = Field(description="went to another worker before the answer began")
    migrations: tuple[int, ...] | None = Field(description="went on at another worker after it had begun")
    mean_ttft_s: Timed
    p95_ttft_s: Timed
    slowest_s: Timed
    makespan_s: Timed


class FleetWorkloadResult(_Frozen):
    workload: str
    title: str
    about: str
    arms: tuple[FleetArm, ...]


class FleetSummary(_Frozen):
    schema_version: int = 1
    setup: Setup
    workers: int
    workloads: tuple[FleetWorkloadResult, ...]


@dataclass(frozen=True, slots=True)
class FleetRun:
    """One run of one arm. before, after: what the router's /workers said."""

    workload: FleetWorkload
    played: Played
    before: Mapping[str, Any]
    after: Mapping[str, Any]

    @property
    def lost(self) -> int:
        return sum(bool(record.lost) for record in self.played.records)

    def tokens(self, name: str) -> int:
        """The sum over the requests that have figures. name: a field of their records."""
        return sum(getattr(record, name) for record in self.played.records if not record.lost)

    def moved(self, name: str) -> int | None:
        """How far a counter of the router's pools has moved; None = it has no such counter."""
        told = [[pool.get(name) for pool in state["pools"]] for state in (self.before, self.after)]
        if any(value is None for values in told for value in values):
            return None
        before, after = (sum(map(_total, values)) for values in told)
        return after - before

    def requests(self) -> tuple[int, ...]:
        """Those that each worker was sent."""
        had = {worker["name"]: worker["requests"] for worker in self.before["workers"]}
        return tuple(w["requests"] - had.get(w["name"], 0) for w in self.after["workers"])


Runs = Sequence[FleetRun]


def summarise(runs: Mapping[str, Runs], page_size: int) -> FleetWorkloadResult:
    """runs: of each policy, the first being the one that times are compared with."""
    base = next(iter(runs.values()))
    workload = base[0].workload
    arms = tuple(_arm(policy, each, base, page_size) for policy, each in runs.items())
    return FleetWorkloadResult(workload=workload.name, title=workload.title, about=workload.about, arms=arms)


def _arm(policy: str, runs: Runs, base: Runs, page_size: int) -> FleetArm:
    need = [sum(required(run.workload.submissions, page_size).values()) for run in runs]
    computed = [run.tokens("prompt") - run.tokens("reused") for run in runs]
    migrations = [run.moved("migrations") for run in runs]

    def timed(pick: Callable[[FleetRun], float | None]) -> Timed:
        return _timed([pick(run) for run in runs], [pick(run) for run in base])

    return FleetArm(
        policy=policy,
        requests=len(runs[0].played.records),
        prompt_tokens=tuple(run.tokens("prompt") for run in runs),
        reused_tokens=tuple(run.tokens("reused") for run in runs),
        computed_tokens=tuple(computed),
        required_tokens=tuple(need),
        duplication=tuple(
            None if run.lost or run.workload.kills else found / least
            for run, found, least in zip(runs, computed, need, strict=True)
        ),
        copied_tokens=tuple(run.moved("copied_tokens") or 0 for run in runs),
        by_worker=tuple(run.requests() for run in runs),
        lost=tuple(run.lost for run in runs),
        retries=tuple(run.moved("retries") or 0 for run in runs),
        migrations=None if None in migrations else tuple(m for m in migrations if m is not None),
        mean_ttft_s=timed(lambda run: _over(run, "ttft_s", fmean)),
        p95_ttft_s=timed(lambda run: _over(run, "ttft_s", p95)),
        slowest_s=timed(lambda run: _over(run, "completion_s", max)),
        makespan_s=timed(lambda run: run.played.makespan_s),
    )


def p95(values: Sequence[float]) -> float:
    """By nearest rank."""
    return sorted(values)[ceil(0.95 * len(values)) - 1]


def _over(run: FleetRun, name: str, take: Callable[[list[float]], float]) -> float | None:
    values = [getattr(record, name) for record in run.played.records if not record.lost]
    return take(values) if values else None


def _timed(values: Sequence[float | None], base: Sequence[float | None]) -> Timed:
    ratios = [a / b if a is not None and b else None for a, b in zip(values, base, strict=True)]
    known, compared = [v for v in values if v is not None], [r for r in ratios if r is not None]
    return Timed(
        runs=tuple(values), mean=fmean(known) if known else None, ratios=tuple(ratios),
        ratio=median(compared) if compared else None,
    )  # fmt: skip


def _total(value: Any) -> int:
    """A counter, the sum of one with labels, or of migrations those that went on."""
    if isinstance(value, list):
        return sum(each["count"] for each in value if each["outcome"] == "resumed")
    return int(sum(value.values()) if isinstance(value, Mapping) else value)
