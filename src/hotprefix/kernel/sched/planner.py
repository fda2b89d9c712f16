"""Step planning. Owns: which requests one forward pass computes, in which order, and which one gives way.

The problem: each step has a token budget, and L1 has a number of pages. Which requests does the step advance,
and which waiting ones may start, so that none starves and no page is computed twice?

Rules, in the order in which a plan is made:
1. A new pass begins with upkeep (`begin`): the reserve decays, holds whose time is up end, runs are joined
   again, and waiting prefixes are refreshed.
2. If requests of a failed step are left, the first of them is planned alone (rule 25). The rest below applies
   only if it cannot run yet.
3. With preemption, less important running requests are displaced first. If decodes lack pages, holds of
   sessions are dropped, and then the cheapest running requests retracted, until all decodes fit.
4. Decodes are planned first, then running prefills, then admissions, under one token budget (rule 17).
   chunking.py decides how far each goes, and admit.py whether a waiting request fits.
5. If nothing can be computed although requests run, one of them gives way, and the planner tries again.
6. If still nothing can be computed, holds of sessions are dropped one by one. After that it is a stall, and
   the plan says why.

Example (pages of 16, publication `schedule`, flight `coalesced`): a budget of 2048, 10 decodes, a running
prefill with 500 tokens left, and two waiting prompts of 2000 tokens that share their first 1600, none of them
in the cache. The decodes take 10 tokens and the prefill 500. The first waiting prompt gets 1536 of the 1538
that are left: whole pages. In the next step there are 11 decodes. The first prompt computes its last 464
tokens, and with them the last 64 shared ones. So the second prompt starts behind the shared 1600 in that very
step and computes its own 400.
"""

from __future__ import annotations

from hotprefix.kernel import events as ev
from hotprefix.kernel.cache.host import Moves
from hotprefix.kernel.config import Order
from hotprefix.kernel.plan import Admission as AdmissionRecord
from hotprefix.kernel.plan import Fetch, Stall, StepPlan
from hotprefix.kernel.request import RequestId
from hotprefix.kernel.sched.admit import Admission, Verdict
from hotprefix.kernel.sched.chunking import StepChunks
from hotprefix.kernel.sched.refresh import QueueRefresh
from hotprefix.kernel.sched.repeats import Repeats
from hotprefix.kernel.state.prefetch import Prefetcher
from hotprefix.kernel.state.scheduler_state import SchedulerState
from hotprefix.kernel.state.sequence import Phase, Sequence

NOTHING = Moves()


class Planner:
    """Builds one StepPlan at a time. begun: the first part of a pass has been done, and the rest has not."""

    def __init__(self, state: SchedulerState) -> None:
        self._s = state
        self._admission = Admission(state)
        self._refresh = QueueRefresh(state)
        self._repeats = Repeats(state, self._admission, self._refresh)
        self._step = StepChunks(state)
        self._admitted: list[AdmissionRecord] = []
        self._retracted: list[RequestId] = []
        self._blocked: list[Sequence] = []
        self.begun = False

    def begin(self) -> bool:
        """Do a planning pass's first part. True if waiting prefixes were refreshed."""
        s, passes = self._s, self._s.counters.refresh_passes
        self.begun = True
        s.step += 1
        s.reserve.relax()
        s.sessions.expire(s.now)
        s.l1.tree.lapse(s.now)
        s.l1.tree.tidy()
        self._refresh.run()
        return s.counters.refresh_passes > passes

    def plan(self) -> StepPlan:
        """Do the rest of the pass (all of it if `begin` was not called), and return its plan."""
        s = self._s
        if not self.begun:
            self.begin()
        self.begun = False
        step = self._step = StepChunks(s)
        self._admitted, self._retracted, self._blocked = [], [], []
        if s.prefetch is not None:
            s.prefetch.look_ahead(s.queue)
        while True:
            if not (s.suspects and self._plan_alone(next(iter(s.suspects.values())))):
                self._plan_batch()
            # Holds of sessions give way if nothing else can run.
            if step.chunks or not (self._starved() and s.sessions.drop_oldest()):
                break
        planned = bool(step.chunks)
        stall = None if planned else self._note_stall()
        fetches, cancels = self._take_fetches(s.prefetch) if s.prefetch is not None else ((), ())
        moves = s.host.take() if s.host is not None else NOTHING
        repeat = 1
        if planned and not (step.prefilled or self._retracted or fetches or cancels or moves != NOTHING):
            repeat = self._repeats.of(len(step.chunks), self._blocked)
        frames = s.tables.windows.take_assigned() if planned else ()
        return StepPlan(
            s.step, tuple(step.chunks), tuple(self._admitted), tuple(self._retracted), stall, fetches,
            cancels, moves.stores, moves.saves, moves.restores, moves.touches, repeat, frames,
        )  # fmt: skip

    def _take_fetches(self, prefetch: Prefetcher) -> tuple[tuple[Fetch, ...], tuple[int, ...]]:
        """(starts, cancels) for the plan; their events are emitted."""
        s = self._s
        fetches, cancels = prefetch.take()
        for fetch in fetches:
            s.emit(ev.FetchStarted(s.now, fetch.id, fetch.request, len(fetch.keys)))
        for number, request in prefetch.take_joins():
            s.emit(ev.FetchJoined(s.now, number, request))
        return fetches, cancels

    def _plan_batch(self) -> None:
        s, step = self._s, self._step
        if s.preempts:
            self._preempt()
        while True:
            step.refill()
            self._make_room_for_decodes()
            step.add_decodes()
            for seq in self._prefills():
                if s.preempts:
                    self._admit(above=seq.request.priority)
                step.go_on(seq)
            self._admit()
            if step.chunks:
                return
            # Running prefills hold pages and wait for each other's. The cheapest gives way.
            victim = self._admission.victim(s.running)
            if victim is None or len(s.sessions):
                return
            self._retract(victim, "no running request could go on")

    def _plan_alone(self, seq: Sequence) -> bool:
        """Plan nothing but one suspect. False if it cannot run yet."""
        self._step.refill()
        if seq.phase is Phase.RUNNING:
            self._step.go_on(seq)
        elif self._s.free_rows and self._admission.attempt(seq) is Verdict.ADMITTED:
            self._start(seq)
        return bool(self._step.chunks)

    # -- running requests -------------------------------------------------------------------------

    def _make_room_for_decodes(self) -> None:
        """Drop holds of sessions, then retract the cheapest victims, until every decode can have the page of
        its next position."""
        s = self._s
        page = s.config.page_size
        while True:
            need = 0
            for q in s.running:
                if q.computed // page >= len(q.table) and q.length - q.computed == 1:
                    need += 1
            if need <= s.l1.available:
                return
            if s.sessions.drop_oldest():
                continue
            victim = self._admission.victim(s.running)
            if victim is None:
                return
            self._retract(victim, f"decodes need {need} pages, {s.l1.available} available")

    def _prefills(self) -> list[Sequence]:
        """Running prefills in the order to continue them."""
        prefills = [seq for seq in self._s.running if seq.remaining > 1]
        if self._s.config.order is Order.PRIORITY:
            prefills.sort(key=lambda seq: seq.request.priority)
        return prefills

    # -- waiting requests -------------------------------------------------------------------------

    def _admit(self, above: int | None = None) -> None:
        """Try waiting requests in order. The rest is not tried after `lookahead` + 1 requests that do not
        fit, or after one that does not fit and may not be overtaken any more. above: only requests that are
        more important than this priority are tried."""
        s, step = self._s, self._step
        if not (step.budget and s.free_rows and len(s.queue)) or self._suspect_overtaken():
            return
        blocked = 0
        for seq in self._admission.ordered():
            if not (step.budget and s.free_rows) or (above is not None and seq.request.priority >= above):
                return
            shut = self._admission.shut(seq) or not self._can_start(seq)
            verdict = Verdict.BLOCKED if shut else self._admission.attempt(seq)
            if verdict is Verdict.ADMITTED:
                self._start(seq)
            elif verdict is Verdict.BLOCKED:
                blocked += 1
                self._blocked.append(seq)
                if blocked > s.config.lookahead or seq.overtaken >= s.config.max_overtakes:
                    return

    def _suspect_overtaken(self) -> bool:
        """Whether a suspect that finds no room has been overtaken as often as is allowed. Then no other
        request may start."""
        return any(q.overtaken >= self._s.config.max_overtakes for q in self._s.suspects.values())

    def _can_start(self, seq: Sequence) -> bool:
        """Whether the rest of the budget is enough for the sequence's first chunk."""
        start = self._admission.cached_tokens(seq)
        return self._step.stop(start, seq.length) > start

    def _start(self, seq: Sequence) -> None:
        self._admitted.append(AdmissionRecord(seq.request.id, seq.row, seq.computed))
        self._step.add(seq)

    def _preempt(self) -> None:
        """Make room for the first waiting request by retracting less important ones. A request that waits for
        its pages from L3 is passed over, because it would not use the room yet."""
        ready = self._ready()
        if ready:
            for seq in self._admission.preempt_for(ready[0]):
                self._retracted.append(seq.request.id)

    def _ready(self) -> list[Sequence]:
        """Waiting sequences in order, without those that wait for L3."""
        return [seq for seq in self._admission.ordered() if not self._s.waits_for_storage(seq)]

    def _retract(self, seq: Sequence, reason: str) -> None:
        self._s.retract(seq, reason)
        self._s.reserve.fill()
        self._retracted.append(seq.request.id)

    # -- stall ------------------------------------------------------------------------------------

    def _starved(self) -> bool:
        """Whether a plan without chunks means that room is lacking. It does not if all requests wait for
        L3."""
        s = self._s
        return bool(s.running) or any(not s.waits_for_storage(seq) for seq in s.queue)

    def _note_stall(self) -> Stall | None:
        """Count and tell that nothing runs although requests wait for room, and return why; None if none
        waits."""
        s = self._s
        waiting = self._ready()
        if not waiting:
            return None
        now = s.l1.occupancy()
        stall = Stall(
            waiting[0].request.id, self._admission.need(waiting[0]), now.free, now.evictable, now.protected,
            now.owned, now.total,
        )  # fmt: skip
        s.counters.stalls += 1
        s.emit(ev.Stalled(s.now, stall))
        return stall
