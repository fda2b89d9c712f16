"""The threads between the engine and an external store. Owns: `StoreWorker`.

Rules:
1. Only `drain` and `close` ever wait for the store.
2. Whatever a store does (fail, hang, answer late, answer nonsense), every fetch ends by its time limit with
   the verified pages that arrived, every put is done or counted under a reason, and `close` returns (rule
   37).
3. Results are private immutable bytes, so a late result cannot overwrite anything.
4. Reads and writes have separate threads and circuit breakers, so a store that is full still gives pages.
5. Time limits are enforced in `poll`, by the caller's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from hotprefix.engine.stores.base import Store
from hotprefix.engine.stores.errors import Reason
from hotprefix.engine.stores.fetches import Fetched, FetchId
from hotprefix.engine.stores.jobs import Discard, Put, Touch
from hotprefix.engine.stores.read_threads import Reader
from hotprefix.engine.stores.store_counters import COMPLETE, StoreStats
from hotprefix.engine.stores.worker_config import WorkerConfig
from hotprefix.engine.stores.writer import Writer

log = logging.getLogger(__name__)


class StoreWorker:
    """See the module's rules. The worker owns the store that it is given, and closes it.

    on_ready: called without arguments, from any thread, when `poll` has something to return; it must be
    quick.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        store: Store,
        config: WorkerConfig,
        *,
        on_ready: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._config = store, config
        self._on_ready, self._clock = on_ready, clock
        self._lock = threading.Lock()
        self._writer = Writer(store, config, self._lock, clock)
        self._reader = Reader(store, config, self._lock, clock, on_ready, self._spoiled)
        self._endings: Counter[str] = Counter()
        jobs = [self._reader.run] * config.readers + [self._writer.run]
        self._threads = [
            threading.Thread(target=job, name=f"hotprefix-store-{number}", daemon=True)
            for number, job in enumerate(jobs)
        ]
        for thread in self._threads:
            thread.start()

    # -- fetches ----------------------------------------------------------------------------------

    def submit_fetch(self, fetch_id: FetchId, keys: Sequence[bytes], timeout_s: float | None = None) -> None:
        """Ask for the longest leading run of `keys` (in chain order) that the store has. `poll` returns the
        outcome once, even if the store could not be asked. timeout_s: this fetch's own time limit. Raises
        ProtocolError if the id is in use."""
        with self._lock:
            now = self._clock()
            self._reader.find_overdue(now)
            limit = self._config.timeout_s if timeout_s is None else timeout_s
            self._reader.book.add(fetch_id, keys, now, limit, self._reader.refusal(now))
            self._reader.work.notify_all()
            ended = self._reader.book.has_ended
        if ended:
            self._on_ready()

    def stop(self, fetch_id: FetchId) -> None:
        """End a fetch now with the pages that have arrived (reason stopped). Unknown ids are ignored."""
        with self._lock:
            self._reader.book.stop(fetch_id, self._clock())

    def cancel(self, fetch_id: FetchId) -> None:
        """Forget a fetch: `poll` will never return it. Unknown ids are ignored."""
        with self._lock:
            if self._reader.book.cancel(fetch_id):
                self._endings[Reason.CANCELLED] += 1

    def poll(self) -> list[Fetched]:
        """The fetches that ended since the last call, including those that ran out of time."""
        with self._lock:
            now = self._clock()
            self._reader.find_overdue(now)
            self._writer.find_overdue(now)
            self._reader.book.expire(now)
            taken = self._reader.book.take()
            for fetched, keys in taken:
                self._endings[fetched.reason or COMPLETE] += 1
                self._touch(keys)
        return [fetched for fetched, _ in taken]

    def next_deadline(self) -> float | None:
        """The time, on the worker's clock, by which `poll` must be called again; None if no fetch is
        active."""
        with self._lock:
            return self._reader.book.next_deadline()

    # -- puts -------------------------------------------------------------------------------------

    def submit_put(self, key: bytes, payload: bytes, parent: bytes | None = None) -> bool:
        """Store a page in the background. parent: the key of the page before it, which must be in the
        store or have been submitted before; None for a prefix's first page. True: the page is queued, or
        was already. False: it was dropped and counted under its reason. Raises ValueError for a payload of
        another size."""
        if len(payload) != self._config.page_bytes:
            raise ValueError(f"a page has {self._config.page_bytes} bytes, got {len(payload)}")
        owned = bytes(payload)
        with self._lock:
            return self._writer.offer(Put(key, parent, owned))

    def submit_touch(self, keys: Sequence[bytes]) -> None:
        """Mark a chain as just used; its head becomes the most recent. This is done after all jobs that were
        submitted before. Call it when a request's last page has been submitted. Runs that were fetched are
        touched without a call."""
        with self._lock:
            self._touch(tuple(keys))

    def _touch(self, keys: tuple[bytes, ...]) -> None:
        if keys:
            self._writer.offer(Touch(keys))

    def _spoiled(self, key: bytes) -> None:
        self._writer.offer(Discard(key))

    # -- the whole --------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """Counters and gauges of this moment."""
        with self._lock:
            read, write = self._reader, self._writer
            write.find_overdue(self._clock())
            return StoreStats(
                store=self._store.describe(),
                read=read.counters.snapshot(read.breaker.state, read.breaker.opened),
                write=write.counters.snapshot(write.breaker.state, write.breaker.opened),
                endings=dict(self._endings),
                shared_pages=read.book.shared,
                late_pages=read.book.late,
                known_pages=write.known,
                chores_lost=dict(write.chores_lost),
                passed_over=self._store.passed_over(),
                active_fetches=read.book.active,
                reserved_bytes=read.book.reserved * self._config.page_bytes,
                queued_puts=write.jobs.puts,
                queued_put_bytes=write.jobs.size,
                threads=sum(thread.is_alive() for thread in self._threads),
            )

    def drain(self, timeout_s: float) -> bool:
        """Wait until every queued put and touch is done. False: not within `timeout_s`."""
        with self._lock:
            return self._writer.drain(timeout_s)

    def close(self, timeout_s: float = 2.0) -> int:
        """Drop what is queued, end the threads, close the store. Calls in progress get half the time to end
        by themselves; then closing the store cuts them off. Returns how many threads a hung store still holds
        (0: all have ended). Those are daemon threads and do nothing when they return."""
        with self._lock:
            self._reader.close(self._clock())
            self._writer.close()
        half = time.monotonic() + timeout_s / 2
        self._join(half)
        try:
            self._store.close()
        except Exception as error:
            log.warning("closing %s: %s", self._store.describe(), error)
        self._join(half + timeout_s / 2)
        return sum(thread.is_alive() for thread in self._threads)

    def _join(self, until: float) -> None:
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
