"""A store that does what a test tells it. Owns: `ScriptedStore`, `ManualClock`, `Harness`, page makers.

Rules: nothing here sleeps; a test waits for events, and a wait that fails says so.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotprefix.engine.stores.base import NOTHING
from hotprefix.engine.stores.envelope import pack
from hotprefix.engine.stores.errors import PageError, Reason
from hotprefix.engine.stores.fetches import Fetched, FetchId
from hotprefix.engine.stores.worker import StoreWorker
from hotprefix.engine.stores.worker_config import WorkerConfig

PAGE = 64
PATIENCE_S = 20.0


def key(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def payload(number: int, size: int = PAGE) -> bytes:
    return hashlib.shake_128(b"page %d" % number).digest(size)


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


class ManualClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ScriptedStore:
    """Pages in a dict. before_get/before_put: called with the keys in the worker's thread; may raise or
    wait. short: most entries a get returns. gets, puts, touched, removed: what was asked, in order.
    entered: released at each get's begin. hang: while set to an event, gets wait for it."""

    def __init__(self, *numbers: int) -> None:
        self.pages = {key(number): pack(key(number), payload(number)) for number in numbers}
        self.before_get: Callable[[Sequence[bytes]], None] = lambda _: None
        self.before_put: Callable[[bytes], None] = lambda _: None
        self.short: int | None = None
        self.hang: threading.Event | None = None
        self.frees_on_close = True
        self.entered = threading.Semaphore(0)
        self.gets: deque[tuple[bytes, ...]] = deque()
        self.puts: list[bytes] = []
        self.touched: list[tuple[bytes, ...]] = []
        self.removed: list[bytes] = []
        self.closed = 0

    def get(self, keys: Sequence[bytes]) -> list[bytes | PageError | None]:
        self.gets.append(tuple(keys))
        self.entered.release()
        if (hang := self.hang) is not None:
            hang.wait(PATIENCE_S)
        self.before_get(keys)
        return [self.pages.get(key) for key in keys][: self.short]

    def put(self, key: bytes, wrapped: bytes) -> None:
        self.puts.append(key)
        self.before_put(key)
        self.pages[key] = wrapped

    def present(self, keys: Sequence[bytes]) -> int:
        found = [key in self.pages for key in keys]
        return found.index(False) if False in found else len(found)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.touched.append(tuple(keys))

    def remove(self, key: bytes) -> None:
        self.removed.append(key)
        self.pages.pop(key, None)

    def close(self) -> None:
        self.closed += 1
        if self.hang is not None and self.frees_on_close:
            self.hang.set()

    def describe(self) -> str:
        return "scripted"

    def passed_over(self) -> Mapping[Reason, int]:
        return NOTHING

    def wait_entered(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE_S), "the store was not asked"


class Harness:
    """A worker over a scripted store, with a clock that the test moves."""

    def __init__(self, store: Any, **settings: Any) -> None:
        self.store = store
        self.clock = ManualClock()
        self.ready = threading.Event()
        config = WorkerConfig(**({"page_bytes": PAGE, "readers": 1} | settings))
        self.worker = StoreWorker(store, config, on_ready=self.ready.set, clock=self.clock)

    def wait(self, count: int = 1) -> list[Fetched]:
        """The next `count` endings."""
        found: list[Fetched] = []
        while True:
            self.ready.clear()
            found += self.worker.poll()
            if len(found) >= count:
                assert len(found) == count
                return found
            assert self.ready.wait(PATIENCE_S), f"{len(found)} of {count} fetches ended"

    def fetch(self, fetch_id: FetchId, *numbers: int) -> Fetched:
        self.worker.submit_fetch(fetch_id, keys(*numbers))
        return self.wait()[0]

    def put(self, *numbers: int) -> None:
        for number in numbers:
            self.worker.submit_put(key(number), payload(number))
        assert self.worker.drain(PATIENCE_S)
