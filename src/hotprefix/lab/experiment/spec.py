"""What an experiment file may say. Owns: `Experiment` and its parts, validated and frozen.

Rules:
1. *Settings* are everything that decides a run. Arms are the policies that are compared, and conditions the
   circumstances in which they are.
2. Arms and conditions set dotted keys of those same settings ("kernel.refresh"). So whatever can be fixed can
   be varied.
3. A key that does not exist is refused, never ignored.

Units: tokens, seconds, requests.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from hotprefix.definitions import Slo
from hotprefix.lab.experiment.settings import Count, Frozen, Positive, Settings
from hotprefix.lab.hypothesis import NO_THRASH, THRASH, Hypothesis, Kind, Need, Tolerance

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$", max_length=80)]
Overrides = dict[str, Any]

NEEDS: Final = {"thrash": THRASH, "no_thrash": NO_THRASH}


class Variant(Frozen):
    """An arm or a condition: a name and what it sets. about: one line for the report."""

    name: Name
    about: str = ""
    set: Overrides = Field(default={})


class SloSpec(Frozen):
    """Objectives, see `Slo`."""

    ttft_s: Positive | None = None
    tpot_s: Positive | None = None
    completion_s: Positive | None = None
    timeout_s: Positive | None = None

    def build(self) -> Slo:
        return Slo(**self.model_dump())


class ToleranceSpec(Frozen):
    """See `Tolerance`."""

    metric: str
    amount: float
    scale: Literal["relative", "difference"] = "relative"


class NeedSpec(Frozen):
    """See `Need`."""

    metric: str
    at_least: float | None = None
    at_most: float | None = None


def _tolerances(given: tuple[ToleranceSpec, ...]) -> tuple[Tolerance, ...]:
    return tuple(Tolerance(one.metric, one.amount, one.scale) for one in given)


class HypothesisSpec(Frozen):
    """See `Hypothesis`.

    why: where the amounts come from.
    baseline: if it is another than the experiment's.
    needs: a list, or a name of NEEDS.
    """

    id: Name
    claim: Annotated[str, Field(min_length=1)]
    why: str = ""
    kind: Kind
    arm: str
    baseline: str | None = None
    condition: str
    improves: tuple[ToleranceSpec, ...] = ()
    reaches: tuple[ToleranceSpec, ...] = ()
    not_worse: tuple[ToleranceSpec, ...] = ()
    equal: tuple[ToleranceSpec, ...] = ()
    needs: Literal["thrash", "no_thrash"] | tuple[NeedSpec, ...] = ()
    confidence: float = 0.95

    def build(self, baseline: str) -> Hypothesis:
        """The hypothesis. baseline: the experiment's. Raises ConfigError."""
        return Hypothesis(
            id=self.id,
            claim=self.claim,
            why=self.why,
            kind=self.kind,
            arm=self.arm,
            baseline=self.baseline or baseline,
            condition=self.condition,
            needs=NEEDS[self.needs]
            if isinstance(self.needs, str)
            else tuple(Need(**n.model_dump()) for n in self.needs),
            confidence=self.confidence,
            improves=_tolerances(self.improves),
            reaches=_tolerances(self.reaches),
            not_worse=_tolerances(self.not_worse),
            equal=_tolerances(self.equal),
        )


class Experiment(Frozen):
    """One experiment file. It has either arms or factors.

    arms: the policies that are compared.
    factors: dotted key -> levels. Every combination of levels is an arm, named by them.
    conditions: the circumstances in which arms are compared.
    baseline: the arm with which the others are compared.
    seeds: how many; the seeds are 1 to that. Every arm sees the same workload for a seed.
    until_decided: go on, up to that many seeds, while a claim is undecided (lab.experiment.looks).
    slo: the objectives.
    hypotheses: what is claimed.
    bound: also compute the clairvoyant bound of each condition's capacity.
    """

    name: Name
    question: Annotated[str, Field(min_length=1)]
    settings: Settings
    arms: tuple[Variant, ...] = ()
    factors: dict[str, Annotated[tuple[str | int | float | bool, ...], Field(min_length=1)]] = Field(
        default={}
    )
    conditions: Annotated[tuple[Variant, ...], Field(min_length=1)] = (Variant(name="all"),)
    baseline: str
    seeds: Count = 3
    until_decided: Count | None = None
    slo: SloSpec = SloSpec()
    hypotheses: tuple[HypothesisSpec, ...] = ()
    bound: bool = False

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.until_decided is not None and self.until_decided < self.seeds:
            raise ValueError(
                f"until_decided={self.until_decided}: less than seeds={self.seeds}, with which it begins; "
                "give at least as many"
            )
        return self
