"""The bench's result as data. Owns: the schema of `summary.json` and the arithmetic from runs to it.

Rules: every figure keeps its runs. sd is the sample standard deviation (null for one run). JSON has null for
what was not measured, never NaN or Infinity. `Summary.model_json_schema()` is the documented schema. Units:
tokens, seconds; a change is (arm - baseline) / baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

from pydantic import BaseModel, ConfigDict, Field

from hotprefix.bench.arms import Arm
from hotprefix.bench.request_costs import Counts, Record, Timings, counts, required, timings
from hotprefix.bench.workloads import Workload

SCHEMA = 1


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Figure(_Frozen):
    """One measured quantity over the runs."""

    runs: tuple[float, ...]
    mean: float
    sd: float | None = Field(description="sample standard deviation; null for a single run")
    change: float | None = Field(description="relative change of the mean against the baseline arm")


class CountFigures(_Frozen):
    """Tokens. They follow from policy alone; `stable` says that every run gave the same."""

    requests: int
    prompt_tokens: int
    restored_tokens: tuple[int, ...] = Field(description="prompt tokens taken from the cache, per run")
    computed_tokens: tuple[int, ...] = Field(description="prompt tokens run through the model, per run")
    required_tokens: int = Field(description="what perfect sharing without a cache limit computes")
    duplication_factor: float | None = Field(description="computed / required, mean of the runs")
    restored_per_follower: float | None = Field(description="null where the group has no followers")
    restored_each: tuple[int, ...] = Field(description="per follower in submission order, first run")
    same_outputs: int = Field(description="requests whose outputs equal the baseline arm's, first run")
    stable: bool


class TimingFigures(_Frozen):
    """Seconds; TTFT and completion from a request's own submission, makespan from the barrier."""

    mean_ttft_s: Figure
    max_ttft_s: Figure
    slowest_completion_s: Figure
    makespan_s: Figure


class ArmResult(_Frozen):
    arm: str
    publication: str | None = Field(description="null for the arm without a prefix cache")
    flight: str | None
    counts: CountFigures
    timings: TimingFigures


class GroupResult(_Frozen):
    """Requests reported together: a wave, a probe or a cycle."""

    group: str
    arms: tuple[ArmResult, ...]


class WorkloadResult(_Frozen):
    workload: str
    title: str
    about: str
    baseline: str
    cache_pages: int
    groups: tuple[GroupResult, ...]


class Setup(_Frozen):
    """What was measured, on what, with what."""

    hotprefix: str
    started: str = Field(description="UTC, ISO 8601")
    model: str
    dtype: str
    device: str
    versions: dict[str, str]
    machine: str
    cpus: int
    load_before: float | None = Field(description="1-minute load average before the first run")
    page_size: int
    max_batched_tokens: int
    runs: int
    quick: bool
    wall_s: float


class Summary(_Frozen):
    schema_version: int = SCHEMA
    setup: Setup
    workloads: tuple[WorkloadResult, ...]


Runs = Sequence[Sequence[Record]]  # [run][request]


def summarise(
    workload: Workload, runs: Mapping[Arm, Runs], baseline: Arm, page_size: int, pages: int
) -> WorkloadResult:
    """The result of one workload. runs: the records of every arm, the baseline among them."""
    need = required(workload.submissions, page_size)
    groups = []
    for group in workload.groups:
        picked = {
            arm: [[r for r in run if r.submission.group == group] for run in arm_runs]
            for arm, arm_runs in runs.items()
        }
        base = picked[baseline]
        groups.append(GroupResult(group=group, arms=tuple(_arm(a, r, base, need) for a, r in picked.items())))
    return WorkloadResult(
        workload=workload.name,
        title=workload.title,
        about=workload.about,
        baseline=baseline.name,
        cache_pages=pages,
        groups=tuple(groups),
    )


def _arm(arm: Arm, runs: Runs, base: Runs, need: Mapping[str, int]) -> ArmResult:
    return ArmResult(
        arm=arm.name,
        publication=arm.publication if arm.prefix_cache else None,
        flight=arm.flight if arm.prefix_cache else None,
        counts=_counts(runs, base, need),
        timings=_timings([timings(r) for r in runs], [timings(r) for r in base]),
    )


def _counts(runs: Runs, base: Runs, need: Mapping[str, int]) -> CountFigures:
    per_run: list[Counts] = [counts(r, need) for r in runs]
    first = per_run[0]
    return CountFigures(
        requests=first.requests,
        prompt_tokens=first.prompt,
        restored_tokens=tuple(c.restored for c in per_run),
        computed_tokens=tuple(c.computed for c in per_run),
        required_tokens=first.required,
        duplication_factor=fmean(c.duplication for c in per_run),
        restored_per_follower=first.restored_per_follower,
        restored_each=first.restored_each,
        same_outputs=sum(a.outputs == b.outputs for a, b in zip(runs[0], base[0], strict=True)),
        stable=all(c == first for c in per_run),
    )


def _timings(runs: Sequence[Timings], base: Sequence[Timings]) -> TimingFigures:
    def figure(pick: Callable[[Timings], float]) -> Figure:
        return _figure([pick(t) for t in runs], [pick(t) for t in base])

    return TimingFigures(
        mean_ttft_s=figure(lambda t: t.mean_ttft),
        max_ttft_s=figure(lambda t: t.max_ttft),
        slowest_completion_s=figure(lambda t: t.slowest_completion),
        makespan_s=figure(lambda t: t.makespan),
    )


def _figure(values: Sequence[float], base: Sequence[float]) -> Figure:
    mean, reference = fmean(values), fmean(base)
    return Figure(
        runs=tuple(values),
        mean=mean,
        sd=stdev(values) if len(values) > 1 else None,
        change=(mean - reference) / reference if reference > 0 else None,
    )
