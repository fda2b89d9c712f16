"""What a store worker has done so far. Owns: the counters, and the frozen snapshot people read.

Rules: counters only grow; one place counts each thing once. Units: pages, bytes, seconds. Link bytes
are bytes moved, frames included, also those nobody could use; a page is counted under its link only if
it was usable. A `StoreStats` never changes after it was taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hotprefix.engine.stores.breaker import BreakerState
from hotprefix.engine.stores.errors import Reason

COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class LinkStats:
    """One direction between host memory and the store. calls: requests made to the store. seconds:
    time spent in them, over all threads. failures: read link: unusable pages, and calls that failed or
    overran the time limit; write link: pages not stored, whoever refused them, and calls that overran the
    limit, whose page may be there late. Absent pages are no failure. last_error: the latest failure's
    message. opened: how often the breaker opened."""

    calls: int
    pages: int
    bytes: int
    seconds: float
    failures: Mapping[Reason, int]
    last_error: str | None
    breaker: BreakerState
    opened: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A worker's counters and gauges. endings: how fetches ended, `complete` or their reason (missing
    is the usual one), cancelled ones included. shared_pages: pages a fetch got from a read that another
    fetch had begun (single flight). late_pages: pages that came when nobody waited for them any more,
    dropped. known_pages: puts of pages the store had already. chores_lost: touches, and removals of
    unusable pages, that were not done. passed_over: files that could not be deleted when their turn came.
    Gauges: active fetches, reserved_bytes
    of host memory behind them, queued puts and their bytes, threads that live."""

    store: str
    read: LinkStats
    write: LinkStats
    endings: Mapping[str, int]
    shared_pages: int
    late_pages: int
    known_pages: int
    chores_lost: Mapping[Reason, int]
    passed_over: Mapping[Reason, int]
    active_fetches: int
    reserved_bytes: int
    queued_puts: int
    queued_put_bytes: int
    threads: int


class LinkCounters:
    """The growing counters behind a `LinkStats`."""

    __slots__ = ("bytes", "calls", "failures", "last_error", "pages", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        self.pages = 0
        self.bytes = 0
        self.seconds = 0.0
        self.failures: Counter[Reason] = Counter()
        self.last_error: str | None = None

    def call(self, seconds: float) -> None:
        self.calls += 1
        self.seconds += seconds

    def fail(self, reason: Reason, message: str) -> None:
        self.failures[reason] += 1
        self.last_error = message

    def snapshot(self, breaker: BreakerState, opened: int) -> LinkStats:
        return LinkStats(
            self.calls,
            self.pages,
            self.bytes,
            self.seconds,
            dict(self.failures),
            self.last_error,
            breaker,
            opened,
        )
