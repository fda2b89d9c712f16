"""Admission. Owns: whether a waiting request may start now, and who must give way to whom.

Rules: admission looks up again; a temporary pin protects the prefix while it is
evaluated and is returned on every exit. A request is admitted only where its whole prompt and its
share of outputs fit beside what the running ones are still owed, so chunked prefills cannot starve
each other half-way (rule 19). A retracted request must fit with all its outputs. The oldest
request is never a victim, so somebody always finishes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from enum import Enum
from math import ceil

from hotprefix.kernel.config import Order
from hotprefix.kernel.plan import UNBOUNDED
from hotprefix.kernel.sched.order import CACHE_AWARE, Candidate, arranged
from hotprefix.kernel.sequence import Sequence
from hotprefix.kernel.state import State


class Verdict(Enum):
    ADMITTED = "admitted"
    PAUSED = "paused"
    BLOCKED = "blocked"


class Admission:
    """Decides over one state. peek: only reads are wanted; look-ups remember nothing then."""

    def __init__(self, state: State, *, peek: bool = False) -> None:
        self._s = state
        self._lookup = state.tables.peek if peek else state.tables.lookup
        self._owed_at = (-1, -1, 0.0)
        self._owed_pages = 0

    # -- order ------------------------------------------------------------------------------------

    def ordered(self) -> Iterable[Sequence]:
        """Waiting sequences in the order to try them; suspects of a failed step wait for their turn
        alone."""
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
        if order not in CACHE_AWARE or not self._s.config.prefix_cache:
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
        match = self._lookup(seq) if self._s.config.prefix_cache else None
        return match.pages * self._s.config.page_size if match else 0

    # -- admission --------------------------------------------------------------------------------

    def shut(self, seq: Sequence) -> bool:
        """Whether a sequence that did not fit is known not to fit now: the same match, the same reserve, and
        nothing has been given back since. What running ones are owed shrinks by no more than they take."""
        if seq.shut is None:
            return False
        s, (match, given_back, reserve) = self._s, seq.shut
        return match.current and given_back == s.given_back and reserve == s.reserve.share

    def attempt(self, seq: Sequence) -> Verdict:
        """Admit the sequence if it may run now."""
        verdict = self._attempt(seq)
        if verdict is Verdict.BLOCKED:
            seq.held = None  # it waits for room now, not for what a step makes
        return verdict

    def _attempt(self, seq: Sequence) -> Verdict:
        s = self._s
        if s.waits_for_storage(seq):
            return Verdict.PAUSED
        match = self._lookup(seq) if s.config.prefix_cache else None
        if match is not None and match.planned and not s.rules.read_planned:
            seq.held = s.step if seq.held is None else seq.held
            return Verdict.PAUSED
        if not s.l1.groups and not self._would_fit(seq, s.reserve.share):
            if match is not None and s.prefetch is None:  # else it may have to wait for L3, next time
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
            # Pinning may have split the run the match ends in, so look up again.
            s.admit(seq, self._lookup(seq))
            return Verdict.ADMITTED
        finally:
            s.l1.tree.unpin(temporary)

    def fits(self, seq: Sequence, cached_pages: int) -> bool:
        """Pages for the whole target and the reserved outputs, beside what running ones are owed; in each
        layer group frames for its window."""
        s = self._s
        if self.need(seq) - cached_pages + self._owed_by_all(s.reserve.share) > s.l1.vacant:
            return False
        return not s.l1.groups or self.frames_fit(seq)

    def frames_fit(self, seq: Sequence) -> bool:
        """In each layer group, frames for the sequence's window."""
        # Frames shared with others now may be held apart later: once it came to a retraction, count none.
        s = self._s
        match = self._lookup(seq) if s.config.prefix_cache and not seq.retractions else None
        owed = [(q, _pages(q, 1.0, s.config.page_size)) for q in s.running]
        return s.tables.windows.fit(_pages(seq, 1.0, s.config.page_size), match, owed)

    def passes_shut(self, tried: list[Sequence]) -> int:
        """Passes, this one included, in which none of these fits, who did not in this one. What running ones
        are owed never shrinks while they only decode, so it takes a reserve that decays to let anybody in."""
        shares = self._s.reserve.coming

        def open_at(share: float) -> bool:
            return any(self._would_fit(seq, share) for seq in tried)

        return 1 + bisect_left(shares, True, key=open_at) if open_at(shares[-1]) else UNBOUNDED

    def _would_fit(self, seq: Sequence, share: float) -> bool:
        """`fits`, without layer groups, as if that were the reserve."""
        need = self.need(seq, share) - self.protected_pages(seq)
        return need + self._owed_by_all(share) <= self._s.l1.vacant

    def need(self, seq: Sequence, share: float | None = None) -> int:
        """Pages the sequence will hold at the end of that share of its outputs, None = the reserve."""
        if seq.retractions:
            share = 1.0
        return _pages(seq, self._s.reserve.share if share is None else share, self._s.config.page_size)

    def owed(self) -> int:
        """Pages that running sequences lack of what an admission leaves room for."""
        s = self._s
        return self._owed(s.awake, s.reserve.share) + s.cruise.owed(s.reserve.share)

    def _owed_by_all(self, share: float) -> int:
        s = self._s
        at = (s.step, s.tables.changes, share)
        if at != self._owed_at:
            self._owed_at, self._owed_pages = at, self._owed(s.awake, share) + s.cruise.owed(share)
        return self._owed_pages

    def _owed(self, running: Iterable[Sequence], share: float) -> int:
        """Pages that running sequences lack of what they will hold at the end of that share of outputs."""
        page, owed = self._s.config.page_size, 0
        for seq in running:
            lacks = _pages(seq, share, page) - len(seq.table)
            if lacks > 0:
                owed += lacks
        return owed

    # -- giving way -------------------------------------------------------------------------------

    def victim(self, among: Iterable[Sequence]) -> Sequence | None:
        """The cheapest running sequence to retract: least important, least often retracted, least to
        compute again, latest; never the oldest of the most important."""
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
        """Retract less important running requests until the head fits (order `priority` with
        preemption); none where it would not fit even then. Equal priorities never swap (rule 23).
        """
        s = self._s
        retracted: list[Sequence] = []
        lower = [q for q in s.running if q.request.priority > head.request.priority]
        if not lower or not self._fits_without(head, lower):
            return retracted
        while lower and not (s.slots and self.fits(head, self.protected_pages(head))):
            if s.slots and s.sessions.drop_oldest():
                continue
            chosen = max(lower, key=lambda q: (q.request.priority, -q.computed, q.serial))
            lower.remove(chosen)
            s.retract(chosen, "preempted by a more important request")
            retracted.append(chosen)
        return retracted

    def _fits_without(self, head: Sequence, lower: list[Sequence]) -> bool:
        """Whether the head would fit if the `lower` ones had left."""
        s = self._s
        stay = [q for q in s.running if q not in lower]
        held = {page for q in stay for page in q.table}
        match = self._lookup(head) if s.config.prefix_cache else None
        cached = sum(page in held for page in s.l1.tree.pages_of(match)) if match else 0
        if not s.tables.windows.fit_alone(_pages(q, 1.0, s.config.page_size) for q in (head, *stay)):
            return False
        room = s.config.total_pages - len(held)
        return self.need(head) - cached + self._owed(stay, s.reserve.share) <= room

    def protected_pages(self, seq: Sequence) -> int:
        """Pages of the match that take nothing from what is available: those protected already."""
        match = self._lookup(seq) if self._s.config.prefix_cache else None
        if match is None:
            return 0
        node, inside, pages = match.node, match.inside, match.pages
        while node.parent is not None and not node.pins:
            pages -= inside
            node = node.parent
            inside = len(node.pages)
        return pages


def _pages(seq: Sequence, share: float, page: int) -> int:
    """Pages for what is known and that share of the outputs to come."""
    # The last sampled token never gets KV, hence the - 1.
    outputs = ceil(seq.outputs_left * share) - 1
    return -(-(seq.length + (outputs if outputs > 0 else 0)) // page)
