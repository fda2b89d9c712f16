"""The writing side of a store worker. Owns: `Writer`, what its thread does.

Rules: `lock` guards everything here and is never held while the store is called. One thread does the jobs in
the order in which they came (`jobs.py`), so no touch and no removal overtakes a put, or the other way round.
Every job is done, or counted under the reason why not. A call that overruns the time limit counts as a
failure of the link once for each limit it takes; while it lasts nothing is queued, and once the breaker has
opened over it what was queued is dropped. A page is not put if the store has it, nor if it lacks the page
before, for it could not be reached. Only trouble of the store itself feeds the breaker, that of one page does
not.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from hotprefix.engine.stores.base import Store
from hotprefix.engine.stores.breaker import Breaker, BreakerState
from hotprefix.engine.stores.config import WorkerConfig
from hotprefix.engine.stores.counters import LinkCounters
from hotprefix.engine.stores.errors import LinkError, PageError, Reason, StoreError
from hotprefix.engine.stores.frame import checked, pack
from hotprefix.engine.stores.jobs import Job, JobQueue, Put, Touch
from hotprefix.engine.stores.reader import as_store_error


class Writer:
    """See the module's rules. known: pages not written because the store had them already. chores_lost:
    touches and removals not done, by reason."""

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
        """Queue a job; False = dropped and counted. A page on its way already counts as taken."""
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
        """Blame the link for a call that overruns the time limit."""
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
        """Wait until nothing is queued or in progress. Lets go of the lock meanwhile."""
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
        """Bytes moved, and what went wrong."""
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
        """Bytes written, 0 = the store has the page."""
        # The chain's last page was put just now: it is there.
        wanted = () if job.parent is None or job.parent == self._latest else (job.parent,)
        self._latest = None
        there = self._store.present((*wanted, job.key))
        if there < len(wanted):
            raise PageError(Reason.MISSING, "the page before it is not in the store")
        framed = pack(job.key, job.payload, job.parent) if there == len(wanted) else b""
        if framed:
            self._store.put(job.key, framed)
        self._latest = job.key
        return len(framed)

    def _discard(self, key: bytes) -> None:
        """It may have been put anew since it was read."""
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
