"""What holds the queue up. Owns: `QueueReader`, which says how old the oldest waiting request is, why the
head does not start, and how much is still to be computed.

Rules:
1. It only reads: no memo, pin, recency or counter moves. So it may be asked at any time, also with a step in
   flight, and costs nothing if it is not asked.
2. It uses the same functions as admission (admit.py), in the order in which the planner tries them.
"""

from __future__ import annotations

from hotprefix.kernel.config import Order
from hotprefix.kernel.plan import Head, Hindrance, Queue
from hotprefix.kernel.sched.admit import Admission
from hotprefix.kernel.state.scheduler_state import SchedulerState
from hotprefix.kernel.state.sequence import Phase, Sequence

WAITING = frozenset({Phase.WAITING, Phase.PARKED})


class QueueReader:
    """Reads one state."""

    def __init__(self, state: SchedulerState) -> None:
        self._s = state
        self._admission = Admission(state, peek=True)

    def read(self, now: float) -> Queue:
        first = min(
            (q.arrival for q in self._s.sequences.values() if q.phase in WAITING and not q.retractions),
            default=None,
        )
        return Queue(None if first is None else max(0.0, now - first), self._head(now))

    def outstanding(self) -> tuple[int, int]:
        """(positions that are still to be computed before every request decodes, requests that decode). What
        L1 held of a waiting request's prompt when it arrived does not count."""
        tokens = decodes = 0
        for seq in self._s.sequences.values():
            if seq.phase in WAITING:
                tokens += max(1, seq.target - seq.matched_at_enqueue)
            elif seq.prefilling:
                tokens += seq.target - seq.computed
            else:
                decodes += 1
        return tokens, decodes

    def _head(self, now: float) -> Head | None:
        seq = self._first()
        if seq is None:
            return None
        pages, admission = self._s.l1.occupancy(), self._admission
        return Head(
            seq.request.id, self._hindrance(seq), max(0.0, now - seq.arrival), admission.need(seq),
            self._shared(seq), admission.owed(), pages.free, pages.evictable, pages.protected, pages.owned,
            pages.total,
        )  # fmt: skip

    def _first(self) -> Sequence | None:
        """The waiting request that is tried first; a suspect of a failed step only if no other waits."""
        s = self._s
        if s.config.order is Order.FCFS:
            tried = next((seq for seq in s.queue if seq.request.id not in s.suspects), None)
        else:
            tried = next(iter(self._admission.ordered()), None)
        return tried or next(iter(s.queue), None)

    def _hindrance(self, seq: Sequence) -> Hindrance:
        s, admission = self._s, self._admission
        if s.suspects and next(iter(s.suspects.values())) is not seq:
            return Hindrance.RETRY
        if not s.free_rows:
            return Hindrance.ROWS
        if s.waits_for_storage(seq):
            return Hindrance.STORAGE
        match = s.tables.peek(seq)
        if match is not None and match.planned and not s.rules.read_planned:
            return Hindrance.STEP
        if admission.need(seq) - self._shared(seq) + admission.owed() > s.l1.vacant:
            return Hindrance.PAGES
        if s.l1.groups and not admission.frames_fit(seq):
            return Hindrance.FRAMES
        return Hindrance.BUDGET

    def _shared(self, seq: Sequence) -> int:
        return self._admission.protected_pages(seq)
