"""The reading side of a store worker. Owns: `Reader`, what its reading threads do.

Rules: `lock` guards everything here, and is never held while the store is called or a page is verified. The
worker holds it when it calls any method but `run`. Only verified pages of the right size reach the book; the
first unusable page ends the run of every fetch that wants it (rule 33).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hotprefix.engine.stores.base import Store
from hotprefix.engine.stores.breaker import Breaker
from hotprefix.engine.stores.envelope import checked
from hotprefix.engine.stores.errors import LinkError, PageError, Reason, StoreError
from hotprefix.engine.stores.fetches import FetchBook, Read
from hotprefix.engine.stores.store_counters import LinkCounters
from hotprefix.engine.stores.worker_config import WorkerConfig

log = logging.getLogger(__name__)


class _Call:
    """One call to the store in progress. overdue: it has overrun the time limit and was counted as failed,
    though it has not returned."""

    __slots__ = ("overdue", "reads", "started")

    def __init__(self, reads: list[Read], started: float) -> None:
        self.reads = reads
        self.started = started
        self.overdue = False


class Reader:
    """See the module's rules.

    on_ready: called when a fetch has ended; the lock is not held.
    on_spoiled: called with the key of a page that proved unusable; the lock is held.
    """

    def __init__(
        self,
        store: Store,
        config: WorkerConfig,
        lock: threading.Lock,
        clock: Callable[[], float],
        on_ready: Callable[[], None],
        on_spoiled: Callable[[bytes], None],
    ) -> None:
        self._store, self._config, self._lock, self._clock = store, config, lock, clock
        self._on_ready, self._on_spoiled = on_ready, on_spoiled
        self._calls: set[_Call] = set()
        self._closing = False
        self.work = threading.Condition(lock)
        self.book = FetchBook(config.room_pages)
        self.breaker = Breaker(config.breaker)
        self.counters = LinkCounters()

    # -- called with the lock held ----------------------------------------------------------------

    def refusal(self, now: float) -> Reason | None:
        """Why a fetch submitted now would get no page; None if it may get some."""
        if self._closing:
            return Reason.CLOSED
        if self.breaker.refuses(now):
            return Reason.CIRCUIT_OPEN
        stuck = sum(call.overdue for call in self._calls)
        return Reason.BUSY if stuck >= self._config.readers else None

    def find_overdue(self, now: float) -> None:
        """Count a failure of the link for each call that has overrun the time limit, once per call. New
        fetches no longer join the reads of such a call, so another thread may read the same pages again."""
        for call in self._calls:
            if not call.overdue and now - call.started >= self._config.timeout_s:
                call.overdue = True
                self.breaker.failure(now)
                self.counters.fail(Reason.TIMEOUT, f"a read took over {self._config.timeout_s} s")
                for read in call.reads:
                    self.book.orphan(read)

    def close(self, now: float) -> None:
        self._closing = True
        self.book.end_all(Reason.CLOSED, now)
        self.work.notify_all()

    # -- the threads ------------------------------------------------------------------------------

    def run(self) -> None:
        """A reading thread's whole life."""
        while True:
            with self._lock:
                self.work.wait_for(lambda: self._closing or self.book.queued)
                if self._closing:
                    return
                call = self._begin()
            if call is not None:
                self._read(call)
            with self._lock:
                ended = self.book.has_ended
            if ended:
                self._on_ready()

    def _begin(self) -> _Call | None:
        now = self._clock()
        batch = self.book.next_batch(self._config.batch_pages)
        if not self.breaker.enter(now):
            for read in batch:
                self.book.settle(read, Reason.CIRCUIT_OPEN, now)
            return None
        call = _Call(batch, now)
        self._calls.add(call)
        return call

    def _read(self, call: _Call) -> None:
        results: list[bytes | PageError] = []
        moved, failure = 0, None
        try:
            answers = self._store.get([read.key for read in call.reads])
            if not answers:
                raise LinkError(Reason.FAILED, "the store returned an empty list")
            moved = sum(len(answer) for answer in answers if isinstance(answer, bytes))
            results = [self._verify(read, answer) for read, answer in zip(call.reads, answers, strict=False)]
        except Exception as error:
            failure = as_store_error(error)
        with self._lock:
            self._end(call, results, moved, failure)

    def _verify(self, read: Read, answer: bytes | PageError | None) -> bytes | PageError:
        try:
            return checked(read.key, answer, self._config.page_bytes)
        except PageError as error:
            return error

    def _end(
        self, call: _Call, results: list[bytes | PageError], moved: int, failure: StoreError | None
    ) -> None:
        """Settle the pages that arrived, and put those that were not read back into the queue. A failed call
        settles only its first page: the others may belong to fetches that do not want that page."""
        now = self._clock()
        self.find_overdue(now)
        self._calls.discard(call)
        self.counters.call(now - call.started)
        self.counters.bytes += moved
        if failure is not None:
            self.book.settle(call.reads[0], failure.reason, now)
        if failure is not None and not call.overdue:
            self.breaker.failure(now)
            self.counters.fail(failure.reason, str(failure))
        elif not call.overdue:
            self.breaker.success()
        for read, result in zip(call.reads, results, strict=False):
            self._settle(read, result, now)
        self.book.requeue(call.reads[max(len(results), failure is not None) :])
        self.work.notify_all()

    def _settle(self, read: Read, result: bytes | PageError, now: float) -> None:
        if not isinstance(result, PageError):
            self.counters.pages += 1
            self.book.settle(read, result, now)
            return
        if result.reason is not Reason.MISSING:
            self.counters.fail(result.reason, str(result))
            if result.reason is not Reason.DENIED:  # a process with other rights may be able to read it
                self._on_spoiled(read.key)
        self.book.settle(read, result.reason, now)


def as_store_error(error: Exception) -> StoreError:
    """Whatever a store raised, as an error with a reason (rule 37)."""
    if isinstance(error, StoreError):
        return error
    log.warning("a store failed unexpectedly", exc_info=error)
    return LinkError(Reason.FAILED, f"{type(error).__name__}: {error}")
