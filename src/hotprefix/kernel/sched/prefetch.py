"""Getting pages from L3 while their requests wait. Owns: the fetches in flight and who waits for them.

Rules (kernel.md, *Tiers*): a fetch starts as soon as its request is among the first of the queue, in
queue order, and never holds more of L2 than its window, so late waiters take nothing from the head
(handed case 176). Payloads arrive in buffers of the driver's; L2 pages are taken only when they land,
so nothing can be overwritten by late bytes. Two requests that lack the same pages share one fetch. A
fetch nobody waits for any more is cancelled; what comes of it then is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from hotprefix.kernel.cache.host import HostTier
from hotprefix.kernel.cache.keys import chain, root_key
from hotprefix.kernel.cache.node import Node
from hotprefix.kernel.config import Prefetch
from hotprefix.kernel.plan import Fetch
from hotprefix.kernel.sched.estimates import Estimates
from hotprefix.kernel.sequence import Sequence
from hotprefix.kernel.tokens import TOKEN_BYTES


@dataclass(slots=True)
class InFlight:
    """pages: wanted, from page `first` of the prefix `key`. pin: on what has landed, while anybody
    waits."""

    id: int
    first: int
    pages: int
    keys: tuple[bytes, ...]
    waiters: dict[str, Sequence] = field(default_factory=dict)
    done: bool = False
    landed: int = 0
    pin: Node | None = None


@dataclass(slots=True)
class PrefetchCounters:
    started: int = 0
    shared: int = 0
    cancelled: int = 0
    late: int = 0
    not_worth: int = 0
    pages: int = 0


class Prefetcher:
    """Fetches of one kernel."""

    def __init__(
        self, host: HostTier, estimates: Estimates, policy: Prefetch, timeout: float, minimum: int, look: int
    ) -> None:
        self._host = host
        self._estimates = estimates
        self._policy = policy
        self._timeout = timeout
        self._minimum = minimum
        self._look = look
        self._window = host.tier.pool.total // 2
        self._by_id: dict[int, InFlight] = {}
        self._by_key: dict[bytes, InFlight] = {}
        self._held = 0
        self._next = 0
        self._starts: list[Fetch] = []
        self._cancels: list[int] = []
        self.counters = PrefetchCounters()

    # -- starting ---------------------------------------------------------------------------------

    def look_ahead(self, queue: Iterable[Sequence]) -> None:
        """Start what the first waiting requests lack, in order, until the window is full."""
        for seq in islice(queue, self._look):
            if not seq.fetch_decided and not self._decide(seq):
                return

    def _decide(self, seq: Sequence) -> bool:
        """Decide once per wait; False where the window is full and it must be asked again."""
        page = self._host.tier.page_size
        limit = seq.reuse_limit // page
        local = self._host.match(seq.request.namespace, seq.target_key, limit)
        have = max(seq.memo.pages if seq.memo else 0, local.pages if local else 0)
        lacking = limit - have
        if lacking < self._minimum:
            seq.fetch_decided = True
            return True
        if not self._estimates.worth_fetching(lacking, page):
            self.counters.not_worth += 1
            seq.fetch_decided = True
            return True
        if self._held and self._held + lacking > self._window:
            return False
        lacking = min(lacking, self._window)
        seq.fetch_decided = True
        self._join(seq, have, lacking)
        return True

    def _join(self, seq: Sequence, have: int, lacking: int) -> None:
        page = self._host.tier.page_size
        key = seq.target_key[: (have + lacking) * page * TOKEN_BYTES]
        names = chain(root_key(seq.request.namespace, page), key, page)[have:]
        flight = self._by_key.get(names[0])
        if flight is None:
            self._next += 1
            flight = InFlight(self._next, have, lacking, tuple(names))
            self._by_id[flight.id] = self._by_key[names[0]] = flight
            self._held += lacking
            self._starts.append(Fetch(flight.id, flight.keys, seq.request.id))
            self.counters.started += 1
            self.counters.pages += lacking
        else:
            self.counters.shared += 1
        flight.waiters[seq.request.id] = seq
        seq.fetch = flight.id

    # -- waiting ----------------------------------------------------------------------------------

    def must_wait(self, seq: Sequence, now: float) -> bool:
        """Whether the policy keeps a request waiting for its fetch."""
        flight = self._by_id.get(seq.fetch) if seq.fetch is not None else None
        if flight is None or flight.done or self._policy is Prefetch.BEST_EFFORT:
            return False
        return self._policy is Prefetch.WAIT_COMPLETE or now - seq.arrival < self._timeout

    def leave(self, seq: Sequence) -> None:
        """A request is admitted or has ended: it waits for nothing any more."""
        if seq.fetch is None:
            return
        flight = self._by_id.get(seq.fetch)
        seq.fetch = None
        if flight is None:
            return
        flight.waiters.pop(seq.request.id, None)
        if flight.waiters:
            return
        if not flight.done:
            self._cancels.append(flight.id)
            self.counters.cancelled += 1
        self._forget(flight)

    def _forget(self, flight: InFlight) -> None:
        if flight.pin is not None:
            self._host.tier.tree.unpin(flight.pin)
            flight.pin = None
        self._held -= flight.pages
        del self._by_id[flight.id]
        if self._by_key.get(flight.keys[0]) is flight:
            del self._by_key[flight.keys[0]]

    # -- landing ----------------------------------------------------------------------------------

    def arrived(self, fetch: int, pages: int, seconds: float) -> dict[int, int]:
        """The leading `pages` payloads of a fetch are here: which L2 page each must be written to now,
        by index. Empty for a fetch that was cancelled meanwhile."""
        flight = self._by_id.get(fetch)
        if flight is None or flight.done:
            self.counters.late += 1
            return {}
        flight.done = True
        self._by_key.pop(flight.keys[0], None)
        if pages:
            self._estimates.fetch.learn(seconds, pages)
        seq = next(iter(flight.waiters.values()))
        where, flight.pin = self._host.land(seq.request.namespace, seq.target_key, flight.first, pages)
        flight.landed = len(where)
        for waiter in flight.waiters.values():
            waiter.from_storage = (flight.first, flight.first + pages)
        return where

    # -- plans ------------------------------------------------------------------------------------

    def take(self) -> tuple[tuple[Fetch, ...], tuple[int, ...]]:
        """(starts, cancels) for the plan being made."""
        taken = tuple(self._starts), tuple(self._cancels)
        self._starts, self._cancels = [], []
        return taken

    @property
    def in_flight(self) -> int:
        return sum(not flight.done for flight in self._by_id.values())
