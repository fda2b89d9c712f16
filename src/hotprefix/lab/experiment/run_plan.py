"""From an experiment to the runs it takes. Owns: `Plan`, and the hashes.

Rules:
1. A run's key is the SHA-256 over its resolved settings, the trace's identity, the cost model, the seed and
   hotprefix' version. Nothing is left to the defaults of another version.
2. The experiment's hash covers the keys of its runs and how they are judged.
3. If nothing depends on the seed there is one run, not many equal ones that would look like evidence.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from hotprefix import __version__
from hotprefix.cost.model import CostModel
from hotprefix.cost.presets import load_cost
from hotprefix.errors import ConfigError
from hotprefix.fleet.config import RoutingPolicy
from hotprefix.kernel.config import KernelConfig
from hotprefix.lab.experiment.bounds import check_bound
from hotprefix.lab.experiment.looks import Look, looks
from hotprefix.lab.experiment.settings import Settings
from hotprefix.lab.experiment.spec import Experiment
from hotprefix.lab.experiment.task import ReplayTask
from hotprefix.lab.experiment.trace_source import Survey, identity, open_workload, survey
from hotprefix.lab.experiment.variants import arms, kernel, routing, settings
from hotprefix.lab.sim.arrivals import Loop
from hotprefix.lab.sim.replay import Routing, Worker

PAGE_SIZE = 16  # if a trace has no blocks
MOST_PAGES = 1 << 24  # of all instances' L1: a replay keeps about 40 bytes for each
_JUDGED = {"name", "question", "baseline", "slo", "hypotheses", "bound", "seeds", "until_decided"}
Place = tuple[str, str]  # condition, arm


@dataclass(frozen=True, slots=True)
class Plan:
    """An experiment and the runs that it takes.

    identity: the experiment's hash.
    runs: those of each (condition, arm) in the order of seeds, as many as may be needed.
    surveys: of each condition's trace, with the first seed.
    looks: when runs are looked at.
    """

    experiment: Experiment
    identity: str
    runs: dict[Place, tuple[ReplayTask, ...]]
    surveys: dict[str, Survey]
    looks: tuple[Look, ...]

    @property
    def tasks(self) -> list[ReplayTask]:
        """Each run once; arms may share runs."""
        return self.until(self.looks[-1].seeds)

    def until(self, seeds: int) -> list[ReplayTask]:
        """The runs of seeds 1 to `seeds`, each once."""
        found = {t.key: t for some in self.runs.values() for t in some if t.seed <= seeds}
        return list(found.values())

    @property
    def seeded(self) -> bool:
        """Whether more seeds are more evidence, in any condition."""
        return any(depends_on_seed(some[0].settings, some[0].loop) for some in self.runs.values())


def plan(experiment: Experiment) -> Plan:
    """Read what the experiment names (trace, cost model) and resolve every run. Raises InputError."""
    known = _Known()
    runs: dict[Place, tuple[ReplayTask, ...]] = {}
    surveys: dict[str, Survey] = {}
    for condition in experiment.conditions:
        for arm in arms(experiment):
            chosen = settings(experiment, condition, arm)
            surveys.setdefault(condition.name, known.survey(chosen))
            if not known.closed(chosen):
                _check_open(experiment, condition.name, condition.set | arm.set)
            runs[condition.name, arm.name] = _runs(chosen, known, experiment)
    found = Plan(experiment, _experiment_hash(experiment, runs), runs, surveys, looks(1, None))
    until = experiment.until_decided if found.seeded else None
    return replace(found, looks=looks(experiment.seeds if found.seeded else 1, until))


class _Known:
    """What was read once, so that it is not read again for the next arm."""

    def __init__(self) -> None:
        self._surveys: dict[str, Survey] = {}
        self._identities: dict[str, dict[str, Any]] = {}
        self._costs: dict[str, CostModel] = {}

    def survey(self, chosen: Settings) -> Survey:
        key = chosen.trace.model_dump_json() + chosen.load.loop
        if key not in self._surveys:
            self._surveys[key] = survey(open_workload(chosen.trace, chosen.load, seed=1))
        return self._surveys[key]

    def closed(self, chosen: Settings) -> bool:
        """Whether a run's loop is closed; for `auto` that depends on its trace."""
        loop = chosen.load.loop
        return self.survey(chosen).info.has_sessions if loop == "auto" else loop == "closed"

    def identity(self, chosen: Settings) -> dict[str, Any]:
        key = chosen.trace.model_dump_json()
        if key not in self._identities:
            self._identities[key] = identity(chosen.trace)
        return self._identities[key]

    def cost(self, name: str) -> CostModel:
        if name not in self._costs:
            self._costs[name] = load_cost(name)
        return self._costs[name]


def _runs(chosen: Settings, known: _Known, experiment: Experiment) -> tuple[ReplayTask, ...]:
    found = known.survey(chosen)
    config = _kernel(chosen, found)
    loop = Loop.CLOSED if known.closed(chosen) else Loop.OPEN
    cost, trace = known.cost(chosen.cost), known.identity(chosen)
    if experiment.bound:
        check_bound(config, found.info.block_size or PAGE_SIZE, chosen.load.warm_up)
    workers, told = _workers(chosen, config, known), routing(chosen)
    most = experiment.until_decided or experiment.seeds
    seeds = most if depends_on_seed(chosen, loop) else 1
    what = {**_identity(chosen, config, cost, workers, told, loop, trace), "bound": experiment.bound}
    tasks = tuple(
        ReplayTask(
            _hash({**what, "seed": seed}), chosen, config, cost, workers, told, loop, seed, experiment.bound
        )
        for seed in range(1, seeds + 1)
    )
    tasks[0].replay()  # what contradicts itself is refused before anything runs
    return tasks


def _check_open(experiment: Experiment, condition: str, varied: dict[str, Any]) -> None:
    """Raises ConfigError if an experiment is about sessions and its trace has none."""
    if varied.get("load.concurrency") is not None:
        raise ConfigError(
            f"{experiment.name}: condition {condition!r} sets load.concurrency, sessions alive at a time, "
            "and in open loop there is no such thing: give a trace with sessions (docs/traces.md)",
            param="load.concurrency",
        )


def depends_on_seed(chosen: Settings, loop: Loop) -> bool:
    """Whether a run depends on its seed. It does with a generated trace, with Poisson starts of sessions,
    with a limited number of sessions at a time, because the seed decides their order, with a policy that
    draws, and with lost events."""
    load, cluster = chosen.load, chosen.cluster
    drawn = chosen.trace.generate is not None or load.session_rate is not None
    drawn = drawn or cluster.policy in (RoutingPolicy.RANDOM, RoutingPolicy.PLAN) or cluster.lost_events > 0
    return drawn or (loop is Loop.CLOSED and load.concurrency is not None)


def _kernel(chosen: Settings, found: Survey) -> KernelConfig:
    """The kernel's configuration. Its total_pages are the whole pages that fit, at least one. Raises
    ConfigError."""
    size, unit = chosen.capacity.size, chosen.capacity.unit
    block = found.info.block_size or PAGE_SIZE
    page = kernel(chosen, total_pages=1, page_size=block).page_size
    tokens = {"pages": size * page, "tokens": size, "sessions": size * found.session_tokens}[unit]
    instances = chosen.cluster.instances
    if tokens * instances > MOST_PAGES * page:
        each = f", on each of {instances} instances" if instances > 1 else ""
        raise ConfigError(
            f"capacity.size={size:g} {unit} is {tokens / page:.3g} pages of {page} tokens{each}: give at "
            f"most {MOST_PAGES:,} pages ({MOST_PAGES * page:,} tokens){' together' if each else ''}",
            param="capacity.size",
        )
    return kernel(chosen, total_pages=max(1, int(tokens // page)), page_size=block)


def _workers(chosen: Settings, config: KernelConfig, known: _Known) -> tuple[Worker, ...]:
    """What each instance has of its own, group by group. An L1 has at least one page."""
    cluster, found = chosen.cluster, list[Worker]()
    if not cluster.workers and cluster.requests_per_s is not None:
        return (Worker(capacity=cluster.requests_per_s),) * cluster.instances
    for some in cluster.workers:
        cost = known.cost(some.cost or chosen.cost)
        own = Worker(
            cost.scaled(1 / some.speed) if some.speed != 1 else cost,
            max(1, int(config.total_pages * some.capacity)),
            some.requests_per_s or cluster.requests_per_s,
        )
        found += [own] * some.count
    return tuple(found)


def _identity(
    chosen: Settings, config: KernelConfig, cost: CostModel, workers: tuple[Worker, ...],
    told: Routing, loop: Loop, trace: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Everything that decides a run's result, except the seed."""
    return {
        "version": __version__,
        "trace": trace,
        "load": {**chosen.load.model_dump(), "loop": loop},
        "cluster": chosen.cluster.model_dump(mode="json"),
        "fleet": {**asdict(told.fleet), "terms": sorted(told.fleet.terms)},
        "workers": [one.cost.model_dump(mode="json") for one in workers if one.cost is not None],
        "kernel": asdict(config),
        "cost": cost.model_dump(mode="json"),
        "window_s": chosen.window_s,
    }


def _experiment_hash(experiment: Experiment, runs: dict[Place, tuple[ReplayTask, ...]]) -> str:
    judged = experiment.model_dump(include=_JUDGED)
    keys = {json.dumps(place): [task.key for task in some] for place, some in runs.items()}
    return _hash({"version": __version__, "runs": keys, **judged})


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
