"""From finished runs to an `ExperimentResult`. Owns: gathering what a plan's runs left.

Rules:
1. Figures and verdicts are made in assess.py. Here it is only decided which run belongs where, and how
   settings are written for readers.
2. A setting that has the same value in every run is listed as fixed, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import polars as pl

from hotprefix import __version__
from hotprefix.cost.model import CostModel, ErrorOf
from hotprefix.lab.basis import SCHEDULER, modelled
from hotprefix.lab.experiment.assess import Compared, assess, judge
from hotprefix.lab.experiment.bounds import shares
from hotprefix.lab.experiment.finished_runs import RunStore
from hotprefix.lab.experiment.looks import Look
from hotprefix.lab.experiment.result import (
    Arm,
    Condition,
    CostLabel,
    ExperimentResult,
    FleetRun,
    Problem,
    Provenance,
    Share,
)
from hotprefix.lab.experiment.run_plan import Place, Plan
from hotprefix.lab.experiment.spec import Variant
from hotprefix.lab.experiment.task import ReplayTask
from hotprefix.lab.experiment.trace_source import Survey
from hotprefix.lab.experiment.variants import arms
from hotprefix.lab.paired_sections import Run
from hotprefix.lab.sim.arrivals import Loop


def collect(plan: Plan, store: RunStore, *, command: str) -> ExperimentResult:
    """The result of the finished runs; runs without a result are listed as problems. command: the command
    line that repeats the experiment."""
    experiment = plan.experiment
    first = next(iter(plan.runs.values()))[0]
    slo = experiment.slo.build()
    hypotheses = [one.build(experiment.baseline) for one in experiment.hypotheses]
    taken = taken_looks(plan, store)
    last = taken[-1].seeds
    runs = finished_runs(plan, store, last)
    found = assess(
        runs, hypotheses, baseline=experiment.baseline, slo=slo, window_s=first.settings.window_s,
        looks=taken,
    )  # fmt: skip
    verdicts = tuple(v if plan.seeded else replace(v, would_decide=None) for v in found.verdicts)
    return ExperimentResult(
        name=experiment.name,
        question=experiment.question,
        spec_hash=plan.identity,
        version=__version__,
        command=command,
        fixed=_fixed(plan),
        conditions=tuple(_condition(plan, variant) for variant in experiment.conditions),
        arms=tuple(Arm(v.name, v.about, _texts(v.set)) for v in arms(experiment)),
        baseline=experiment.baseline,
        seeds=tuple(sorted({task.seed for task in plan.until(last)})),
        slo=slo,
        metrics=found.metrics,
        comparisons=found.comparisons,
        verdicts=verdicts,
        buckets=found.buckets,
        windows=found.windows,
        trace=_provenance(plan.surveys[experiment.conditions[0].name], first),
        cost=cost_label(first.cost),
        looks=taken,
        bounds=tuple(_bounds(plan, store, last)),
        fleets=_fleets(plan, store, last),
        problems=tuple(_problems(plan, store, last)),
    )


def taken_looks(plan: Plan, store: RunStore) -> tuple[Look, ...]:
    """The looks that count: up to the first at which no claim is open, or else up to the last whose runs have
    all been tried; at least the first. Runs of further seeds, which another experiment left in the folder,
    change nothing."""
    taken = []
    for look in plan.looks:
        if not all(store.finished(t.key) or store.failure(t.key) for t in plan.until(look.seeds)):
            break
        taken.append(look)
        if look is not plan.looks[-1] and not undecided(plan, store, look):
            break
    return tuple(taken) or plan.looks[:1]


def finished_runs(plan: Plan, store: RunStore, seeds: int) -> dict[Place, list[Run]]:
    """The runs that have a result, of seeds 1 to `seeds`."""
    return {
        place: [_run(store, task) for task in some if task.seed <= seeds and store.finished(task.key)]
        for place, some in plan.runs.items()
    }


def undecided(plan: Plan, store: RunStore, look: Look) -> bool:
    """Whether a claim is still open with the runs of this look."""
    experiment = plan.experiment
    runs = finished_runs(plan, store, look.seeds)
    window_s = next(iter(plan.runs.values()))[0].settings.window_s
    compared = Compared(runs, experiment.slo.build(), window_s)
    past = [one for one in plan.looks if one.seeds <= look.seeds]
    hypotheses = [one.build(experiment.baseline) for one in experiment.hypotheses]
    return any(not judge(compared, one, past).settled for one in hypotheses)


def write_requests(plan: Plan, store: RunStore, path: Path, *, seeds: int) -> None:
    """Write one Parquet file with the request rows of every finished run of seeds 1 to `seeds`, with
    condition, arm and seed before them. It is streamed, so it never has to fit in memory."""
    frames = [
        store.scan(task.key, "requests").select(
            pl.lit(condition).alias("condition"), pl.lit(arm).alias("arm"), pl.lit(task.seed).alias("seed"),
            pl.all(),
        )
        for (condition, arm), some in plan.runs.items() for task in some
        if task.seed <= seeds and store.finished(task.key)
    ]  # fmt: skip
    if not frames:
        return
    part = path.with_name(f".{path.name}.part")
    pl.concat(frames).sink_parquet(part, metadata={"hotprefix.experiment": plan.identity})
    part.replace(path)


def _run(store: RunStore, task: ReplayTask) -> Run:
    tables = {name: store.scan(task.key, name).collect() for name in ("requests", "windows", "links")}
    closed, load = task.loop is Loop.CLOSED, task.settings.load
    models = modelled(
        task.kernel, task.cost, run=task.key, instances=task.settings.cluster.instances,
        arrivals_vary=closed and load.horizon_s is not None, horizon=load.horizon_s is not None,
    )  # fmt: skip
    windows = tables["windows"]
    if SCHEDULER not in models:
        windows = windows.with_columns(scheduler_s=pl.lit(None, pl.Float64))
    return Run(
        task.seed, tables["requests"], windows, tables["links"], task.kernel.page_size,
        store.facts(task.key)["virtual_s"], models,
    )  # fmt: skip


def _fleets(plan: Plan, store: RunStore, seeds: int) -> dict[Place, tuple[FleetRun, ...]]:
    """The fleet tables of the finished runs with several instances, unread."""
    found = {
        place: tuple(
            FleetRun(task.seed, store.scan(task.key, "routes"), store.scan(task.key, "loads"))
            for task in some if task.seed <= seeds and store.finished(task.key)
        )
        for place, some in plan.runs.items() if some[0].settings.cluster.instances > 1
    }  # fmt: skip
    return {place: runs for place, runs in found.items() if runs}


def _problems(plan: Plan, store: RunStore, seeds: int) -> list[Problem]:
    found = []
    for (condition, arm), some in plan.runs.items():
        for task in some:
            if task.seed <= seeds and not store.finished(task.key):
                failure = store.failure(task.key)
                kind, text = ("failed", failure.error) if failure else ("skipped", "it was not run")
                found.append(Problem(condition, arm, task.seed, kind, text))
    return found


def _condition(plan: Plan, variant: Variant) -> Condition:
    """A condition for readers. It has a capacity only if every arm has the same one in it."""
    configs = [some[0].kernel for (condition, _), some in plan.runs.items() if condition == variant.name]
    tokens = {config.total_pages * config.page_size for config in configs}
    capacity = tokens.pop() if len(tokens) == 1 else None
    return Condition(variant.name, variant.about, _texts(variant.set), capacity)


def _bounds(plan: Plan, store: RunStore, seeds: int) -> Iterator[Share]:
    """The clairvoyant bounds. Totals and bound are the baseline's, as means over its seeds. What an arm
    reused is its share of its own bound, in tokens of the baseline's bound (see bounds.py).

    Example: the baseline's bound is 1000 tokens. An arm that reused 540 of its own 900 has the share 0.6 and
    is shown with 600.
    """
    for condition in plan.experiment.conditions:
        facts = {
            arm: [
                store.facts(task.key)["bound"]
                for task in some
                if task.bound and task.seed <= seeds and store.finished(task.key)
            ]
            for (name, arm), some in plan.runs.items()
            if name == condition.name
        }
        base = facts[plan.experiment.baseline]
        capacity = _condition(plan, condition).capacity_tokens
        if base and capacity is not None:
            most = sum(one["clairvoyant_tokens"] for one in base) / len(base)
            total = sum(one["total_tokens"] for one in base) / len(base)
            reused = {arm: share * most for arm, share in shares(facts).items()}
            yield Share(condition.name, capacity, round(total), most, reused)


def _fixed(plan: Plan) -> dict[str, str]:
    every = [_resolved(some[0]) for some in plan.runs.values()]
    fixed = {key: value for key, value in every[0].items() if all(one.get(key) == value for one in every)}
    seeds = " or ".join(str(look.seeds) for look in plan.looks)
    return fixed | {"seeds": seeds}


def _resolved(task: ReplayTask) -> dict[str, str]:
    """Every setting of a run by its dotted key."""
    chosen = task.settings
    values = {
        "trace": chosen.trace.model_dump(exclude_defaults=True),
        "load": {**chosen.load.model_dump(exclude_none=True), "loop": task.loop},
        "cluster": chosen.cluster.model_dump(),
        "kernel": asdict(task.kernel),
        "cost": task.cost.name,
        "window_s": chosen.window_s,
    }
    return _texts(values)


def _texts(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _texts(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = _text(value)
    return found


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, StrEnum):
        return value.value
    return f"{value:g}" if isinstance(value, float) else str(value)


def _provenance(found: Survey, task: ReplayTask) -> Provenance:
    told = found.info
    return Provenance(
        name=told.name, source=told.source, requests=told.requests, input_tokens=told.input_tokens,
        output_tokens=told.output_tokens, block_size=told.block_size or 0,
        ideal_reuse_share=told.ideal_reuse_share, loop=task.loop, notes=told.notes,
    )  # fmt: skip


def cost_label(cost: CostModel) -> CostLabel:
    """The part of the honesty label that describes the cost model."""
    errors: dict[str, tuple[float, float]] = {}
    notes: tuple[str, ...] = ()
    if cost.fit is not None:
        parts = {name: getattr(cost.fit, name) for name in ("overall", "prefill", "decode", "mixed")}
        errors = {k: (v.median, v.p95) for k, v in parts.items() if isinstance(v, ErrorOf)}
        notes = (f"errors by {cost.fit.method}; bias {cost.fit.bias:+.1%}",)
    return CostLabel(cost.name, cost.source, cost.hardware, f"{cost.model}, {cost.dtype}", errors, notes)
