"""What decides a run. Owns: `Settings` and its sections, validated and frozen.

Rules: everything but the seed stands here. A key that does not exist is refused, never ignored. Units:
tokens, seconds, requests.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hotprefix.lab.sim.cluster import Route

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Frozen(BaseModel):
    # defer_build: a run's process gets its settings pickled and validates nothing
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


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
    recorded), auto = closed where the trace has sessions. Closed loop only (refused in open): concurrency,
    sessions alive at a time; without it they begin as recorded, or session_rate a second (Poisson) where that
    is not recorded. Open loop only (refused in closed): speed, how many times faster than recorded.
    horizon_s: when the replay stops, finished or not; None = when everything has ended. warm_up: the first so
    many requests fill the caches and are not reported."""

    loop: Literal["auto", "open", "closed"] = "auto"
    concurrency: Count | None = None
    session_rate: Positive | None = None
    speed: Positive = 1.0
    horizon_s: Positive | None = None
    warm_up: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _check(self) -> LoadSpec:
        if self.concurrency is not None and self.session_rate is not None:
            raise ValueError("give concurrency or session_rate: either says when a session begins")
        return self


class ClusterSpec(Frozen):
    """How many instances, which of them a request goes to, and the pages of the L3 they share."""

    instances: Annotated[int, Field(ge=1, le=4096)] = 1
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
