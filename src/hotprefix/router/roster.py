"""Who is in the fleet. Owns: `Roster`: workers that come, go, begin again, change their model or fall silent,
and one task for each that asks it how it is.

Rules:
1. A worker belongs to a pool from its first answer on. Before, it is asked and gets nothing.
2. A worker that begins again, or that is another than before (model, pages, rows), leaves its pool and joins
   one as new: nothing that was known of its earlier life stays, whatever its clock says.
3. A worker that is taken away drains: it gets no new requests, and leaves when its last one has ended.
4. Whatever one worker says or does, the tasks of the others go on; what is wrong with it is said in one line,
   once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Protocol

from hotprefix.engine.stores.breaker import BreakerConfig
from hotprefix.errors import ConfigError, InputError
from hotprefix.fleet.records import Role, WorkerReport
from hotprefix.router.asking import NoAnswer, ask
from hotprefix.router.config import RouterConfig
from hotprefix.router.heard import EventsAt, Heard, Priced, priced, profile
from hotprefix.router.pools import Pool, Pools
from hotprefix.router.upstream import Client, Upstream
from hotprefix.router.worker import Say, Worker
from hotprefix.router.worker_spec import Kind, WorkerSpec

log = logging.getLogger(__name__)
CARDS_S = 10.0
FIRST_OF = {Kind.HOTPREFIX: 0, Kind.VLLM: 1}


class Feed(Protocol):
    """Reads one worker's KV events into a desk."""

    async def run(self) -> None:
        """Until it is cancelled. It raises nothing for what a peer sends."""
        ...


OpenFeed = Callable[[Worker, EventsAt, Pool], Feed]
"""worker, where its events are, its pool, to whose desk they go."""


class Roster:
    """See the module's rules. workers: by name. open_feed: makes what reads a worker's KV events; None = they
    are not read, and what workers have cached is presumed from what they were given."""

    def __init__(
        self, config: RouterConfig, client: Client, pools: Pools, say: Say, open_feed: OpenFeed | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.workers: dict[str, Worker] = {}
        self._config, self._client, self._pools, self._say = config, client, pools, say
        self._open_feed, self._clock = open_feed, clock
        self._breaker = BreakerConfig(config.breaker_failures, config.breaker_open_s)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._feeds: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    # -- coming and going -------------------------------------------------------------------------

    async def begin(self, specs: Iterable[WorkerSpec]) -> None:
        """Ask all of them once, own engines joining first because they tell what a page is; then go on
        asking. Workers that do not answer are asked again later."""
        workers = [self._new(spec, listed=True) for spec in specs]
        answers = await asyncio.gather(*(self._asked(worker) for worker in workers))
        pairs = [(w, heard) for w, heard in zip(workers, answers, strict=True) if heard is not None]
        for worker, heard in sorted(pairs, key=lambda pair: FIRST_OF.get(pair[1].kind, 2)):
            self._take(worker, heard)
        for worker in workers:
            self._watch(worker)

    def add(self, spec: WorkerSpec, *, listed: bool = False) -> Worker:
        """Raises ConfigError if there is one of that name."""
        if spec.name in self.workers:
            raise ConfigError(f"there is a worker {spec.name!r} already: give another name=", param="workers")
        worker = self._new(spec, listed)
        self._watch(worker)
        return worker

    def drain(self, name: str) -> None:
        """It gets no further requests. Raises KeyError."""
        worker = self.workers[name]
        if not worker.draining:
            worker.draining = True
            self._say(f"worker {name}: drains")
            if worker.model is not None:
                self._pools.all[worker.model].desk.fleet.drain(name, self._clock())

    def remove(self, name: str) -> None:
        """It drains, and leaves when its last request has ended. Raises KeyError."""
        self.drain(name)
        task = asyncio.ensure_future(self._left(self.workers[name]))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def tidy(self) -> None:
        """Forget pools without workers in which nothing waits any more."""
        for pool in list(self._pools.all.values()):
            self._pools.end_if_empty(pool)

    async def close(self) -> None:
        """End every task."""
        tasks = [*self._tasks.values(), *self._feeds.values(), *self._leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _new(self, spec: WorkerSpec, listed: bool) -> Worker:
        upstream = Upstream(self._client, spec)
        worker = self.workers[spec.name] = Worker(spec, upstream, self._breaker, self._say, listed)
        if spec.role is not Role.BOTH:
            self._say(f"worker {spec.name}: role={spec.role} is not followed yet: it gets whole requests")
        return worker

    async def _left(self, worker: Worker) -> None:
        end = self._clock() + self._config.silence_s
        while worker.calls and self._clock() < end:
            await asyncio.sleep(0.05)
        if self.workers.get(worker.name) is worker:
            self._tasks.pop(worker.name).cancel()
            self._leave_pool(worker)
            del self.workers[worker.name]
            self._say(f"worker {worker.name}: has left")

    # -- asking -----------------------------------------------------------------------------------

    def _watch(self, worker: Worker) -> None:
        self._tasks[worker.name] = asyncio.ensure_future(self._keep_asking(worker))

    async def _keep_asking(self, worker: Worker) -> None:
        while True:
            await _whatever_happens(worker.name, self._ask_once(worker))
            await asyncio.sleep(self._config.poll_s)

    async def _ask_once(self, worker: Worker) -> None:
        heard = await self._asked(worker)
        if heard is not None:
            self._take(worker, heard)

    async def _asked(self, worker: Worker) -> Heard | None:
        """What the worker says; None if it does not answer, which is noted."""
        asked = self._clock()
        known = worker.heard if asked - worker.cards_at < CARDS_S and not worker.silent else None
        try:
            heard = await ask(worker.upstream, self._config.probe_timeout_s, known)
        except NoAnswer as error:
            worker.missed(str(error), self._config.probe_failures)
            return None
        if known is None:
            worker.cards_at = asked
        worker.asked = asked
        return heard

    def _take(self, worker: Worker, heard: Heard) -> None:
        """Note what the worker said. One that has left meanwhile is passed over."""
        if self.workers.get(worker.name) is not worker:
            return
        before = worker.heard
        began = worker.answered(heard)
        pool = None if worker.model is None else self._pools.all[worker.model]
        made = worker.asked
        if pool is not None and (began or before is None or _other(before, heard)):
            if pool.model != heard.model:
                self._say(f"worker {worker.name}: serves {heard.model} now, no longer {pool.model}")
            self._leave_pool(worker)
            pool = None
        if pool is None:
            pool = self._join(worker, heard)
            made = self._clock()  # nothing was sent there in the meantime
        pool.desk.report(worker.name, partial(_report, heard, made, pool.page_size))

    def _join(self, worker: Worker, heard: Heard) -> Pool:
        price = self._price(worker, heard)
        own = heard.page_size if heard.kind is Kind.HOTPREFIX else None
        pool = self._pools.begin(heard.model, own, heard.fingerprint)
        events = self._events_of(worker, heard, pool)
        worker.events, worker.prices = events is not None and self._open_feed is not None, price.whose
        about = profile(heard, worker.spec, price, pool.page_size, worker.events)
        pool.workers[worker.name] = worker
        pool.desk.fleet.join(worker.name, about, self._clock(), heard.incarnation)
        worker.model = pool.model
        if worker.draining:
            pool.desk.fleet.drain(worker.name, self._clock())
        if events is not None and self._open_feed is not None:
            feed = self._open_feed(worker, events, pool)
            self._feeds[worker.name] = asyncio.ensure_future(_whatever_happens(worker.name, feed.run()))
        told = "its KV events are read" if worker.events else "what it has cached is presumed"
        self._say(f"worker {worker.name}: {heard.kind}, {heard.model}; prices: {price.whose}; {told}")
        return pool

    def _price(self, worker: Worker, heard: Heard) -> Priced:
        try:
            return priced(heard, worker.spec, self._config.cost)
        except InputError as error:
            self._say(f"worker {worker.name}: {error}; it is taken to cost what {self._config.cost} costs")
            return priced(heard, worker.spec.without_cost(), self._config.cost)

    def _events_of(self, worker: Worker, heard: Heard, pool: Pool) -> EventsAt | None:
        """Where its events are. An own engine's keys are of its own pages, so those of another size are of no
        use; vLLM's are made from token ids."""
        given = worker.spec
        own = heard.kind is Kind.HOTPREFIX
        if own and heard.page_size not in (None, pool.page_size):
            self._say(
                f"worker {worker.name}: its pages have {heard.page_size} tokens and the pool's "
                f"{pool.page_size}, so what it has cached is presumed; start all with the same --page-size"
            )
            return None
        if own and heard.fingerprint not in (None, pool.fingerprint):
            self._say(
                f"worker {worker.name}: its weights are others than those of the pool's first engine "
                f"(fingerprint {heard.fingerprint}), so what it has cached is presumed; give it another name"
            )
            return None
        if given.events is None:
            return heard.events
        return EventsAt(given.events, given.replay, heard.events is not None and heard.events.snapshot)

    def _leave_pool(self, worker: Worker) -> None:
        feed = self._feeds.pop(worker.name, None)
        if feed is not None:
            feed.cancel()
        if worker.model is None:
            return
        pool = self._pools.all[worker.model]
        del pool.workers[worker.name]
        pool.desk.fleet.leave(worker.name, self._clock())
        worker.model = None
        self._pools.end_if_empty(pool)


async def _whatever_happens(name: str, work: Coroutine[Any, Any, None]) -> None:
    """Do it; a fault of ours in it is logged and ends nothing else."""
    try:
        await work
    except Exception:
        log.exception("worker %s: what it said could not be used", name)


def _other(before: Heard, heard: Heard) -> bool:
    """It is another worker than before, in something that its pool or its profile depends on."""
    names = (
        "model",
        "page_size",
        "total_pages",
        "max_batched_tokens",
        "max_running",
        "cost",
        "events",
        "fingerprint",
    )
    return any(getattr(before, name) != getattr(heard, name) for name in names)


def _report(heard: Heard, made: float, page_size: int, outstanding: int) -> WorkerReport | None:
    """What it said of its load, in pages of the pool's size; None: too little. outstanding: prompt tokens of
    our own requests there. vLLM does not tell of prompts that it has begun, so these count at least."""
    said = heard.figures
    if said is None or said.pages is None:
        return None
    prefill = said.prefill_tokens
    if heard.kind is not Kind.HOTPREFIX:
        prefill = max(prefill or 0, outstanding)
    if prefill is None:
        return None
    own = heard.page_size or page_size
    free, evictable, owned, protected = (pages * own // page_size for pages in said.pages)
    return WorkerReport(
        made - said.age_s, said.waiting, prefill, said.decodes, free, evictable, owned, protected,
        heard.incarnation,
    )  # fmt: skip
