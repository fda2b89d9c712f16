"""Getting pages from L3 while their requests wait. Owns: the fetches in flight, and which requests wait for
them.

Rules:
1. A fetch starts as soon as its request is among the first of the queue, in queue order. All fetches together
   hold at most half of L2 (the window), so later requests take no room from the head (rule 36).
2. Payloads arrive in buffers of the driver's. L2 pages are taken only when the payloads land, so late bytes
   can overwrite nothing.
3. A request whose pages are all on their way shares that fetch. A request that lacks more starts its own; a
   driver reads a page once for both.
4. What lands is indexed under the fetch's own tokens, whichever requests wait for it by then.
5. A fetch for which no request waits any more is cancelled, and what still comes of it is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from hotprefix.errors import ProtocolError
from hotprefix.kernel.cache.host import HostTier
from hotprefix.kernel.cache.keys import chain, root_key
from hotprefix.kernel.cache.node import Node
from hotprefix.kernel.config import Prefetch
from hotprefix.kernel.plan import Fetch
from hotprefix.kernel.request import Namespace
from hotprefix.kernel.state.estimates import Estimates
from hotprefix.kernel.state.sequence import Sequence
from hotprefix.kernel.state.tables import Tables
from hotprefix.kernel.tokens import TOKEN_BYTES


@dataclass(slots=True)
class InFlight:
    """One fetch.

    id: its number.
    namespace, tokens: of the prefix whose pages are wanted; `tokens` ends with the last of them.
    first: index of the first wanted page in the prefix.
    keys: names of the wanted pages, in order.
    waiters: the requests that wait for it, by id.
    done: its payloads have arrived.
    pin: protects in L2 what has landed, as long as a request waits; None if nothing landed.
    """

    id: int
    namespace: Namespace
    tokens: bytes
    first: int
    keys: tuple[bytes, ...]
    waiters: dict[str, Sequence] = field(default_factory=dict)
    done: bool = False
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
        self, tables: Tables, host: HostTier, estimates: Estimates, policy: Prefetch, timeout: float,
        minimum: int, look: int,
    ) -> None:  # fmt: skip
        self._tables = tables
        self._host = host
        self._estimates = estimates
        self._policy = policy
        self._timeout = timeout
        self._minimum = minimum
        self._look = look
        self._window = max(1, host.tier.pool.total // 2)
        self._by_id: dict[int, InFlight] = {}
        self._by_key: dict[bytes, InFlight] = {}
        self._held = 0
        self._next = 0
        self._starts: list[Fetch] = []
        self._cancels: list[int] = []
        self._joins: list[tuple[int, str]] = []
        self.counters = PrefetchCounters()

    # -- starting ---------------------------------------------------------------------------------

    def look_ahead(self, queue: Iterable[Sequence]) -> None:
        """Start fetches of what the first waiting requests lack, in order, until the window is full. After
        that the requests behind are still looked at, so that one that lacks nothing need not wait."""
        room = True
        for seq in islice(queue, self._look):
            if not seq.fetch_decided:
                room = self._decide(seq, room) and room

    def _decide(self, seq: Sequence, room: bool) -> bool:
        """Decide, once per wait, whether to fetch for a request. False if the window has no room and it must
        be decided again.

        A fetch begins where L2's copy ends, because L2 holds no page without its parents. What it gains are
        the pages that it brings beyond what L1 holds. Example: L2 has 10 pages of the prompt, L1 has 14, and
        30 can be reused: 20 pages are fetched, and 16 gained.
        """
        page = self._host.tier.page_size
        limit = seq.reuse_limit // page
        local = self._host.match(seq.request.namespace, seq.target_key, limit)
        first = local.pages if local else 0
        device = self._tables.lookup(seq)
        pages = min(limit - first, self._window)
        gain = first + pages - max(first, device.pages if device else 0)
        if gain < self._minimum:
            seq.fetch_decided = True
        elif not self._estimates.choose_fetch(pages, gain, page):
            self.counters.not_worth += 1
            seq.fetch_decided = True
        elif not room or (self._held and self._held + pages > self._window):
            return False
        else:
            seq.fetch_decided = True
            self._join(seq, first, pages)
        return True

    def _join(self, seq: Sequence, first: int, pages: int) -> None:
        page, namespace = self._host.tier.page_size, seq.request.namespace
        tokens = seq.target_key[: (first + pages) * page * TOKEN_BYTES]
        names = tuple(chain(root_key(namespace, page), tokens, page)[first:])
        flight = self._by_key.get(names[-1])
        if flight is None or flight.first > first:
            self._next += 1
            flight = InFlight(self._next, namespace, tokens, first, names)
            self._by_id[flight.id] = flight
            for name in names:
                self._by_key.setdefault(name, flight)
            self._held += pages
            self._starts.append(Fetch(flight.id, names, seq.request.id))
            self.counters.started += 1
            self.counters.pages += pages
        else:
            self.counters.shared += 1
            self._joins.append((flight.id, seq.request.id))
        flight.waiters[seq.request.id] = seq
        seq.fetch = flight.id
        seq.asked = self._host.tier.pool.publications

    # -- waiting ----------------------------------------------------------------------------------

    def must_wait(self, seq: Sequence, now: float) -> bool:
        """Whether the policy keeps a request waiting for its fetch, or for room to begin it."""
        if self._policy is Prefetch.BEST_EFFORT:
            return False
        flight = self._by_id.get(seq.fetch) if seq.fetch is not None else None
        if seq.fetch_decided and (flight is None or flight.done):
            return False
        return self._policy is Prefetch.WAIT_COMPLETE or now - seq.arrival < self._timeout

    def leave(self, seq: Sequence) -> None:
        """Let a request that is admitted or has ended wait for nothing any more."""
        seq.fetch_decided = True
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
        self._held -= len(flight.keys)
        del self._by_id[flight.id]
        self._unname(flight)

    def _unname(self, flight: InFlight) -> None:
        """Let no further request join a fetch."""
        for name in flight.keys:
            if self._by_key.get(name) is flight:
                del self._by_key[name]

    # -- landing ----------------------------------------------------------------------------------

    def arrived(self, fetch: int, pages: int, seconds: float) -> dict[int, int]:
        """The leading `pages` payloads of a fetch are here. Returns, by the payload's index, the L2 page to
        which it must be written. Empty for a fetch that was cancelled meanwhile. Raises ProtocolError if more
        pages came than were asked for."""
        flight = self._by_id.get(fetch)
        if flight is None or flight.done:
            self.counters.late += 1
            return {}
        if pages > len(flight.keys):
            raise ProtocolError(f"fetch {fetch} gave {pages} pages, {len(flight.keys)} were asked for")
        flight.done = True
        self._unname(flight)
        self._estimates.fetched(seconds, pages)
        where, flight.pin = self._host.land(flight.namespace, flight.tokens, flight.first, pages, fetch)
        return where

    # -- plans ------------------------------------------------------------------------------------

    def take(self) -> tuple[tuple[Fetch, ...], tuple[int, ...]]:
        """(starts, cancels) for the plan being made."""
        taken = tuple(self._starts), tuple(self._cancels)
        self._starts, self._cancels = [], []
        return taken

    def take_joins(self) -> list[tuple[int, str]]:
        """(fetch, request) of the requests that joined another request's fetch since the last call."""
        taken, self._joins = self._joins, []
        return taken

    @property
    def in_flight(self) -> int:
        return sum(not flight.done for flight in self._by_id.values())
