"""Arms and conditions. Owns: which there are, and the settings each pair runs with.

Rules:
1. An arm is applied after its condition. Both only set keys of the settings.
2. Two arms may set the same (A/A). They are one run, told twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hotprefix.errors import ConfigError, InputError
from hotprefix.fleet.config import FleetConfig, Homes, PlanConfig, Term
from hotprefix.kernel.config import KernelConfig, TierConfig
from hotprefix.lab.experiment.explain import explain, nearest
from hotprefix.lab.experiment.settings import Settings
from hotprefix.lab.experiment.spec import Experiment, HypothesisSpec, Variant
from hotprefix.lab.sim.replay import Routing

_KERNEL = TypeAdapter(KernelConfig)
_KERNEL_KEYS = frozenset(KernelConfig.__dataclass_fields__) - {"total_pages"}
_FLEET = TypeAdapter(FleetConfig)
_FLEET_KEYS = frozenset(FleetConfig.__dataclass_fields__) - {"policy", "terms", "page_size"}


def arms(experiment: Experiment) -> tuple[Variant, ...]:
    """The arms listed, or every combination of the factors' levels."""
    if experiment.arms:
        return experiment.arms
    keys = list(experiment.factors)
    combinations = product(*experiment.factors.values())
    return tuple(
        Variant(name="+".join(str(level) for level in levels), set=dict(zip(keys, levels, strict=True)))
        for levels in combinations
    )


def settings(experiment: Experiment, condition: Variant, arm: Variant) -> Settings:
    """The settings with which an arm runs in a condition. Raises InputError."""
    raw = experiment.settings.model_dump(exclude_unset=True)
    for key, value in (*condition.set.items(), *arm.set.items()):
        put(raw, key, value)
    where = f"condition {condition.name!r}, arm {arm.name!r}"
    try:
        found = Settings.model_validate(raw)
    except ValidationError as error:
        raise InputError(f"{where}: {explain(error, Settings)}", param="set") from error
    try:
        kernel(found, total_pages=1, page_size=1)
        routing(found)
    except InputError as error:
        raise InputError(f"{where}: {error.message}", param=error.param) from None
    return found


def kernel(settings: Settings, *, total_pages: int, page_size: int) -> KernelConfig:
    """The kernel's configuration. page_size: taken if the settings give none. Raises ConfigError."""
    if "total_pages" in settings.kernel:
        raise ConfigError(
            "kernel.total_pages: no such key; capacity gives it: remove it", param="kernel.total_pages"
        )
    _known("kernel", settings.kernel, _KERNEL_KEYS)
    _known("kernel.tiers", settings.kernel.get("tiers"), frozenset(TierConfig.__dataclass_fields__))
    try:
        return _KERNEL.validate_python(
            {"page_size": page_size, **settings.kernel, "total_pages": total_pages}
        )
    except (ValidationError, ConfigError) as error:
        raise _explained("kernel", error) from error


def routing(settings: Settings) -> Routing:
    """How requests reach instances; the replay gives the fleet's page size. New sessions take the instances
    by turns if nothing else is said. Raises ConfigError."""
    cluster = settings.cluster
    _known("cluster.fleet", cluster.fleet, _FLEET_KEYS)
    _known("cluster.fleet.plan", cluster.fleet.get("plan"), frozenset(PlanConfig.__dataclass_fields__))
    terms = frozenset(term for term in Term if getattr(cluster.terms, term))
    given = {"homes": Homes.TURNS, **cluster.fleet, "policy": cluster.policy, "terms": terms}
    try:
        fleet = _FLEET.validate_python(given)
    except (ValidationError, ConfigError) as error:
        raise _explained("cluster.fleet", error) from error
    return Routing(fleet, cluster.report_every_s, cluster.staleness_s, cluster.lost_events)


def _known(section: str, given: Any, keys: frozenset[str]) -> None:
    """Raise ConfigError if a section has a key that does not exist. given: the section, if it is one."""
    if isinstance(given, dict) and (unknown := given.keys() - keys):
        key = min(unknown)
        raise ConfigError(f"{section}.{key}: no such key; {nearest(key, keys)}", param=f"{section}.{key}")


def _explained(section: str, error: ValidationError | ConfigError) -> ConfigError:
    """The error with the section in which its field stands."""
    if isinstance(error, ConfigError):
        param = f"{section}.{error.param}" if error.param else section
        return ConfigError(f"{section}.{error.message}", param=param)
    first = error.errors()[0]
    field = ".".join((section, *map(str, first["loc"])))
    reason = first["msg"].removeprefix("Input should be ")
    return ConfigError(f"{field}={first['input']!r}: give {reason}", param=field)


def check(experiment: Experiment) -> None:
    """Check what one part of a file says about another. Raises InputError."""
    if bool(experiment.arms) == bool(experiment.factors):
        raise InputError(
            "arms, factors: give one of them (a list of arms, or factors to combine)", param="arms"
        )
    names = [arm.name for arm in arms(experiment)]
    for kind, found in (("arms", names), ("conditions", [c.name for c in experiment.conditions])):
        twice = {name for name in found if found.count(name) > 1}
        if twice:
            raise InputError(
                f"{kind}: {min(twice)!r} stands there twice; give each a name of its own", param=kind
            )
    if experiment.baseline not in names:
        raise InputError(
            f"baseline={experiment.baseline!r}: no such arm; {nearest(experiment.baseline, names)}",
            param="baseline",
        )
    for condition in experiment.conditions:
        for arm in arms(experiment):
            settings(experiment, condition, arm)
    experiment.slo.build()
    for one in experiment.hypotheses:
        _check_hypothesis(one, experiment.baseline, names, [c.name for c in experiment.conditions])


def _check_hypothesis(
    one: HypothesisSpec, baseline: str, arms: Sequence[str], conditions: Sequence[str]
) -> None:
    where = f"hypothesis {one.id!r}"
    for field, name, known in (
        ("arm", one.arm, arms),
        ("baseline", one.baseline or baseline, arms),
        ("condition", one.condition, conditions),
    ):
        if name not in known:
            raise InputError(f"{where}: {field}={name!r}: there is none; {nearest(name, known)}", param=field)
    try:
        one.build(baseline)
    except ConfigError as error:
        text = error.message if error.message.startswith("hypothesis") else f"{where}: {error.message}"
        raise InputError(text, param=error.param) from None


def put(table: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, and make the sections that lead to it. Raises InputError if one of these is a
    value."""
    *way, last = key.split(".")
    for part in way:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise InputError(f"{key}: {part} is a value, not a section", param=key)
    table[last] = value
