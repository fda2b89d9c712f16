"""What a store worker has done so far. Owns: the counters, and the frozen snapshot people read.

Rules: counters only grow, and each event is counted in one place. Units: pages, bytes, seconds. Link bytes
are all bytes moved, envelopes and unusable pages included; a page counts under its link only if it was
usable. A `StoreStats` never changes after it was taken.
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
    """One direction between host memory and the store.

    calls: calls made to the store.
    pages: usable pages moved.
    bytes: bytes moved.
    seconds: time spent in calls, summed over all threads.
    failures: by reason. Read link: unusable pages, and calls that failed or overran the time limit. Write
    link: pages that were not stored, whether the store or this side refused them, and calls that overran the
    time limit (their page may still arrive). An absent page is not a failure.
    last_error: the latest failure's message; None if there was none.
    breaker: its state now.
    opened: how often the breaker opened.
    """

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
    """A worker's counters and gauges.

    store: where the store is, for people.
    read, write: the two links.
    endings: how fetches ended: `complete` or a reason (`missing` is the usual one), cancelled ones included.
    shared_pages: pages that a fetch got from a read which another fetch had begun (single flight).
    late_pages: pages that arrived after the last fetch had stopped waiting for them, and were dropped.
    known_pages: puts of pages that the store had already.
    chores_lost: touches, and removals of unusable pages, that were not done, by reason.
    passed_over: files that could not be deleted when eviction came to them, by reason. Gauges, of the moment:
    active_fetches: fetches that have not ended.
    reserved_bytes: host memory reserved for reads.
    queued_puts, queued_put_bytes: pages queued or being written, and their bytes.
    threads: threads that are alive.
    """

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
