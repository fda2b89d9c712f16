"""The kernel: one object that engine and simulator both drive. Owns: the call order at its edge.

Rules:
1. The kernel does no I/O. Time comes in as an argument and never goes backwards.
2. At most one step is in flight: `plan`, execute, `commit`.
3. Submissions and aborts may come at any time in between. An abort of a request in the step in flight takes
   effect with that step's commit.

    submit(request, now) / abort(id, now) / plan(now) -> StepPlan / commit(plan, outcome, now) -> progress
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from hotprefix.errors import ContextLengthExceeded, ProtocolError, QueueFull, RequestRejected
from hotprefix.kernel import events as ev
from hotprefix.kernel.cache.frames import FrameCount
from hotprefix.kernel.cache.host import HostCounters
from hotprefix.kernel.cache.tier import Occupancy
from hotprefix.kernel.cache.tree_watch import TreeWatch
from hotprefix.kernel.config import Capabilities, KernelConfig
from hotprefix.kernel.counters import Counters
from hotprefix.kernel.plan import Finish, Progress, Queue, StepOutcome, StepPlan
from hotprefix.kernel.request import Request, RequestId
from hotprefix.kernel.sched.commit import Committer
from hotprefix.kernel.sched.planner import Planner
from hotprefix.kernel.sched.waiting import QueueReader
from hotprefix.kernel.state.estimates import Predictions
from hotprefix.kernel.state.prefetch import PrefetchCounters
from hotprefix.kernel.state.scheduler_state import SchedulerState, progress_of
from hotprefix.kernel.state.sequence import Sequence
from hotprefix.kernel.tokens import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Status:
    """Gauges of one moment.

    running, waiting, parked: requests by phase.
    l1: pages of L1 by state.
    tree_nodes: nodes of L1's prefix trees.
    namespaces: namespaces that have a tree in L1.
    l2: pages of L2 by state; None without an L2.
    fetches: L3 fetches that have not ended.
    groups: for each layer group, its frames by state.
    """

    running: int
    waiting: int
    parked: int
    l1: Occupancy
    tree_nodes: int
    namespaces: int
    l2: Occupancy | None = None
    fetches: int = 0
    groups: tuple[FrameCount, ...] = ()


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What a flush freed, and what it had to leave because running requests read it; in pages. No lookup
    finds what was left, and it goes with those requests. L3 is not touched, because other engines may use it.

    freed, protected: of L1.
    host_freed, host_protected: of L2.
    """

    freed: int
    protected: int
    host_freed: int = 0
    host_protected: int = 0


class Kernel:
    """See the module's rules. Public methods raise ProtocolError on a broken call order."""

    def __init__(
        self, config: KernelConfig, capabilities: Capabilities | None = None, sink: ev.Sink | None = None,
        kinds: Collection[type[ev.Event]] | None = None,
    ) -> None:  # fmt: skip
        """sink: receives the events. kinds: the kinds of events that it wants; None = all."""
        self.config = config
        self._emit = ev.Emitter(sink, kinds)
        self._s = SchedulerState(config, capabilities or Capabilities(), self._emit)
        self._planner = Planner(self._s)
        self._committer = Committer(self._s)
        self._reader = QueueReader(self._s)
        self._serial = 0
        self._planned = 0
        self._in_flight: StepPlan | None = None

    # -- requests ---------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. Raises RequestRejected (it can never run), ContextLengthExceeded (it needs more
        pages than exist) or QueueFull. A refused request is not remembered."""
        self._tick(now)
        try:
            self._refuse(request)
        except (RequestRejected, QueueFull) as error:
            self._s.counters.rejected += 1
            self._emit(ev.Rejected(now, request.id, type(error).__name__, str(error)))
            raise
        self._serial += 1
        self._s.counters.submitted += 1
        self._s.enter(Sequence(request, self._serial, now))

    def _refuse(self, request: Request) -> None:
        config = self.config
        if request.id in self._s.sequences:
            raise RequestRejected(
                f"request id {request.id!r} is in use: give each request its own", param="id"
            )
        if not request.tokens or len(request.tokens) % TOKEN_BYTES:
            raise RequestRejected("the prompt is empty: give at least one token", param="prompt")
        if len(request.key) != len(request.tokens):
            raise RequestRejected("cache_key and tokens differ in length", param="cache_key")
        if request.max_tokens < 0:
            raise RequestRejected(f"max_tokens={request.max_tokens}: give 0 or more", param="max_tokens")
        if request.next_use_s is not None and not 0 <= request.next_use_s < float("inf"):
            raise RequestRejected(
                f"next_use_s={request.next_use_s}: give seconds >= 0, or None", param="next_use_s"
            )
        positions = request.prompt_len + max(0, request.max_tokens - 1)
        need = self._s.tables.pages_for(positions)
        if need > config.total_pages:
            raise ContextLengthExceeded(
                f"prompt of {request.prompt_len} tokens and {request.max_tokens} outputs need {need} pages "
                f"of {config.page_size}, the cache has {config.total_pages} in all "
                f"({config.total_pages * config.page_size} tokens): shorten one or raise --kv-tokens",
                param="max_tokens",
            )
        waiting = self._waiting()
        if config.max_waiting and waiting >= config.max_waiting:
            raise QueueFull(f"{waiting} requests wait, the limit is {config.max_waiting}: try again later")

    def _waiting(self) -> int:
        """How many requests wait for other requests, as far as that is known.

        Requests that came after the last plan may start with the next one, so of them only those count for
        which there is no free row. If the last plan has left a request in the queue, all of them count: they
        stand behind it. Example: 3 rows are free, the last plan left the queue empty and 5 requests have come
        since: 2 wait.
        """
        s = self._s
        new = s.queue.since(self._planned)
        left = len(s.queue) - new
        return s.parked + left + (new if left else max(0, new - len(s.free_rows)))

    def abort(self, request: RequestId, now: float) -> Progress | None:
        """End a request and return its terminal notice. Returns None if the request is in the step in flight:
        its notice comes with that step's commit. Raises ProtocolError for an unknown id."""
        self._tick(now)
        seq = self._s.sequences.get(request)
        if seq is None:
            raise ProtocolError(f"request {request!r} is unknown or has ended")
        if self._in_flight is not None and any(c.request == request for c in self._in_flight.chunks):
            seq.aborted = True
            return None
        return self._s.end(seq, Finish.ABORT)

    def progress(self, request: RequestId) -> Progress:
        """What a request has come to so far. Raises ProtocolError for an unknown id."""
        seq = self._s.sequences.get(request)
        if seq is None:
            raise ProtocolError(f"request {request!r} is unknown or has ended")
        return progress_of(seq, None)

    # -- steps ------------------------------------------------------------------------------------

    def refresh(self, now: float) -> bool:
        """Do the first part of the planning pass that the next `plan` completes: bring recency and holds up
        to date. It is for a driver that measures how long this takes; if it was not called, `plan` does it.
        Returns True if waiting prefixes were refreshed. Raises ProtocolError while a step is in flight, or if
        it is called twice for one plan."""
        self._tick(now)
        if self._in_flight is not None or self._planner.begun:
            raise ProtocolError("refresh belongs before a plan, once, while no step is in flight")
        return self._planner.begin()

    def plan(self, now: float) -> StepPlan:
        """The next step. An `empty` plan is not committed, but its fetches, cancels and touches are to be
        carried out. Raises ProtocolError while a step is in flight."""
        self._tick(now)
        if self._in_flight is not None:
            raise ProtocolError(f"step {self._in_flight.step} is not committed yet")
        self._planned = self._serial
        plan = self._planner.plan()
        if not plan.empty:
            self._in_flight = plan
            self._s.planned_at = now
        return plan

    def commit(
        self, plan: StepPlan, outcome: StepOutcome, now: float, *, every: bool = True
    ) -> tuple[Progress, ...]:
        """Apply the outcome of the plan in flight and return what its requests gained. Each request's last
        progress has `finish`. every: False leaves out decodes that merely gained a token. Raises
        ProtocolError if `plan` is not the one in flight, or the outcome does not answer it."""
        self._tick(now)
        if plan is not self._in_flight:
            raise ProtocolError(f"step {plan.step} is not the one in flight")
        progress = self._committer.commit(plan, outcome, every)
        self._in_flight = None
        return progress

    def transfer_done(self, fetch: int, pages: int, seconds: float, now: float) -> Mapping[int, int]:
        """A fetch has ended with its leading `pages` payloads (0: a miss, or a failure), after `seconds`.

        Returns, by the payload's index, the L2 page to which it must be written before the next plan.
        Payloads that are not named are to be dropped. Empty for a fetch that was cancelled meanwhile. Raises
        ProtocolError while a step is in flight, which may be reading those pages.
        """
        self._tick(now)
        if self._in_flight is not None:
            raise ProtocolError("a transfer was reported while a step is in flight")
        if self._s.prefetch is None:
            raise ProtocolError(f"fetch {fetch} was reported, but there is no L3")
        where = self._s.prefetch.arrived(fetch, pages, seconds)
        self._emit(ev.FetchEnded(now, fetch, pages, len(where), seconds))
        return where

    # -- the cache as a whole ---------------------------------------------------------------------

    def flush(self, now: float) -> FlushReport:
        """Let no later request find in L1 and L2 what was computed before, nor what the requests that run now
        compute. Drops every cached page that no running request reads, and the copies to L2 and L3 that have
        not begun. The holds of sessions end."""
        self._tick(now)
        for seq in self._s.running:
            seq.private = True
        while self._s.sessions.drop_oldest():
            pass
        if self._s.host is not None and self._in_flight is None:
            self._s.host.forget_queued()
        freed = self._s.l1.flush()
        self._s.counters.flushed_pages += freed
        host = self._s.host.tier if self._s.host is not None else None
        host_freed = host.flush() if host is not None else 0
        host_protected = host.occupancy().protected if host is not None else 0
        protected = self._s.l1.occupancy().protected
        self._emit(ev.Flushed(now, freed, protected))
        return FlushReport(freed, protected, host_freed, host_protected)

    @property
    def has_work(self) -> bool:
        """True while any request has not ended, or copies wait for a plan to carry them."""
        s = self._s
        return bool(s.sequences) or (s.host is not None and s.host.pending)

    def watch_pages(self, watch: TreeWatch) -> None:
        """Tell `watch` of every page that comes to and goes from L1's tree (KV events)."""
        self._s.l1.tree.watch_pages(watch)

    def watch_host_pages(self, watch: TreeWatch) -> None:
        """Tell `watch` of every page that comes to and goes from L2's tree. Without an L2 there is none."""
        if self._s.host is not None:
            self._s.host.tier.tree.watch_pages(watch)

    @property
    def tier_counters(self) -> tuple[HostCounters, PrefetchCounters]:
        """(pages by link, what became of fetches); all zero without those tiers."""
        s = self._s
        return (
            s.host.counters if s.host is not None else HostCounters(),
            s.prefetch.counters if s.prefetch is not None else PrefetchCounters(),
        )

    @property
    def predictions(self) -> Predictions | None:
        """Restore or recompute, predicted and seen; None without an L2."""
        return self._s.tiers.estimates.seen if self._s.tiers is not None else None

    @property
    def counters(self) -> Counters:
        return self._s.counters

    @property
    def sink_failure(self) -> str | None:
        """Why the event sink was switched off, if it was."""
        return self._emit.failed

    @property
    def load(self) -> tuple[int, int]:
        """(running, waiting) requests."""
        return len(self._s.running), len(self._s.queue) + self._s.parked

    def status(self, now: float | None = None) -> Status:
        """Gauges at the time `now`; None = the time of the last call. A session's hold whose time is up
        counts as ended even if no plan has ended it yet. Changes nothing."""
        s = self._s
        back = s.sessions.expired(s.now if now is None else now)
        l1 = s.l1.occupancy()
        l1 = replace(l1, evictable=l1.evictable + back.pages, protected=l1.protected - back.pages)
        return Status(
            len(s.running), len(s.queue), s.parked, l1, s.l1.tree.nodes, s.l1.tree.namespaces,
            s.host.tier.occupancy() if s.host is not None else None,
            s.prefetch.in_flight if s.prefetch is not None else 0,
            tuple(group.count(back.frames.get(group, 0)) for group in s.l1.groups),
        )  # fmt: skip

    def waiting(self, now: float) -> Queue:
        """How old the oldest waiting request is, and why the head of the queue does not start. It is computed
        when asked for, and changes nothing."""
        return self._reader.read(now)

    def outstanding(self) -> tuple[int, int]:
        """(positions that are still to be computed before every request decodes, requests that decode).
        Changes nothing."""
        return self._reader.outstanding()

    def check(self) -> None:
        """Raise ProtocolError unless pages are conserved, page by page, and nothing is remembered of ended
        requests. It walks over all pages, so it is for tests and for idle moments."""
        s = self._s
        s.l1.check(page for seq in s.running for page in seq.owned)
        s.tables.windows.check(s.running, s.sessions.tails())
        if s.host is not None:
            s.host.tier.check(())
            if not self.has_work and self._in_flight is None and s.host.tier.tree.protected_pages:
                raise ProtocolError("idle, yet pages of L2 are protected")
        phases = len(s.running) + len(s.queue) + s.parked
        if phases != len(s.sequences) or len(s.free_rows) + len(s.running) != self.config.max_running:
            raise ProtocolError(f"{phases} requests in phases, {len(s.sequences)} known")
        if s.flights is not None and s.flights.tracked != len(s.sequences):
            raise ProtocolError(f"{s.flights.tracked} ids in flights, {len(s.sequences)} known")
        if not s.sequences and not len(s.sessions) and (s.l1.tree.protected_pages or s.suspects):
            raise ProtocolError("idle, yet pages are protected")

    def _tick(self, now: float) -> None:
        if now < self._s.now:
            raise ProtocolError(f"time went from {self._s.now} back to {now}")
        self._s.now = now
