"""Everything one kernel remembers. Owns: the shared state, and the only transitions between phases.

Rules:
1. A sequence is admitted, retracted and ended here and nowhere else, so on every path its pin, pages, row and
   place in a flight are returned (rule 5).
2. An ended sequence is forgotten.
"""

from __future__ import annotations

from bisect import bisect_right

from hotprefix.kernel import events as ev
from hotprefix.kernel.cache.expected_reuse import Expected
from hotprefix.kernel.cache.node import Match, Node
from hotprefix.kernel.cache.tier import Tier
from hotprefix.kernel.config import Capabilities, Eviction, Flight, KernelConfig, Order
from hotprefix.kernel.counters import Counters
from hotprefix.kernel.plan import Finish, Progress
from hotprefix.kernel.request import RequestId
from hotprefix.kernel.sources import Source, Taken
from hotprefix.kernel.state.flight import ExactFlights
from hotprefix.kernel.state.publish import publishable, rules_for
from hotprefix.kernel.state.queue import WaitingQueue
from hotprefix.kernel.state.reserve import Reserve
from hotprefix.kernel.state.sequence import Phase, Sequence
from hotprefix.kernel.state.sessions import SessionHolds
from hotprefix.kernel.state.tables import Tables
from hotprefix.kernel.state.tiers import LowerTiers


class SchedulerState:
    """See the module's rules.

    Settings:
    config: as given.
    rules: when other requests can find computed pages (publish.py).
    preempts: a waiting request may displace less important running ones.

    Clocks and counts:
    now: the time of the kernel's latest call, seconds.
    planned_at: the time at which the plan in flight was made.
    step: the number of planning passes so far.
    counters: see `Counters`.
    emit: takes the events.

    Requests:
    sequences: every request that has not ended, by id.
    queue: those that wait.
    parked: how many wait behind a flight's leader, outside the queue.
    running: those that run, in the order of admission.
    suspects: the requests of failed steps that are not past the point of failure, by id.
    free_rows: the batch's rows that no request has.
    reserve: the share of outputs that an admission leaves room for.

    The cache:
    l1: its pages and prefix trees.
    tables: what running sequences hold of it.
    sessions: the pins that ended requests left for their sessions' next ones.
    flights: which request computes a prompt that several need; None unless the flight is an exact one.
    tiers: what lies below L1; None without an L2.
    host, prefetch: those of `tiers`; None if there are none.
    """

    def __init__(self, config: KernelConfig, capabilities: Capabilities, emit: ev.Emitter) -> None:
        self.config = config
        self.rules = rules_for(config, capabilities)
        self.emit = emit
        self.counters = Counters()
        self.now = 0.0
        self.planned_at = 0.0
        self.step = 0
        self.l1 = Tier(config.total_pages, config.page_size, config.eviction, self._on_evict, config.groups)
        self.tables = Tables(self.l1)
        self.queue = WaitingQueue()
        self.running: list[Sequence] = []
        self.sequences: dict[RequestId, Sequence] = {}
        self.suspects: dict[RequestId, Sequence] = {}
        self.parked = 0
        self.sessions = SessionHolds(self.l1.tree, config.session_pages)
        self.free_rows = list(range(config.max_running - 1, -1, -1))
        self.reserve = Reserve(config.output_reserve)
        self.preempts = config.preemption and config.order is Order.PRIORITY
        exact = config.flight in (Flight.EXACT_FINISH, Flight.EXACT_PREFILL) and config.prefix_cache
        self.flights = ExactFlights(config.max_elections) if exact else None
        self.tiers: LowerTiers | None = None
        if config.tiers is not None and config.prefix_cache:
            self.tiers = LowerTiers(config.tiers, self.l1, self.tables)
        self.host = self.tiers.host if self.tiers is not None else None
        self.prefetch = self.tiers.prefetch if self.tiers is not None else None

    @property
    def given_back(self) -> tuple[int, int]:
        """A pair of counts that changes whenever room may have been gained in L1."""
        return self.tables.given_back, self.l1.tree.unprotected

    def is_end(self, node: Node) -> bool:
        """Whether the shared part of any running sequence ends with this node. Its next page will be hung
        there."""
        return any(seq.handle is node for seq in self.running)

    def _on_evict(self, pages: list[int]) -> None:
        self.counters.evicted_pages += len(pages)
        if self.emit.wants(ev.Evicted):
            self.emit(ev.Evicted(self.now, tuple(pages)))

    # -- entering ---------------------------------------------------------------------------------

    def enter(self, seq: Sequence) -> None:
        """Let a submitted sequence wait, or park it behind its flight's leader."""
        self.sequences[seq.request.id] = seq
        match = self.tables.lookup(seq)
        seq.matched_at_enqueue = (match.pages - match.planned) * self.config.page_size if match else 0
        seq.seen = self.l1.pool.publications
        parked = self._join_flight(seq)
        if parked:
            seq.phase = Phase.PARKED
            self.parked += 1
        else:
            self.queue.add(seq)
        request = seq.request
        self.emit(ev.Enqueued(self.now, request.id, request.prompt_len, seq.matched_at_enqueue, parked))

    def _join_flight(self, seq: Sequence) -> bool:
        if self.flights is None:
            return False
        request = seq.request
        if request.reuse_limit is not None or request.share_limit is not None:
            self.flights.independent(request.id)
            return False
        return self.flights.join(request.id, (request.namespace, request.key))

    def wake(self, woken: list[RequestId]) -> None:
        """Put followers whose wait is over into the queue, each at the place of its arrival."""
        for request in woken:
            seq = self.sequences[request]
            seq.phase = Phase.WAITING
            self.parked -= 1
            self.queue.add(seq)

    def waits_for_storage(self, seq: Sequence) -> bool:
        """Whether a waiting sequence is not to be admitted yet, because its pages are on their way from
        L3."""
        return self.prefetch is not None and self.prefetch.must_wait(seq, self.now)

    # -- admission and retraction -----------------------------------------------------------------

    def admit(self, seq: Sequence, match: Match | None) -> None:
        """Let a waiting sequence run: it gets a row and a persistent pin, and takes over the pages of `match`
        (None: it takes none)."""
        self.queue.take_admitted(seq)
        seq.phase = Phase.RUNNING
        seq.row = self.free_rows.pop()
        self.tables.open(seq)
        if match is not None:
            self.take_over(seq, match)
        seq.started = False
        self.running.append(seq)
        resident = (match.pages - match.planned) * self.config.page_size if match else 0
        seq.held = None
        restored = 0
        if self.tiers is not None:
            restored = self.tiers.admitted(seq, resident // self.config.page_size, self.step)
        self._note_admission(seq, resident)
        if restored and self.tiers is not None:
            self._note_restore(seq, restored, self.tiers)

    def take_over(self, seq: Sequence, match: Match) -> None:
        """Let a running sequence use the tree's pages up to the end of a match instead of computing them, and
        note where each page comes from (sources.py)."""
        before, start, page = seq.shared, seq.computed, self.config.page_size
        if not self.tables.adopt(seq, match):
            return
        # Pages of the arrival's hit that have stayed were published before the arrival. If one page of the
        # prefix was, so were all before it; hence the bisection.
        seen = min(seq.matched_at_enqueue // page, seq.shared)
        same = bisect_right(seq.table, seq.seen, before, seen, key=self.l1.pool.published.__getitem__)
        if same > before:
            seq.taken.append(Taken(start, same * page, Source.DEVICE, same=True))
            start = same * page
        if start < seq.computed:
            if self.tiers is None:
                seq.taken.append(Taken(start, seq.computed, Source.DEVICE))
            else:
                self.tiers.took(seq, start, self.step)

    def _note_restore(self, seq: Sequence, count: int, tiers: LowerTiers) -> None:
        """Note that the step being planned copies the last `count` pages that a sequence shares from L2."""
        self.note_published(seq, count, planned=True)
        if self.emit.wants(ev.RestoreStarted):
            first = seq.shared - count
            pages = tuple(seq.table[first : seq.shared])
            fetches = tuple(tiers.brought_by(page) for page in pages)
            self.emit(ev.RestoreStarted(self.now, seq.request.id, first, pages, fetches))

    def _note_admission(self, seq: Sequence, resident: int) -> None:
        """Tell of an admission. resident: tokens of the match; pages that are only planned do not count."""
        if self.emit.wants(ev.Admitted):
            waited = self.now - seq.arrival
            copied = dict.fromkeys(Source, 0)
            for part in seq.taken:
                copied[part.source] += part.stop - part.start
            self.emit(
                ev.Admitted(
                    self.now, seq.request.id, resident, seq.matched_at_enqueue, copied[Source.HOST],
                    copied[Source.STORAGE], seq.computed, waited, seq.retractions > 0,
                )
            )  # fmt: skip

    def retract(self, seq: Sequence, reason: str) -> None:
        """Send a running sequence back to the queue. Its complete computed pages stay in the cache as long as
        they last."""
        self._leave_pages(seq)
        lost = seq.computed
        seq.retractions += 1
        seq.restart()
        self.queue.add(seq)
        self.counters.retractions += 1
        self._hand_over(seq)
        self.emit(ev.Retracted(self.now, seq.request.id, reason, lost))

    def _leave_pages(self, seq: Sequence) -> None:
        """Publish what a running sequence has computed, and return its row, its pin and its own pages.

        If its pin is on planned pages, their step has failed. It had published all that it had computed
        before them, and the planned pages are taken back with that step.
        """
        if not seq.pin.planned:
            self.publish(seq, ended=True)
            if self.tiers is not None:
                self.tiers.leaves(seq)
        self.tables.release(seq)
        self.free_rows.append(seq.row)
        self.running.remove(seq)

    def publish(self, seq: Sequence, *, ended: bool) -> None:
        """Let others find as many of a sequence's complete pages as the rules allow. Pages that were planned
        before are real by now. ended: it computes no more."""
        self.tables.join_runs(seq)
        before = seq.shared
        added = self.tables.publish(seq, publishable(self.rules, seq, ended))
        self.counters.indexed_pages += added
        self.counters.duplicate_pages += seq.shared - before - added
        if added:
            self.note_published(seq, added, planned=False)

    def note_published(self, seq: Sequence, added: int, *, planned: bool) -> None:
        """Tell that the last `added` pages that a sequence shares are new in the tree."""
        if self.emit.wants(ev.Published):
            first = seq.shared - added
            pages = tuple(seq.table[first : seq.shared])
            self.emit(ev.Published(self.now, seq.request.id, first, pages, planned))

    # -- ending -----------------------------------------------------------------------------------

    def end(
        self, seq: Sequence, finish: Finish, token: int | None = None, error: str | None = None
    ) -> Progress:
        """The one exit of every request: return all that it holds, forget it, and give its terminal notice.
        token: the last one sampled, if the step sampled one."""
        if seq.phase is Phase.RUNNING:
            if finish in (Finish.STOP, Finish.LENGTH):
                self._prepare_next(seq)
            self._leave_pages(seq)
        elif seq.phase is Phase.WAITING:
            self.queue.remove(seq)
        else:
            self.parked -= 1
        if self.prefetch is not None:
            self.prefetch.leave(seq)
        seq.phase = Phase.ENDED
        if finish in (Finish.STOP, Finish.LENGTH):
            self.release_flight(seq)
        else:
            self._hand_over(seq)
        if self.flights is not None:
            self.flights.forget(seq.request.id)
        del self.sequences[seq.request.id]
        self.suspects.pop(seq.request.id, None)
        self._count_end(seq, finish)
        return progress_of(seq, token, finish, error)

    def _prepare_next(self, seq: Sequence) -> None:
        """Prepare for the next request of a well ended request's session. If its time was predicted (eviction
        `reuse`), a use is expected at the end of what this request published. If the request asks for a hold,
        its session keeps a pin of its own there."""
        request = seq.request
        wait = request.next_use_s if self.config.eviction is Eviction.REUSE else None
        hold = request.session if request.hold_s > 0 else None
        if not self.config.prefix_cache or seq.private or (wait is None and hold is None):
            return
        self.publish(seq, ended=True)
        if wait is not None:
            self.l1.tree.expect(seq.pin, Expected.after(self.now, wait))
        if hold is not None:
            handle = self.l1.tree.pin_again(seq.pin)
            self.sessions.expire(self.now)  # a hold whose time is up takes no room from this one
            key, tail = (request.namespace, hold), self.tables.windows.tail(seq)
            if not self.sessions.take(key, handle, seq.shared, self.now + request.hold_s, tail):
                self.l1.tree.unpin(handle)

    def _count_end(self, seq: Sequence, finish: Finish) -> None:
        if finish is Finish.ABORT:
            self.counters.aborted += 1
        elif finish is Finish.ERROR:
            self.counters.failed += 1
        else:
            self.counters.finished += 1
        self.emit(
            ev.Finished(
                self.now, seq.request.id, finish, seq.cached, seq.host, seq.storage, seq.computed_total,
                seq.recomputed, seq.outputs, seq.retractions, seq.executed,
            )
        )  # fmt: skip

    def release_flight(self, seq: Sequence) -> None:
        """Wake the followers if this sequence leads a flight: what they wait for is published."""
        if self.flights is not None and self.flights.leads(seq.request.id):
            self.wake(self.flights.release(seq.request.id))

    def _hand_over(self, seq: Sequence) -> None:
        if self.flights is not None and self.flights.leads(seq.request.id):
            self.wake(self.flights.hand_over(seq.request.id))


def progress_of(
    seq: Sequence, token: int | None, finish: Finish | None = None, error: str | None = None
) -> Progress:
    """What a driver is told about a request; all sampled tokens are in it only if the request has ended."""
    return Progress(
        seq.request.id, token, finish, seq.cached, seq.computed_total, error, seq.host, seq.storage,
        seq.recomputed, seq.outputs, b"" if finish is None else bytes(seq.said),
    )  # fmt: skip
