"""What is claimed, before anything runs. Owns: `Hypothesis` and its parts, validated.

Rules (docs/decisions/0012-verdicts.md):
1. A claim names its metrics, and by how much they must change, before the first run. `lab.verdict` only
   applies what stands here.
2. A hypothesis that looks at several metrics divides its error rate among them (Bonferroni).
3. If the baseline does not meet a precondition (`needs`), any verdict is inconclusive.

Kinds:
- mechanism: each metric of `improves` gets better.
- service: the mechanism works (`improves`), and at least one metric of `reaches` gets better too. If none
  does, the gain does not reach service.
- harm: no metric of `not_worse` gets worse by more than its tolerance, and those of `improves`, if any, get
  better.
- null: every metric of `equal` stays within its tolerance. That is the expected result without thrash.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from hotprefix.errors import ConfigError
from hotprefix.lab.metric_names import METRICS, known
from hotprefix.lab.stats import Scale


class Kind(StrEnum):
    MECHANISM = "mechanism"
    SERVICE = "service"
    HARM = "harm"
    NULL = "null"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A metric and an amount. Raises ConfigError.

    amount: the least improvement that matters, or the most harm or difference that is accepted; >= 0.
    scale: `difference` = in the metric's unit, `relative` = as a share of the baseline (0.05 = 5 %).
    """

    metric: str
    amount: float
    scale: Scale = "relative"

    def __post_init__(self) -> None:
        known(self.metric)
        if not (math.isfinite(self.amount) and self.amount >= 0):
            raise ConfigError(f"tolerance of {self.metric}={self.amount!r}: give a number >= 0")
        if self.scale not in ("relative", "difference"):
            raise ConfigError(f"scale of {self.metric}={self.scale!r}: give relative or difference")


@dataclass(frozen=True, slots=True)
class Need:
    """What the baseline must show in every seed before a claim can be judged. Raises ConfigError."""

    metric: str
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        known(self.metric)
        if self.at_least is None and self.at_most is None:
            raise ConfigError(f"need of {self.metric}: give at_least or at_most")


THRASH: Final = (Need("evicted_pages", at_least=1), Need("lost_tokens", at_least=1))
NO_THRASH: Final = (Need("lost_tokens", at_most=0),)

_FIELDS: Final = {
    Kind.MECHANISM: (("improves",), ()),
    Kind.SERVICE: (("improves", "reaches"), ("not_worse",)),
    Kind.HARM: (("not_worse",), ("improves",)),
    Kind.NULL: (("equal",), ()),
}  # kind: (fields that a hypothesis of the kind must have, fields that it may have)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One claim and the rule that decides it. Raises ConfigError.

    id, claim: for people.
    kind: how the checks combine (see the module).
    arm, baseline, condition: names of what is compared.
    improves, reaches, not_worse, equal: the checks.
    needs: preconditions; THRASH, NO_THRASH or your own.
    confidence: of all intervals together.
    why: where the amounts come from, for people.
    """

    id: str
    claim: str
    kind: Kind
    arm: str
    baseline: str
    condition: str
    improves: tuple[Tolerance, ...] = ()
    reaches: tuple[Tolerance, ...] = ()
    not_worse: tuple[Tolerance, ...] = ()
    equal: tuple[Tolerance, ...] = ()
    needs: tuple[Need, ...] = ()
    confidence: float = 0.95
    why: str = ""

    def __post_init__(self) -> None:
        where = f"hypothesis {self.id!r}"
        if not isinstance(self.kind, Kind):
            raise ConfigError(f"{where}: kind={self.kind!r}: give one of {', '.join(Kind)}", param="kind")
        must, may = _FIELDS[self.kind]
        for name in ("improves", "reaches", "not_worse", "equal"):
            given = bool(getattr(self, name))
            if name in must and not given:
                raise ConfigError(f"{where} of kind {self.kind} has no {name}: name at least one metric")
            if given and name not in (*must, *may):
                raise ConfigError(f"{where} of kind {self.kind} does not use {name}: leave it out")
        for one in (*self.improves, *self.reaches, *self.not_worse):
            if METRICS[one.metric].better == "neither":
                raise ConfigError(f"{where}: neither way is better for {one.metric}: use it in equal only")
        if not 0.5 < self.confidence < 1:
            raise ConfigError(f"{where}: confidence={self.confidence!r}: give a share, as 0.95")
        if self.arm == self.baseline:
            raise ConfigError(f"{where}: arm and baseline are both {self.arm!r}: name two")

    @property
    def checks(self) -> int:
        return len(self.improves) + len(self.reaches) + len(self.not_worse) + len(self.equal)

    @property
    def level(self) -> float:
        """The confidence of each single interval (Bonferroni). Example: 2 checks at 0.95 need 0.975 each."""
        return self.level_of(1.0)

    def level_of(self, spend: float) -> float:
        """The same for a look at the data that may use only the share `spend` of the error rate."""
        return 1 - (1 - self.confidence) * spend / self.checks
