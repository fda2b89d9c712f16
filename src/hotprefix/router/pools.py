"""The pools of a router: workers that serve one model. Owns: `Pool`, `Pools`, and which pool a request is
for.

Rules:
1. A pool begins with the first worker of its model and keeps its page size. Its fleet is its own, so prefixes
   of two models never meet.
2. A request that names no model, or one that is not known, goes to the only pool if there is only one: its
   worker knows what to say. With several pools the router says it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from hotprefix.fleet.config import FleetConfig
from hotprefix.router.desk import Desk, Log
from hotprefix.router.ticket import Limits
from hotprefix.router.worker import Worker
from hotprefix.server.errors import ApiError

NONE: frozenset[str] = frozenset()


class Pool:
    """model: what its workers serve. workers: by name. fingerprint: what the namespace of its pages begins
    with; if its first worker does not tell, the model's name."""

    def __init__(
        self, model: str, config: FleetConfig, limits: Limits, clock: Callable[[], float],
        log: Log | None = None,
    ) -> None:  # fmt: skip
        self.model = self.fingerprint = model
        self.workers: dict[str, Worker] = {}
        draw = random.Random().randrange
        self.desk = Desk(config, limits, draw, self._troubled, self._chosen, self._released, clock, log)

    @property
    def page_size(self) -> int:
        return self.desk.fleet.config.page_size

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model, in the order in which workers say it."""
        told = (worker.heard.names for worker in self.workers.values() if worker.heard is not None)
        return tuple(dict.fromkeys(name for names in told for name in names))

    def able(self, now: float) -> list[Worker]:
        """The workers that may get requests."""
        return [w for w in self.workers.values() if not w.draining and not w.refuses(now)]

    def _troubled(self, now: float) -> frozenset[str]:
        if not any(worker.trouble for worker in self.workers.values()):
            return NONE
        return frozenset(name for name, worker in self.workers.items() if worker.refuses(now))

    def _chosen(self, name: str, now: float) -> bool:
        return self.workers[name].chosen(now)

    def _released(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is not None:
            worker.breaker.nothing()


class Pools:
    """See the module's rules. all: by model. log: makes what writes down what a model's desk does."""

    def __init__(
        self, fleet: Callable[[int], FleetConfig], limits: Limits, page_size: int | None,
        clock: Callable[[], float], log: Callable[[str], Log] | None = None,
    ) -> None:  # fmt: skip
        self._log = log
        self._fleet, self._limits, self._page_size, self._clock = fleet, limits, page_size, clock
        self.all: dict[str, Pool] = {}

    def begin(self, model: str, page_size: int | None, fingerprint: str | None = None) -> Pool:
        """The pool of a model, which begins if there is none. page_size, fingerprint: its first worker's, if
        told."""
        pool = self.all.get(model)
        if pool is None:
            size = self._page_size or page_size or 16
            log = None if self._log is None else self._log(model)
            pool = self.all[model] = Pool(model, self._fleet(size), self._limits, self._clock, log)
            pool.fingerprint = fingerprint or model
        return pool

    def end_if_empty(self, pool: Pool) -> None:
        """A pool without workers in which nothing waits is forgotten."""
        if not pool.workers and not pool.desk.remembered and self.all.get(pool.model) is pool:
            del self.all[pool.model]

    def page_size(self, name: str | None) -> int:
        """Of the pool that a request for this model goes to."""
        pool = self._find(name)
        return pool.page_size if pool is not None else self._page_size or 16

    def of(self, name: str | None) -> Pool:
        """The pool for a request that names this model. Raises ApiError 404, 400 or 503."""
        pool = self._find(name)
        if pool is not None:
            return pool
        known = ", ".join(name for pool in self.all.values() for name in pool.names)
        if not self.all:
            message = "no worker has been reached yet: try again"
            raise ApiError(503, message, code="no_worker", headers={"retry-after": "1"})
        if name is None:
            raise ApiError(400, f"model is missing: give one of {known}", param="model",
                           code="missing_required_parameter")  # fmt: skip
        message = f"the model {name[:200]!r} is not here; there is {known}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def _find(self, name: str | None) -> Pool | None:
        if len(self.all) == 1:
            return next(iter(self.all.values()))
        if name is None:
            return None
        found = self.all.get(name)
        return found or next((pool for pool in self.all.values() if name in pool.names), None)
