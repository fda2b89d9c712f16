"""How often a plan may run. Owns: the moment at which something would be decided again.

The problem: while all running requests decode and no waiting request can start, one plan after another is the
same but for its positions. Planning each of them costs the driver more than it gains. So a plan says how many
times it may run (`StepPlan.repeat`) before a planning pass would decide anything.

Rules (decision 10):
1. Only a step in which every running request decodes may be repeated, and none in which a suspect runs.
2. The repeats after the first allocate no page. So they end with the step that completes a request's page,
   and one step earlier if a completed page could decide something (`_may_complete`).
3. The repeats end with the step that gives a request its last output.
4. They end before a window of a layer group lets go of a page, and before a refresh is due.
5. They end before the reserve has decayed enough to admit a waiting request.
6. The count is exact: a property test compares every event with those of single steps.

Example: pages of 16, nothing waits, two requests with 100 and 109 computed positions and 50 outputs left
each. The first completes its page after 12 more positions (112), the second after 3 (112), so the plan may
run 3 times; the plan after it gives the second request a page. If completing a page may decide something, 2
times.
"""

from __future__ import annotations

from hotprefix.kernel.plan import UNBOUNDED
from hotprefix.kernel.sched.admit import Admission
from hotprefix.kernel.sched.order import CACHE_AWARE
from hotprefix.kernel.sched.refresh import QueueRefresh
from hotprefix.kernel.state.scheduler_state import SchedulerState
from hotprefix.kernel.state.sequence import Sequence


class Repeats:
    """Looks at one state and changes nothing. In every method, `blocked` are the waiting requests that were
    tried in this pass and did not fit."""

    def __init__(self, state: SchedulerState, admission: Admission, refresh: QueueRefresh) -> None:
        self._s = state
        self._admission = admission
        self._refresh = refresh

    def of(self, chunks: int, blocked: list[Sequence]) -> int:
        """How many times a plan without prefills and retractions may run; >= 1. chunks: how many it has."""
        s = self._s
        if s.suspects or chunks != len(s.running):
            return 1
        page, most = s.config.page_size, min(self._refresh.passes_left(), self._passes_shut(blocked))
        beyond = self._may_complete(blocked)
        for seq in s.running:
            most = min(most, page - 1 + beyond - seq.computed % page, seq.outputs_left)
            if s.l1.groups:
                most = min(most, s.tables.windows.still(seq))
            if most <= 1 or seq.computed < seq.target:
                return 1
        return most

    def _passes_shut(self, blocked: list[Sequence]) -> int:
        """The number of passes, counting this one, in which no waiting request could start."""
        s = self._s
        if not len(s.queue):
            return UNBOUNDED
        if s.preempts:  # a running request may have to give its pages and its row to a waiting one
            return 1
        if not s.free_rows:
            return UNBOUNDED
        if s.prefetch is not None or len(s.sessions):
            return 1
        if not s.reserve.coming:
            return UNBOUNDED
        return self._admission.passes_shut(blocked) if not s.l1.groups else 1

    def _may_complete(self, blocked: list[Sequence]) -> int:
        """1 if the last repeat may complete a page, 0 if it may not or that is not certain.

        A completed page is published with its step if the rules publish outputs. It decides something if it
        lengthens the match of a waiting request, or if the order of the queue depends on matches. Neither can
        happen if no request waits, or if outputs are not published at each step. Nor can it if every blocked
        request has a match that ends at another node than the shared prefix of any running request, because
        only there the new page is hung into the tree.
        """
        s = self._s
        if s.l1.groups:
            return 0
        if not len(s.queue) or not s.rules.outputs_each_step:
            return 1
        if s.prefetch is not None or s.config.order in CACHE_AWARE:
            return 0
        matches = [seq.memo for seq in blocked]
        return int(all(match is not None and not s.is_end(match.node) for match in matches))
