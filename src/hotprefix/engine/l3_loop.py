"""The loop's side of L3. Owns: `Storage`, which starts what plans ask for and brings home what came.

Rules: everything happens on the loop's thread except the store's own work. Nothing here waits for the store,
except `wait`, which is for idle moments. A payload reaches L2 only if the kernel has just given it a page;
every other payload is dropped.
"""

from __future__ import annotations

import threading
from typing import Protocol

from hotprefix.engine.link_totals import Copied
from hotprefix.engine.stores.base import Store
from hotprefix.engine.stores.store_counters import StoreStats
from hotprefix.engine.stores.worker import StoreWorker
from hotprefix.engine.stores.worker_config import WorkerConfig
from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.plan import StepPlan


class HostMemory(Protocol):
    """What the loop needs of L2's memory. links: what was copied between L1 and L2."""

    links: Copied

    def write(self, page: int, payload: bytes) -> None:
        """Fill a page that the kernel has just given to a fetched payload."""
        ...


class Storage:
    """A store worker beside a host pool. timeout_s: how long one fetch may take."""

    def __init__(self, store: Store, page_bytes: int, timeout_s: float) -> None:
        self._ready = threading.Event()
        config = WorkerConfig(page_bytes=page_bytes, timeout_s=timeout_s)
        self._worker = StoreWorker(store, config, on_ready=self._ready.set)

    def put(self, key: bytes, parent: bytes | None, payload: bytes) -> None:
        """Write a page in the background; dropped and counted if the worker is too busy."""
        self._worker.submit_put(key, payload, parent)

    def begin(self, plan: StepPlan) -> None:
        """Start the plan's fetches, then cancel those that it gives up, which may be among them."""
        for fetch in plan.fetches:
            self._worker.submit_fetch(fetch.id, fetch.keys)
        for cancelled in plan.cancels:
            self._worker.cancel(cancelled)

    def touch(self, plan: StepPlan) -> None:
        """Mark the plan's chains as just used. Called after the plan's pages were put."""
        for chain in plan.touches:
            self._worker.submit_touch(chain)

    def land(self, kernel: Kernel, host: HostMemory, now: float) -> None:
        """Report to the kernel every fetch that has ended, and write the payloads that got a page."""
        self._ready.clear()
        for fetched in self._worker.poll():
            where = kernel.transfer_done(int(fetched.id), len(fetched.payloads), fetched.seconds, now)
            for index, page in where.items():
                host.write(page, fetched.payloads[index])

    def wait(self, seconds: float) -> None:
        """Wait until a fetch has ended, for `seconds` at most."""
        self._ready.wait(seconds)

    def stats(self) -> StoreStats:
        return self._worker.stats()

    def drain(self, seconds: float) -> bool:
        """Wait until every page is written. False if that took longer than `seconds`."""
        return self._worker.drain(seconds)

    def close(self) -> None:
        """Close the store without finishing its work."""
        self._worker.close()
