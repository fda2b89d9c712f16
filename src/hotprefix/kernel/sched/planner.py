"""Step planning. Owns: which positions of which requests one forward pass computes.

Rules (kernel.md, *Step planning*): decodes first, then running prefills, then admissions, under one
token budget. A chunk ends on an absolute page boundary unless it ends the prompt, or is the step's first
prefill and the budget is below a page: a rest below a page goes to nobody else, who would compute part
of a page that one ahead of it computes next. With `coalesced` flights a prefilling request looks again
before each chunk, so it takes over what others have published or plan in this very step. When decodes
would not fit, the cheapest victims are retracted. After a failed step its requests run alone until past
the point of failure.
"""

from __future__ import annotations

from hotprefix.kernel import events as ev
from hotprefix.kernel.cache.host import Moves
from hotprefix.kernel.config import Order
from hotprefix.kernel.plan import UNBOUNDED, Chunk, Stall, StepPlan
from hotprefix.kernel.plan import Admission as AdmissionRecord
from hotprefix.kernel.request import RequestId
from hotprefix.kernel.sched.admit import Admission, Verdict
from hotprefix.kernel.sched.order import CACHE_AWARE
from hotprefix.kernel.sched.refresh import QueueRefresh
from hotprefix.kernel.sequence import Phase, Sequence
from hotprefix.kernel.state import State

NOTHING = Moves()


class Planner:
    """Builds one StepPlan at a time."""

    def __init__(self, state: State) -> None:
        self._s = state
        self._admission = Admission(state)
        self._refresh = QueueRefresh(state)
        self._cruises = not state.l1.groups  # a group's window moves with every position
        self._budget = 0
        self._prefilled = False
        self._chunks: list[Chunk] = []
        self._places: list[int] = []
        self._admitted: list[AdmissionRecord] = []
        self._retracted: list[RequestId] = []
        self._blocked: list[Sequence] = []

    def plan(self) -> StepPlan:
        s = self._s
        s.step += 1
        self._chunks, self._places, self._admitted, self._retracted = [], [], [], []
        self._blocked = []
        self._prefilled = False
        s.reserve.relax()
        s.sessions.expire(s.now)
        s.l1.tree.lapse(s.now)
        self._refresh.run()
        if s.prefetch is not None:
            s.prefetch.look_ahead(s.queue)
        while True:
            if not (s.suspects and self._plan_alone(next(iter(s.suspects.values())))):
                self._plan_batch()
            # Sessions' holds give way where nothing else can run.
            if self._planned or not (self._starved() and s.sessions.drop_oldest()):
                break
        planned = self._planned
        stall = None if planned else self._stall()
        fetches, cancels = s.prefetch.take() if s.prefetch is not None else ((), ())
        if s.emit.on:
            for fetch in fetches:
                s.emit(ev.FetchStarted(s.now, fetch.id, fetch.request, len(fetch.keys)))
        moves = s.host.take() if s.host is not None else NOTHING
        repeat = self._repeat() if planned and not (fetches or cancels or moves != NOTHING) else 1
        chunks = s.cruise.chunks(self._chunks, self._places)
        frames = s.tables.windows.take_assigned() if planned else ()
        return StepPlan(
            s.step, chunks, tuple(self._admitted), tuple(self._retracted), stall, fetches, cancels,
            moves.stores, moves.saves, moves.restores, moves.touches, repeat, frames,
        )  # fmt: skip

    def _repeat(self) -> int:
        """How often the step may run before anything would be decided.

        Only where all that runs decodes, up to the step that completes one's outputs, or a page where that
        decides nothing, and before a window lets go of a page or a refresh is due: no page is allocated,
        published or returned until then.
        """
        s = self._s
        if (
            self._prefilled
            or self._retracted
            or s.suspects
            or len(self._chunks) + len(s.cruise) != s.running_count
        ):
            return 1
        page, most = s.config.page_size, min(self._refresh.passes_left(), self._passes_shut())
        beyond = self._may_complete()
        if len(s.cruise):
            most = min(most, s.cruise.still(beyond))
        for seq in s.awake:
            most = min(most, page - 1 + beyond - seq.computed % page, seq.outputs_left)
            if s.l1.groups:
                most = min(most, s.tables.windows.still(seq))
            if seq.computed < seq.target:
                return 1
        return max(1, most)

    def _passes_shut(self) -> int:
        """Passes in which nobody who waits could start."""
        s = self._s
        if not len(s.queue):
            return UNBOUNDED
        if s.preempts:  # somebody may have to make room, and a slot
            return 1
        if not s.slots:
            return UNBOUNDED
        if s.prefetch is not None or len(s.sessions):
            return 1
        if not s.reserve.coming:
            return UNBOUNDED
        return self._admission.passes_shut(self._blocked) if not s.l1.groups else 1

    def _may_complete(self) -> int:
        """1 where the last of the repeats may complete pages: nobody who waits could start on one that is
        planned, whose place in the queue depends on no page either. 0 where that is not sure."""
        s = self._s
        if s.l1.groups:
            return 0
        if not len(s.queue) or not s.rules.outputs_each_step:
            return 1
        if s.prefetch is not None or s.config.order in CACHE_AWARE:
            return 0
        matches = [seq.memo for seq in self._blocked]
        return int(all(match is not None and not s.is_end(match.node) for match in matches))

    def _plan_batch(self) -> None:
        s = self._s
        if s.preempts:
            self._preempt()
        while True:
            self._budget = s.config.max_batched_tokens
            self._make_room_for_decodes()
            self._add_decodes()
            for seq in self._prefills():
                if s.preempts:
                    self._admit(above=seq.request.priority)
                self._continue_prefill(seq)
            self._admit()
            if self._planned:
                return
            # Prefills that hold pages and wait for each other: the cheapest gives way.
            victim = self._admission.victim(s.running)
            if victim is None or len(s.sessions):
                return
            self._retract(victim, "no running request could go on")

    def _plan_alone(self, seq: Sequence) -> bool:
        """Plan nothing but a suspect; False where it cannot run yet."""
        self._budget = self._s.config.max_batched_tokens
        if seq.phase is Phase.RUNNING:
            self._continue_prefill(seq)
        elif self._s.slots and self._admission.attempt(seq) is Verdict.ADMITTED:
            self._start(seq)
        return bool(self._chunks)

    @property
    def _planned(self) -> bool:
        """Whether the step computes anything: who cruises is in every plan."""
        return bool(self._chunks) or len(self._s.cruise) > 0

    # -- running requests -------------------------------------------------------------------------

    def _make_room_for_decodes(self) -> None:
        """Retract the cheapest victims until every decode can have its next position's page."""
        s = self._s
        page = s.config.page_size
        while True:
            need = 0
            for q in s.awake:
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
        prefills = [seq for seq in self._s.awake if seq.remaining > 1]
        if self._s.config.order is Order.PRIORITY:
            prefills.sort(key=lambda seq: seq.request.priority)
        return prefills

    def _continue_prefill(self, seq: Sequence) -> None:
        if self._budget and not self._must_pause(seq):
            self._add_chunk(seq)

    def _must_pause(self, seq: Sequence) -> bool:
        """Take over what others have published or plan now; True where what comes next is planned by
        another request in this step and cannot be read before it is committed."""
        s = self._s
        if not (s.rules.share_flight and seq.prefilling):
            return False
        match = s.tables.further(seq)
        if match.planned and not s.rules.read_planned:
            return True
        seq.adopted += s.tables.adopt(seq, match)
        return False

    def _add_chunk(self, seq: Sequence) -> bool:
        """Plan the sequence's next positions, as many as budget and pages allow; False where none."""
        s = self._s
        page = s.config.page_size
        start, length = seq.computed, seq.length
        stop = self._stop(start, length)
        if stop == start:
            return False
        if not s.tables.grow(seq, stop):
            stop = min(stop, (len(seq.table) + s.l1.available) * page)
            if stop <= start or not s.tables.grow(seq, stop):
                return False
        self._prefilled |= length - start > 1
        self._record(seq, start, stop)
        return True

    def _add_decodes(self) -> None:
        """`_add_chunk` for all that need one position: decodes, and rests of prompts. A decode with room in
        its page begins to cruise."""
        s = self._s
        cruising = self._cruises and not s.suspects
        self._budget -= len(s.cruise)
        joined = False
        for seq in s.awake:
            start = seq.computed
            if seq.length - start != 1:
                continue
            if cruising and start >= seq.target and (room := s.cruise.room(seq)):
                s.cruise.join(seq, room)
                self._budget -= 1
                joined = True
            else:
                self._add_decode(seq, start)
        if joined:
            s.awake = [seq for seq in s.awake if seq.since is None]

    def _add_decode(self, seq: Sequence, start: int) -> None:
        """One position, which may need a page."""
        s = self._s
        if not self._budget:
            return
        if start // s.config.page_size < len(seq.table) or s.tables.grow(seq, start + 1):
            self._record(seq, start, start + 1)
            self._places.append(seq.place)

    def _record(self, seq: Sequence, start: int, stop: int) -> None:
        """Write a chunk into the plan; its pages are there."""
        table_from, pages = seq.dirty_from, len(seq.table)
        table = tuple(seq.table[table_from:]) if table_from < pages else ()
        seq.dirty_from = pages
        if self._s.checkpoints:
            self._s.tables.windows.checkpoint(seq, stop)
        tokens = seq.last if start + 1 == seq.length else seq.known(start, stop)
        self._chunks.append(
            Chunk(
                seq.request.id, seq.slot, start, tokens, table_from, table, stop == seq.length,
                start < seq.target,
            )
        )  # fmt: skip
        self._budget -= stop - start
        if self._s.rules.plan_ahead and stop // self._s.config.page_size > seq.shared:
            self._plan_ahead(seq, stop)

    def _stop(self, start: int, length: int) -> int:
        """Where a chunk from `start` ends under the budget; `start` itself where it has to wait."""
        stop = min(length, start + self._budget)
        page = self._s.config.page_size
        aligned = stop // page * page
        if stop == length and not (self._s.checkpoints and aligned > start):
            return stop
        if aligned > start:
            return aligned
        return start if self._prefilled else stop

    def _plan_ahead(self, seq: Sequence, stop: int) -> None:
        s = self._s
        upto = stop if s.rules.outputs_each_step else min(stop, seq.target)
        added = s.tables.plan_ahead(seq, upto)
        if added and s.emit.on:
            s.emit(ev.Published(s.now, seq.request.id, added, planned=True))

    # -- waiting requests -------------------------------------------------------------------------

    def _admit(self, above: int | None = None) -> None:
        """Try waiting requests in order, a bounded number past those that do not fit. above: only those
        more important than this priority."""
        s = self._s
        if not (self._budget and s.slots and len(s.queue)) or self._suspect_overtaken():
            return
        blocked = 0
        for seq in self._admission.ordered():
            if not (self._budget and s.slots) or (above is not None and seq.request.priority >= above):
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
        """A suspect that finds no room must not be overtaken for ever either."""
        return any(q.overtaken >= self._s.config.max_overtakes for q in self._s.suspects.values())

    def _can_start(self, seq: Sequence) -> bool:
        """Whether the budget's rest is enough for a first chunk."""
        start = self._admission.cached_tokens(seq)
        return self._stop(start, seq.length) > start

    def _start(self, seq: Sequence) -> None:
        s = self._s
        self._admitted.append(AdmissionRecord(seq.request.id, seq.slot, seq.computed))
        if self._add_chunk(seq) and s.emit.on:
            s.emit(ev.PrefillStarted(s.now, seq.request.id))

    def _preempt(self) -> None:
        """For the first that could start: one whose pages are still on their way would not use the room."""
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
        """Whether a plan without chunks means that room is lacking: not where all wait for L3."""
        s = self._s
        return s.running_count > 0 or any(not s.waits_for_storage(seq) for seq in s.queue)

    def _stall(self) -> Stall | None:
        """Why nothing runs though requests wait for room."""
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
        if s.emit.on:
            s.emit(ev.Stalled(s.now, stall))
        return stall
