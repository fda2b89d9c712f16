"""What decides a run. Owns: `Settings` and its sections, validated and frozen.

Rules:
1. Everything that decides a run stands here, except the seed.
2. A key that does not exist is refused, never ignored.

Units: tokens, seconds, requests.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hotprefix.fleet.config import RoutingPolicy

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


class TermsSpec(Frozen):
    """The terms of `predicted`, see `hotprefix.fleet.config.Term`. One that is off is as if its cost were
    0."""

    queue: bool = True
    restore: bool = True
    pull: bool = True
    in_flight: bool = True
    delay: bool = True
    behind: bool = True
    displacement: bool = True


class WorkersSpec(Frozen):
    """Some of the instances, alike.

    count: how many.
    cost: their cost model, a preset's name or a file; None = the experiment's.
    speed: how many times as fast as that their steps are.
    capacity: their L1, as a multiple of the experiment's.
    requests_per_s: what one of them serves, calibrated; None = as the cluster says.
    """

    count: Count = 1
    cost: str | None = None
    speed: Positive = 1.0
    capacity: Positive = 1.0
    requests_per_s: Positive | None = None


class FailureSpec(Frozen):
    """An instance dies and loses all that it has; its requests go elsewhere and begin again.

    worker: its number, from 0 on. at_s: when. back_s: when it is back, cold; None = never.
    """

    worker: Annotated[int, Field(ge=0)]
    at_s: Annotated[float, Field(ge=0)]
    back_s: Positive | None = None


class ClusterSpec(Frozen):
    """The instances, and how requests reach them.

    instances: how many. storage_pages: pages of the L3 that they share.
    workers: groups of instances that differ; empty = all are alike. Their counts add up to `instances`.
    requests_per_s: what one of them serves (`hotprefix calibrate --capacity`), by which loads are compared;
    None = not calibrated. A group of `workers` may have its own.
    policy: how an instance is chosen. terms: the terms of policy `predicted`.
    fleet: any further field of the fleet's configuration (docs/experiments.md).
    report_every_s: how often each instance reports. staleness_s: how late reports and KV events reach the
    fleet. lost_events: share of the batches of events that never do.
    failures: which instances die, and when.
    """

    instances: Annotated[int, Field(ge=1, le=4096)] = 1
    storage_pages: Count = 1 << 20
    workers: tuple[WorkersSpec, ...] = ()
    requests_per_s: Positive | None = None
    policy: RoutingPolicy = RoutingPolicy.SESSION
    terms: TermsSpec = TermsSpec()
    fleet: dict[str, Any] = {}
    report_every_s: Positive = 1.0
    staleness_s: Annotated[float, Field(ge=0)] = 0.0
    lost_events: Annotated[float, Field(ge=0, lt=1)] = 0.0
    failures: tuple[FailureSpec, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and "route" in raw:
            policy = {"least_loaded": "least_requests"}.get(str(raw["route"]), raw["route"])
            raise ValueError(f"cluster.route={raw['route']!r} is cluster.policy={policy!r} now")
        return raw

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        count = sum(some.count for some in self.workers)
        if self.workers and count != self.instances:
            raise ValueError(
                f"cluster.workers are {count} together, and cluster.instances={self.instances}: give as many"
            )
        return self


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
