"""What an experiment file may say. Owns: `Settings`, `Experiment` and their parts, validated and frozen.

Rules: *settings* are everything that decides a run. What is varied are dotted keys over those same settings
("kernel.refresh"): arms are the policies compared, conditions the circumstances they are compared in. So
whatever is fixed here can be varied there. A key that does not exist is refused, never ignored. Units:
tokens, seconds, requests.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hotprefix.lab.hypothesis import NO_THRASH, THRASH, Hypothesis, Kind, Need, Tolerance
from hotprefix.lab.metrics import Slo
from hotprefix.lab.sim.cluster import Route

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$", max_length=80)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Overrides = dict[str, Any]

NEEDS: Final = {"thrash": THRASH, "no_thrash": NO_THRASH}


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TraceSpec(Frozen):
    """Whose requests. source: a trace file or `sample:NAME`; else generate: a generator and its params, which
    makes another trace for every seed. limit: the first so many requests. block_size: where the file does not
    say it, tokens. shared_prefix, answers: what coding-agent files leave open (`Assumed`)."""

    source: str | None = None
    generate: str | None = None
    params: dict[str, Any] = {}
    limit: Count | None = None
    block_size: Count | None = None
    shared_prefix: bool = True
    answers: bool = False

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.source is None) == (self.generate is None):
            raise ValueError("give one of source (a file or sample:NAME) and generate (a generator's name)")
        if self.params and self.generate is None:
            raise ValueError("params belong to generate; a trace file has none: remove them")
        return self


class LoadSpec(Frozen):
    """When they arrive. loop: closed (a session's next turn follows its answer), open (arrivals as
    recorded), auto = closed where the trace has sessions. Closed loop only: concurrency, sessions alive at a
    time; without it they begin as recorded, or session_rate a second (Poisson) where that is not recorded.
    Open loop only: speed, how many times faster than recorded. horizon_s: when the replay stops, finished or
    not; None = when everything has ended. warm_up: the first so many requests fill the caches and are not
    reported."""

    loop: Literal["auto", "open", "closed"] = "auto"
    concurrency: Count | None = None
    session_rate: Positive | None = None
    speed: Positive = 1.0
    horizon_s: Positive | None = None
    warm_up: Annotated[int, Field(ge=0)] = 0


class ClusterSpec(Frozen):
    """How many instances, which of them a request goes to, and the pages of the L3 they share."""

    instances: Count = 1
    storage_pages: Count = 1 << 20
    route: Route = Route.SESSION


class CapacitySpec(Frozen):
    """L1 of one instance. unit: pages, tokens, or sessions = how many sessions fit with their longest context
    (mean over the trace; a request without a session counts as one), so that one file suits any trace."""

    size: Positive
    unit: Literal["pages", "tokens", "sessions"] = "tokens"


class Settings(Frozen):
    """Everything that decides a run, apart from its seed. kernel: any field of `KernelConfig` but
    total_pages, which `capacity` gives; page_size defaults to the trace's block size. cost: preset or
    file. window_s: length of the windows in tables."""

    trace: TraceSpec
    capacity: CapacitySpec
    load: LoadSpec = LoadSpec()
    cluster: ClusterSpec = ClusterSpec()
    kernel: dict[str, Any] = {}
    cost: str
    window_s: Positive = 30.0


class Variant(Frozen):
    """An arm or a condition: a name and what it sets. about: one line for the report."""

    name: Name
    about: str = ""
    set: Overrides = {}


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


class HypothesisSpec(Frozen):
    """See `Hypothesis`. why: where the amounts come from. baseline: where it is not the experiment's. needs:
    a list, or a name of NEEDS."""

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
        """baseline: the experiment's. Raises ConfigError."""
        lists = ("improves", "reaches", "not_worse", "equal")
        checks = {name: tuple(Tolerance(**t.model_dump()) for t in getattr(self, name)) for name in lists}
        return Hypothesis(
            id=self.id,
            claim=f"{self.claim} {self.why}".strip(),
            kind=self.kind,
            arm=self.arm,
            baseline=self.baseline or baseline,
            condition=self.condition,
            needs=NEEDS[self.needs]
            if isinstance(self.needs, str)
            else tuple(Need(**n.model_dump()) for n in self.needs),
            confidence=self.confidence,
            **checks,
        )


class Experiment(Frozen):
    """One file. Either arms, or factors (dotted key: levels) whose every combination is an arm, named by its
    levels. seeds: 1 to so many; every arm sees the same workload for a seed. baseline: the arm the others are
    compared with. bound: also compute the clairvoyant bound of each condition's capacity."""

    name: Name
    question: Annotated[str, Field(min_length=1)]
    settings: Settings
    arms: tuple[Variant, ...] = ()
    factors: dict[str, Annotated[tuple[str | int | float | bool, ...], Field(min_length=1)]] = {}
    conditions: Annotated[tuple[Variant, ...], Field(min_length=1)] = (Variant(name="all"),)
    baseline: str
    seeds: Count = 3
    slo: SloSpec = SloSpec()
    hypotheses: tuple[HypothesisSpec, ...] = ()
    bound: bool = False
