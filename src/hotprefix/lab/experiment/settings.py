"""What decides a run. Owns: `Settings` and its sections, validated and frozen.

Rules:
1. Everything that decides a run stands here, except the seed.
2. A key that does not exist is refused, never ignored.

Units: tokens, seconds, requests.
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
    """Which requests are replayed.

    source: a trace file, or `sample:NAME`.
    generate: a generator, in place of `source`; it makes another trace for every seed.
    params: the generator's.
    limit: only the first requests, that many; None = all.
    block_size: tokens of a block, if the file does not say it.
    shared_prefix, answers: what coding-agent files leave open (`Assumed`).
    """

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
    """When the requests arrive.

    loop: `closed` (a session's next request follows the answer to its last), `open` (arrivals as recorded),
    or `auto` (closed if the trace has sessions).
    concurrency: closed loop only, refused in open: how many sessions are alive at a time. Without it sessions
    begin as recorded.
    session_rate: closed loop only: how many sessions begin a second (Poisson), if their starts are not
    recorded.
    speed: open loop only, refused in closed: how many times faster than recorded.
    horizon_s: when the replay stops, finished or not; None = when everything has ended.
    warm_up: how many requests, the first to arrive, fill the caches and are not reported.
    """

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
    """The instances. instances: how many. storage_pages: pages of the L3 that they share. route: which
    instance a request goes to."""

    instances: Annotated[int, Field(ge=1, le=4096)] = 1
    storage_pages: Count = 1 << 20
    route: Route = Route.SESSION


class CapacitySpec(Frozen):
    """L1 of one instance: `size` of a unit.

    unit: pages, tokens or sessions. A session is its longest context, as the mean over the trace; a request
    without a session counts as one. So one file suits any trace.
    Example: if the longest contexts of sessions are 12000 tokens on average, 4 sessions are 48000 tokens.
    """

    size: Positive
    unit: Literal["pages", "tokens", "sessions"] = "tokens"


class Settings(Frozen):
    """Everything that decides a run, apart from its seed.

    kernel: any field of `KernelConfig` but total_pages, which follows from `capacity`. If page_size is not
    given it is the trace's block size.
    cost: a preset's name, or a file.
    window_s: length of the windows in tables.
    """

    trace: TraceSpec
    capacity: CapacitySpec
    load: LoadSpec = LoadSpec()
    cluster: ClusterSpec = ClusterSpec()
    kernel: dict[str, Any] = {}
    cost: str
    window_s: Positive = 30.0
