"""The writing side of a store worker. Owns: `Writer`, what its thread does.

Rules: `lock` guards everything here, and is never held while the store is called.
1. One thread does the jobs in the order in which they were queued (`jobs.py`), so no put, touch or removal
   overtakes another.
2. Every job is done, or counted under the reason why it was not.
3. A call that overruns the time limit counts as a failure of the link, and once more for each further limit
   that it takes. While it lasts no job is queued. If the breaker opens over it, the queued jobs are dropped.
4. A page is not put if the store has it already, nor if the store lacks the page before it: it could not be
   reached.
5. Only trouble of the store itself counts for the breaker; trouble with one page does not.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from hotprefix.engine.stores.base import Store
from hotprefix.engine.stores.breaker import Breaker, BreakerState
from hotprefix.engine.stores.envelope import checked, pack
from hotprefix.engine.stores.errors import LinkError, PageError, Reason, StoreError
from hotprefix.engine.stores.jobs import Job, JobQueue, Put, Touch
from hotprefix.engine.stores.read_threads import as_store_error
from hotprefix.engine.stores.store_counters import LinkCounters
from hotprefix.engine.stores.worker_config import WorkerConfig


class Writer:
    """See the module's rules. known: how many pages were not written because the store had them already.
    chores_lost: touches and removals that were not done, by reason."""

    def __init__(
        self, store: Store, config: WorkerConfig, lock: threading.Lock, clock: Callable[[], float]
    ) -> None:
        self._store, self._config, self._clock = store, config, clock
        self._lock = lock
        self._work = threading.Condition(lock)
        self._settled = threading.Condition(lock)
        self._closing = False
        self._started: float | None = None
        self._overdue = 0
        self._latest: bytes | None = None
        self.jobs = JobQueue(config.max_inflight_bytes)
        self.breaker = Breaker(config.breaker)
        self.counters = LinkCounters()
        self.chores_lost: Counter[Reason] = Counter()
        self.known = 0

    # -- called with the lock held ----------------------------------------------------------------

    def offer(self, job: Job) -> bool:
        """Queue a job. False: it was dropped and counted. A put of a page that is queued already is True."""
        if isinstance(job, Put) and self.jobs.holds(job.key):
            return True
        now = self._clock()
        self.find_overdue(now)
        refused = self._refusal(now) or self.jobs.offer(job)
        if refused is not None:
            self._lost(job, refused, f"not queued: {refused}")
            return False
        self._work.notify()
        return True

    def _refusal(self, now: float) -> Reason | None:
        if self._closing:
            return Reason.CLOSED
        if self.breaker.refuses(now):
            return Reason.CIRCUIT_OPEN
        return Reason.BUSY if self._overdue else None

    def find_overdue(self, now: float) -> None:
        """Count a failure of the link if the call in progress has overrun the time limit."""
        if self._started is None:
            return
        limits = int((now - self._started) / self._config.timeout_s)
        if limits and not self._overdue:
            self.counters.fail(Reason.TIMEOUT, f"a write took over {self._config.timeout_s} s")
        while self._overdue < limits:
            self._overdue += 1
            self.breaker.failure(now)
        if self._overdue and self.breaker.state is BreakerState.OPEN:
            self._drop_queued(Reason.CIRCUIT_OPEN, "not written: the store does not answer")

    def _drop_queued(self, reason: Reason, message: str) -> None:
        for job in self.jobs.clear():
            self._lost(job, reason, message)
        self._settled.notify_all()

    def _lost(self, job: Job, reason: Reason, message: str) -> None:
        if isinstance(job, Put):
            self.counters.fail(reason, message)
        else:
            self.chores_lost[reason] += 1

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or in progress. The lock is released while waiting."""
        return self._settled.wait_for(lambda: self.jobs.idle, timeout_s)

    def close(self) -> None:
        self._closing = True
        self._drop_queued(Reason.CLOSED, "not written: the worker was closed")
        self._work.notify_all()

    # -- the thread -------------------------------------------------------------------------------

    def run(self) -> None:
        """The writing thread's whole life."""
        while True:
            with self._lock:
                self._work.wait_for(lambda: self._closing or self.jobs.waiting)
                if self._closing:
                    return
                job = self.jobs.take()
                started = self._clock()
                allowed = self.breaker.enter(started)
                self._started = started if allowed else None
            moved, failure = self._do(job) if allowed else (0, None)
            with self._lock:
                if allowed:
                    self._end(job, moved, failure, started)
                else:
                    self._lost(job, Reason.CIRCUIT_OPEN, "not written: the breaker is open")
                self.jobs.done()
                self._settled.notify_all()

    def _do(self, job: Job) -> tuple[int, StoreError | None]:
        """Do a job; returns the bytes moved, and the error if there was one."""
        try:
            if isinstance(job, Put):
                return self._put(job), None
            if isinstance(job, Touch):
                self._store.touch(job.keys)
            else:
                self._discard(job.key)
        except Exception as error:
            return 0, as_store_error(error)
        return 0, None

    def _put(self, job: Put) -> int:
        """Put a page; returns the bytes written, 0 if the store has the page already."""
        # If the parent is the page that was put last, it is there: no need to ask.
        wanted = () if job.parent is None or job.parent == self._latest else (job.parent,)
        self._latest = None
        there = self._store.present((*wanted, job.key))
        if there < len(wanted):
            raise PageError(Reason.MISSING, "the page before it is not in the store")
        wrapped = pack(job.key, job.payload, job.parent) if there == len(wanted) else b""
        if wrapped:
            self._store.put(job.key, wrapped)
        self._latest = job.key
        return len(wrapped)

    def _discard(self, key: bytes) -> None:
        """Read the page once more, and remove it only if it is still unusable: it may have been replaced."""
        try:
            checked(key, self._store.get([key])[0], self._config.page_bytes)
        except PageError as error:
            if error.reason not in (Reason.MISSING, Reason.DENIED):
                self._store.remove(key)

    def _end(self, job: Job, moved: int, failure: StoreError | None, started: float) -> None:
        now = self._clock()
        self.find_overdue(now)
        late, self._started, self._overdue = self._overdue > 0, None, 0
        self.counters.call(now - started)
        self.counters.bytes += moved
        if failure is not None and not (late and isinstance(job, Put)):
            self._lost(job, failure.reason, str(failure))
        if not late and isinstance(failure, LinkError):
            self.breaker.failure(now)
        elif not late:
            self.breaker.success()
        if isinstance(job, Put) and failure is None:
            self.counters.pages += moved > 0
            self.known += not moved
