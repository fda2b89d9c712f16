"""Admission. Owns: whether a waiting request may start now, and which running request gives way if one must.

Rules:
1. Admission looks the prefix up again. A temporary pin protects the prefix while the request is evaluated,
   and is returned on every exit.
2. A request is admitted only if its whole prompt and the reserved share of its outputs fit beside what the
   running requests are still owed, so chunked prefills cannot starve each other half-way (rule 19).
3. A request that was retracted must fit with all its outputs.
4. The oldest request of the most important priority is never a victim, so a request always finishes.

Example for the second: pages of 16, reserve 0.25. A prompt of 100 tokens with 61 outputs needs room for
100 + ceil(61 * 0.25) - 1 = 115 positions (the last sampled token gets no KV): 8 pages. If 2 of its pages are
found in the tree and running requests are owed 5, it needs 8 - 2 + 5 = 11 vacant pages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from enum import Enum
from math import ceil

from hotprefix.kernel.config import Order
from hotprefix.kernel.plan import UNBOUNDED
from hotprefix.kernel.sched.order import CACHE_AWARE, Candidate, arranged
from hotprefix.kernel.state.scheduler_state import SchedulerState
from hotprefix.kernel.state.sequence import Sequence


# What came of trying one waiting request. ADMITTED: it runs now. PAUSED: it waits for pages that are on their
# way (from L3, or from the step in flight), not for room. BLOCKED: it does not fit.
class Verdict(Enum):
    ADMITTED = "admitted"
    PAUSED = "paused"
    BLOCKED = "blocked"


class Admission:
    """Decides over one state. peek: the caller only reads, so look-ups remember nothing."""

    def __init__(self, state: SchedulerState, *, peek: bool = False) -> None:
        self._s = state
        self._lookup = state.tables.peek if peek else state.tables.lookup
        self._owed_at = (-1, -1, 0.0)
        self._owed_pages = 0

    # -- order ------------------------------------------------------------------------------------

    def ordered(self) -> Iterable[Sequence]:
        """Waiting sequences in the order to try them, without suspects of a failed step: these run alone."""
        s = self._s
        order = s.config.order
        if order is Order.FCFS and not s.suspects:
            return s.queue.walk()
        waiting = [seq for seq in s.queue if seq.request.id not in s.suspects]
        if order is Order.FCFS:
            return waiting
        candidates = [self._candidate(seq, order) for seq in waiting]
        return [waiting[i] for i in arranged(order, candidates, s.config.max_overtakes)]

    def _candidate(self, seq: Sequence, order: Order) -> Candidate:
        request = seq.request
        if order not in CACHE_AWARE:
            return Candidate(seq.serial, request.priority, seq.overtaken, 0, seq.length)
        match = self._lookup(seq)
        matched = self.cached_tokens(seq)
        path: list[int] = []
        node = match.node if match and order is Order.DFS else None
        while node is not None and node.parent is not None:
            path.append(node.serial)
            node = node.parent
        path.reverse()
        return Candidate(
            seq.serial, request.priority, seq.overtaken, matched, seq.length - matched, tuple(path)
        )

    def cached_tokens(self, seq: Sequence) -> int:
        """Leading tokens that an admission now would take from the cache."""
        match = self._lookup(seq)
        return match.pages * self._s.config.page_size if match else 0

    # -- admission --------------------------------------------------------------------------------

    def shut(self, seq: Sequence) -> bool:
        """Whether a sequence that did not fit is known not to fit now either.

        That is known while its match and the reserve are the same and nothing has been given back since.
        Running requests may have taken pages meanwhile; what they are owed shrinks by no more than they took,
        so that makes no room.
        """
        if seq.shut is None:
            return False
        s, (match, given_back, reserve) = self._s, seq.shut
        return match.current and given_back == s.given_back and reserve == s.reserve.share

    def attempt(self, seq: Sequence) -> Verdict:
        """Admit the sequence if it may run now."""
        verdict = self._attempt(seq)
        if verdict is Verdict.BLOCKED:
            seq.held = None  # it waits for room now, not for pages that a step computes
        return verdict

    def _attempt(self, seq: Sequence) -> Verdict:
        s = self._s
        if s.waits_for_storage(seq):
            return Verdict.PAUSED
        match = self._lookup(seq)
        if match is not None and match.planned and not s.rules.read_planned:
            seq.held = s.step if seq.held is None else seq.held
            return Verdict.PAUSED
        if not s.l1.groups and not self._would_fit(seq, s.reserve.share):
            # With an L3 the next attempt may find that the request has to wait for a fetch instead.
            if match is not None and s.prefetch is None:
                seq.shut = match, s.given_back, s.reserve.share
            return Verdict.BLOCKED
        if match is None or not match.pages:
            if not self.fits(seq, 0):
                return Verdict.BLOCKED
            s.admit(seq, None)
            return Verdict.ADMITTED
        temporary = s.l1.tree.pin(match)
        try:
            if not self.fits(seq, match.pages):
                return Verdict.BLOCKED
            # Pinning may have cut the run in which the match ends, so look up again.
            s.admit(seq, self._lookup(seq))
            return Verdict.ADMITTED
        finally:
            s.l1.tree.unpin(temporary)

    def fits(self, seq: Sequence, cached_pages: int) -> bool:
        """Whether there are pages for the sequence's target and reserved outputs, beside what running
        requests are owed, and in each layer group frames for its window. cached_pages: those of its pages
        that are protected already."""
        s = self._s
        if self.need(seq) - cached_pages + self._owed_by_all(s.reserve.share) > s.l1.vacant:
            return False
        return not s.l1.groups or self.frames_fit(seq)

    def frames_fit(self, seq: Sequence) -> bool:
        """Whether each layer group has frames for the sequence's window."""
        # Two requests that share frames now may need frames of their own later. So a request that was
        # retracted once must fit without any shared frame.
        s = self._s
        match = None if seq.retractions else self._lookup(seq)
        owed = [(q, _pages(q, 1.0, s.config.page_size)) for q in s.running]
        return s.tables.windows.fit(_pages(seq, 1.0, s.config.page_size), match, owed)

    def passes_shut(self, tried: list[Sequence]) -> int:
        """The number of planning passes, counting this one, during which no request in `tried` can be
        admitted. Every request in `tried` failed to fit in this pass.

        While running requests only decode, what they are owed shrinks by no more than they take, so a request
        fits only when the decaying reserve has become small enough. Returns `UNBOUNDED` if no reserve to come
        is small enough. Example: with the shares 0.98, 0.96, 0.94 to come and a request that fits at 0.94,
        it is shut in this pass and the next two, so the answer is 3.
        """
        shares = self._s.reserve.coming

        def open_at(share: float) -> bool:
            return any(self._would_fit(seq, share) for seq in tried)

        return 1 + bisect_left(shares, True, key=open_at) if open_at(shares[-1]) else UNBOUNDED

    def _would_fit(self, seq: Sequence, share: float) -> bool:
        """As `fits`, with `share` as the reserve and without a look at layer groups."""
        need = self.need(seq, share) - self.protected_pages(seq)
        return need + self._owed_by_all(share) <= self._s.l1.vacant

    def need(self, seq: Sequence, share: float | None = None) -> int:
        """Pages that the sequence will hold at the end of that share of its outputs. share: None = the
        reserve's; a request that was retracted is counted with all its outputs."""
        if seq.retractions:
            share = 1.0
        return _pages(seq, self._s.reserve.share if share is None else share, self._s.config.page_size)

    def owed(self) -> int:
        """Pages that running requests lack of what an admission leaves room for."""
        s = self._s
        return self._owed(s.running, s.reserve.share)

    def _owed_by_all(self, share: float) -> int:
        s = self._s
        at = (s.step, s.tables.changes, share)
        if at != self._owed_at:
            self._owed_at, self._owed_pages = at, self._owed(s.running, share)
        return self._owed_pages

    def _owed(self, running: Iterable[Sequence], share: float) -> int:
        """Pages that these sequences lack of what they will hold at the end of that share of their
        outputs."""
        page, owed = self._s.config.page_size, 0
        for seq in running:
            lacks = _pages(seq, share, page) - len(seq.table)
            if lacks > 0:
                owed += lacks
        return owed

    # -- giving way -------------------------------------------------------------------------------

    def victim(self, among: Iterable[Sequence]) -> Sequence | None:
        """The cheapest of these running sequences to retract: the least important, then the least often
        retracted, then the one with the fewest positions to compute again, then the latest. The oldest of the
        most important priority is never chosen. None if there is no other."""
        running = self._s.running
        if len(running) < 2:
            return None
        keep = min(running, key=lambda q: (q.request.priority, q.serial))
        return max(
            (q for q in among if q is not keep),
            key=lambda q: (q.request.priority, -q.retractions, -q.computed, q.serial),
            default=None,
        )

    def preempt_for(self, head: Sequence) -> list[Sequence]:
        """Retract less important running requests until the head fits (order `priority` with preemption), and
        return them. Retracts none if the head would not fit even without all of them. Requests of equal
        priority never swap (rule 23)."""
        s = self._s
        retracted: list[Sequence] = []
        lower = [q for q in s.running if q.request.priority > head.request.priority]
        if not lower or not self._fits_without(head, lower):
            return retracted
        while lower and not (s.free_rows and self.fits(head, self.protected_pages(head))):
            if s.free_rows and s.sessions.drop_oldest():
                continue
            chosen = max(lower, key=lambda q: (q.request.priority, -q.computed, q.serial))
            lower.remove(chosen)
            s.retract(chosen, "preempted by a more important request")
            retracted.append(chosen)
        return retracted

    def _fits_without(self, head: Sequence, lower: list[Sequence]) -> bool:
        """Whether the head would fit if the requests in `lower` had left."""
        s = self._s
        stay = [q for q in s.running if q not in lower]
        held = {page for q in stay for page in q.table}
        match = self._lookup(head)
        cached = sum(page in held for page in s.l1.tree.pages_of(match)) if match else 0
        if not s.tables.windows.fit_alone(_pages(q, 1.0, s.config.page_size) for q in (head, *stay)):
            return False
        room = s.config.total_pages - len(held)
        return self.need(head) - cached + self._owed(stay, s.reserve.share) <= room

    def protected_pages(self, seq: Sequence) -> int:
        """Leading pages of the sequence's match that are protected already, so using them takes nothing from
        what is available."""
        match = self._lookup(seq)
        if match is None:
            return 0
        node, inside, pages = match.node, match.inside, match.pages
        while node.parent is not None and not node.pins:
            pages -= inside
            node = node.parent
            inside = len(node.pages)
        return pages


def _pages(seq: Sequence, share: float, page: int) -> int:
    """Pages for the known tokens and that share of the outputs to come."""
    # The last sampled token never gets KV, hence the - 1.
    outputs = ceil(seq.outputs_left * share) - 1
    return -(-(seq.length + (outputs if outputs > 0 else 0)) // page)
