"""The writing side of a store worker. Owns: `Writer`, what its writing threads do.

Rules: `lock` guards everything here and is never held while the store is called. Puts are bounded and
dropped when they do not fit, with a reason. Chores (touch, remove) go first, are bounded by dropping
the oldest, and their failure has no other effect than to feed the circuit breaker.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from hotprefix.engine.stores.base import Store
from hotprefix.engine.stores.breaker import Breaker
from hotprefix.engine.stores.config import WorkerConfig
from hotprefix.engine.stores.counters import LinkCounters
from hotprefix.engine.stores.errors import Reason, StoreError
from hotprefix.engine.stores.frame import pack
from hotprefix.engine.stores.puts import PutQueue
from hotprefix.engine.stores.reader import as_store_error

_MAX_CHORES = 1024

Chore = Callable[[], None]


class Writer:
    """See the module's rules. known: pages not written because the store had them already."""

    def __init__(
        self, store: Store, config: WorkerConfig, lock: threading.Lock, clock: Callable[[], float]
    ) -> None:
        self._store, self._lock, self._clock = store, lock, clock
        self._work = threading.Condition(lock)
        self._settled = threading.Condition(lock)
        self._chores: deque[Chore] = deque(maxlen=_MAX_CHORES)
        self._busy = 0
        self._closing = False
        self.puts = PutQueue(config.max_inflight_bytes)
        self.breaker = Breaker(config.breaker)
        self.counters = LinkCounters()
        self.known = 0

    # -- called with the lock held ----------------------------------------------------------------

    def offer(self, key: bytes, payload: bytes) -> bool:
        """Queue a page; False = dropped and counted."""
        if self.puts.holds(key):
            return True
        refused = self._refusal() or self.puts.offer(key, payload)
        if refused is not None:
            self.counters.fail(refused, f"not queued: {refused}")
            return False
        self._work.notify()
        return True

    def _refusal(self) -> Reason | None:
        if self._closing:
            return Reason.CLOSED
        return Reason.CIRCUIT_OPEN if self.breaker.refuses(self._clock()) else None

    def later(self, chore: Chore) -> None:
        if self._refusal() is None:
            self._chores.append(chore)
            self._work.notify()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or in progress. Lets go of the lock meanwhile."""
        return self._settled.wait_for(lambda: not (self.puts or self._chores or self._busy), timeout_s)

    def close(self) -> None:
        self._closing = True
        self._chores.clear()
        for _ in range(self.puts.clear()):
            self.counters.fail(Reason.CLOSED, "not written: the worker was closed")
        self._work.notify_all()
        self._settled.notify_all()

    # -- the threads ------------------------------------------------------------------------------

    def run(self) -> None:
        """A writing thread's whole life."""
        while True:
            with self._lock:
                self._work.wait_for(lambda: self._closing or self._chores or self.puts.waiting)
                if self._closing:
                    return
                self._busy += 1
                chore = self._chores.popleft() if self._chores else None
                page = self.puts.take() if chore is None else None
                started = self._clock()
                allowed = self.breaker.enter(started)
            moved, failure = self._do(chore, page) if allowed else (0, None)
            with self._lock:
                self._busy -= 1
                if allowed:
                    self._end(started, failure)
                if page is not None:
                    self._end_put(page[0], moved, failure, allowed)
                self._settled.notify_all()

    def _do(self, chore: Chore | None, page: tuple[bytes, bytes] | None) -> tuple[int, StoreError | None]:
        """Bytes moved, and what went wrong."""
        try:
            if chore is not None:
                chore()
            if page is not None and not self._store.present(page[:1]):
                framed = pack(*page)
                self._store.put(page[0], framed)
                return len(framed), None
        except Exception as error:
            return 0, as_store_error(error)
        return 0, None

    def _end(self, started: float, failure: StoreError | None) -> None:
        now = self._clock()
        self.counters.call(now - started)
        if failure is None:
            self.breaker.success()
        else:
            self.breaker.failure(now)

    def _end_put(self, key: bytes, moved: int, failure: StoreError | None, allowed: bool) -> None:
        self.puts.done(key)
        self.counters.bytes += moved
        if not allowed:
            self.counters.fail(Reason.CIRCUIT_OPEN, "not written: the breaker is open")
        elif failure is not None:
            self.counters.fail(failure.reason, str(failure))
        elif moved:
            self.counters.pages += 1
        else:
            self.known += 1
