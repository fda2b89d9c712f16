"""What one replay holds fixed. Owns: `Replay` and its parts: the instances, and how requests reach them.

Rules: everything is checked here, before anything runs. Times are seconds of the virtual clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from hotprefix.cost.model import CostModel, Links
from hotprefix.errors import ConfigError
from hotprefix.fleet.config import FleetConfig, Homes, RoutingPolicy
from hotprefix.kernel.config import KernelConfig
from hotprefix.lab.sim.arrivals import Loop


@dataclass(frozen=True, slots=True)
class Worker:
    """What one instance has of its own. None: as the replay says.

    cost: its cost model.
    total_pages: its L1.
    capacity: requests a second that it serves, calibrated; None = not calibrated.
    """

    cost: CostModel | None = None
    total_pages: int | None = None
    capacity: float | None = None


@dataclass(frozen=True, slots=True)
class Death:
    """An instance dies and loses all that it has. Its requests go elsewhere and begin again.

    worker: its index. at_s: when. back_s: when it is back, cold; None = never.
    """

    worker: int
    at_s: float
    back_s: float | None = None

    def __post_init__(self) -> None:
        if self.worker < 0:
            raise ConfigError(
                f"cluster.failures.worker={self.worker}: give an index from 0 on", param="cluster.failures"
            )
        if not 0 <= self.at_s < math.inf:
            raise ConfigError(
                f"cluster.failures.at_s={self.at_s}: give a number >= 0", param="cluster.failures"
            )
        if self.back_s is not None and not self.at_s < self.back_s < math.inf:
            raise ConfigError(
                f"cluster.failures.back_s={self.back_s:g}: it died at {self.at_s:g}; give a later time, or "
                "leave it out if it never comes back",
                param="cluster.failures",
            )


@dataclass(frozen=True, slots=True)
class Routing:
    """How requests reach instances, and what the fleet knows of these. Raises ConfigError.

    fleet: the fleet core's configuration; its page_size is that of the kernels.
    report_every_s: how often each instance reports.
    staleness_s: how late reports and events reach the fleet.
    lost_events: share of the batches of events that never do.
    """

    fleet: FleetConfig = field(
        default_factory=lambda: FleetConfig(policy=RoutingPolicy.SESSION, homes=Homes.TURNS)
    )
    report_every_s: float = 1.0
    staleness_s: float = 0.0
    lost_events: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.report_every_s < math.inf:
            raise ConfigError(
                f"cluster.report_every_s={self.report_every_s}: give a number > 0",
                param="cluster.report_every_s",
            )
        if not 0 <= self.staleness_s < math.inf:
            raise ConfigError(
                f"cluster.staleness_s={self.staleness_s}: give a number >= 0", param="cluster.staleness_s"
            )
        if not 0 <= self.lost_events < 1:
            raise ConfigError(
                f"cluster.lost_events={self.lost_events}: give a share from 0 to less than 1",
                param="cluster.lost_events",
            )


@dataclass(frozen=True, slots=True)
class Replay:
    """What one replay holds fixed. Raises ConfigError.

    kernel: the configuration of every instance's kernel.
    cost: the cost model.
    instances: how many.
    workers: what each of them has of its own; empty = nothing.
    routing: how requests reach them.
    deaths: which of them die, and when.
    loop: how arrivals come about.
    concurrency: closed loop: how many sessions are alive at a time; None = they begin as recorded.
    speed: open loop: how many times as fast as recorded.
    horizon_s: when the replay stops; None = when everything has ended. What has not finished by then counts
    as unfinished.
    warm_up: how many requests, the first to arrive, fill the caches and are not reported.
    window_s: length of the windows in the window table.
    links: the links of the tiers below L1; None = the cost model's.
    storage_pages: pages of the shared L3.
    log: the file to which every event is written; None = no log.
    repeats: the most repeats of a plan. The outcome does not depend on it.
    """

    kernel: KernelConfig
    cost: CostModel
    instances: int = 1
    workers: tuple[Worker, ...] = ()
    routing: Routing = field(default_factory=Routing)
    deaths: tuple[Death, ...] = ()
    loop: Loop = Loop.OPEN
    concurrency: int | None = None
    speed: float = 1.0
    horizon_s: float | None = None
    warm_up: int = 0
    window_s: float = 30.0
    links: Links | None = None
    storage_pages: int = 1 << 20
    log: Path | None = None
    repeats: int = 1 << 20

    def __post_init__(self) -> None:
        for name in ("instances", "concurrency", "storage_pages", "repeats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: give a whole number >= 1", param=name)
        for name in ("speed", "window_s", "horizon_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value}: give a number > 0", param=name)
        if self.speed != 1 and self.loop is Loop.CLOSED:
            raise ConfigError(
                f"load.speed={self.speed:g}: in closed loop a turn follows the answer before it, when that "
                "comes; leave it out (load.concurrency makes the load there), or replay in open loop "
                "(load.loop=open)",
                param="load.speed",
            )
        if self.concurrency is not None and self.loop is Loop.OPEN:
            raise ConfigError(
                f"load.concurrency={self.concurrency}: in open loop requests arrive as recorded, however "
                "many sessions that makes; leave it out (--set load.concurrency=; load.speed makes the load "
                "there), or replay in closed loop (load.loop=closed)",
                param="load.concurrency",
            )
        if self.warm_up < 0:
            raise ConfigError(f"warm_up={self.warm_up}: give 0 or more", param="warm_up")
        if self.workers and len(self.workers) != self.instances:
            raise ConfigError(
                f"cluster.workers: they are {len(self.workers)}, and there are {self.instances} instances: "
                "give as many (cluster.instances)",
                param="cluster.workers",
            )
        _check_deaths(self.deaths, self.instances)

    def worker(self, index: int) -> Worker:
        """What an instance has of its own."""
        return self.workers[index] if self.workers else Worker()

    def cost_of(self, index: int) -> CostModel:
        """An instance's cost model."""
        return self.worker(index).cost or self.cost

    def links_of(self, index: int) -> Links:
        """An instance's links below L1."""
        return self.links or self.cost_of(index).links

    def kernel_of(self, index: int) -> KernelConfig:
        """The configuration of an instance's kernel."""
        pages = self.worker(index).total_pages
        return self.kernel if pages is None else replace(self.kernel, total_pages=pages)


def _check_deaths(deaths: tuple[Death, ...], instances: int) -> None:
    back: dict[int, float | None] = {}
    for death in sorted(deaths, key=lambda d: d.at_s):
        if death.worker >= instances:
            raise ConfigError(
                f"cluster.failures.worker={death.worker}: there are {instances} instances, the last is "
                f"{instances - 1}",
                param="cluster.failures",
            )
        since = back.get(death.worker, -1.0)
        if since is None or death.at_s <= since:
            raise ConfigError(
                f"cluster.failures.at_s={death.at_s:g}: instance {death.worker} has died before and is not "
                "back by then; give the earlier failure a back_s before this time",
                param="cluster.failures",
            )
        back[death.worker] = death.back_s
