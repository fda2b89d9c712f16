"""How often a plan may run. Owns: the moment at which something would be decided again.

Rules (decision 10): only a step in which all that runs decodes may be repeated: up to the step that
completes one's outputs, or a page where that decides nothing, and before a window lets go of a page, a
refresh is due or the reserve's decay could let anybody in. No page is allocated, published or returned until
then. It is exact: a property test compares every event with those of single steps.
"""

from __future__ import annotations

from hotprefix.kernel.plan import UNBOUNDED
from hotprefix.kernel.sched.admit import Admission
from hotprefix.kernel.sched.order import CACHE_AWARE
from hotprefix.kernel.sched.refresh import QueueRefresh
from hotprefix.kernel.sequence import Sequence
from hotprefix.kernel.state import State


class Repeats:
    """Looks at one state; changes nothing. blocked: who was tried in this pass and found no room."""

    def __init__(self, state: State, admission: Admission, refresh: QueueRefresh) -> None:
        self._s = state
        self._admission = admission
        self._refresh = refresh

    def of(self, written: int, blocked: list[Sequence]) -> int:
        """Of a plan without prefills or retractions, with that many chunks written out; >= 1."""
        s = self._s
        if s.suspects or written + len(s.cruise) != s.running_count:
            return 1
        page, most = s.config.page_size, min(self._refresh.passes_left(), self._passes_shut(blocked))
        beyond = self._may_complete(blocked)
        if len(s.cruise):
            most = min(most, s.cruise.still(beyond))
        for seq in s.awake:
            most = min(most, page - 1 + beyond - seq.computed % page, seq.outputs_left)
            if s.l1.groups:
                most = min(most, s.tables.windows.still(seq))
            if seq.computed < seq.target:
                return 1
        return max(1, most)

    def _passes_shut(self, blocked: list[Sequence]) -> int:
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
        return self._admission.passes_shut(blocked) if not s.l1.groups else 1

    def _may_complete(self, blocked: list[Sequence]) -> int:
        """1 where the last of the repeats may complete pages: nobody who waits could start on one that is
        planned, whose place in the queue depends on no page either. 0 where that is not sure."""
        s = self._s
        if s.l1.groups:
            return 0
        if not len(s.queue) or not s.rules.outputs_each_step:
            return 1
        if s.prefetch is not None or s.config.order in CACHE_AWARE:
            return 0
        matches = [seq.memo for seq in blocked]
        return int(all(match is not None and not s.is_end(match.node) for match in matches))
