"""The chunks of the step being planned. Owns: its token budget, where chunks end, what they take over first.

Rules:
1. A chunk ends on an absolute page boundary, with two exceptions: it may end with the prompt, and the step's
   first prefill may end inside a page if the budget is below a page. If less than a page of the budget is
   left after another prefill, it stays unused: a request that took it would compute a part of a page that the
   request ahead of it may compute whole in the next step.
2. With `coalesced` flights a prefilling request looks again before each chunk, and takes over the pages that
   other requests have published or plan in this very step, instead of computing them.
3. Which request's turn it is, and which gives way, is decided in planner.py.

Example: pages of 16, a budget of 60, two prompts of 50 and 100 tokens that share nothing. The first chunk is
[0, 50), because it ends the prompt. 10 tokens are left, less than a page, so the second request waits. With a
budget of 70 it gets [0, 16), and 4 tokens stay unused.
"""

from __future__ import annotations

from hotprefix.kernel import events as ev
from hotprefix.kernel.plan import Chunk
from hotprefix.kernel.state.scheduler_state import SchedulerState
from hotprefix.kernel.state.sequence import Sequence


class StepChunks:
    """The step being planned.

    budget: tokens that may still be planned.
    prefilled: whether a request that lacked more than one position has a chunk.
    chunks: the chunks so far: first those of requests that lacked one position, then prefills.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._s = state
        self._page = state.config.page_size
        self.budget = 0
        self.prefilled = False
        self.chunks: list[Chunk] = []

    def refill(self) -> None:
        """Give the whole budget of a step."""
        self.budget = self._s.config.max_batched_tokens

    # -- decodes ----------------------------------------------------------------------------------

    def add_decodes(self) -> None:
        """Plan one position for each request that lacks one (decodes, and prefills that lack one token), if
        the budget and, for a new page, L1 allow it."""
        s, page = self._s, self._page
        for seq in s.running:
            start = seq.computed
            if seq.length - start != 1 or not self.budget:
                continue
            if start // page < len(seq.table) or s.tables.grow(seq, start + 1):
                self._record(seq, start, start + 1)

    # -- prefills ---------------------------------------------------------------------------------

    def go_on(self, seq: Sequence) -> None:
        """Plan a running prefill's next chunk if there is budget and nothing to wait for."""
        if self.budget and self._catch_up(seq):
            self.add(seq)

    def _catch_up(self, seq: Sequence) -> bool:
        """Take over what other requests have published or plan in this step. False if the request has to
        wait: its next pages are planned by another request, and cannot be read before the step is
        committed."""
        s = self._s
        if not (s.rules.share_flight and seq.prefilling):
            return True
        match = s.tables.further(seq)
        if match.planned and not s.rules.read_planned:
            seq.held = s.step if seq.held is None else seq.held
            return False
        s.take_over(seq, match)
        seq.held = None
        return True

    def add(self, seq: Sequence) -> None:
        """Plan the sequence's next positions, as many as budget and pages allow."""
        s, page = self._s, self._page
        start, length = seq.computed, seq.length
        stop = self.stop(start, length)
        if stop == start:
            return
        if not s.tables.grow(seq, stop):
            stop = min(stop, (len(seq.table) + s.l1.available) * page)
            if stop <= start or not s.tables.grow(seq, stop):
                return
        self.prefilled |= length - start > 1
        self._record(seq, start, stop)

    def stop(self, start: int, length: int) -> int:
        """The position at which a chunk from `start` ends under the budget (rule 17); `start` itself if the
        request has to wait. length: the request's known tokens."""
        stop = min(length, start + self.budget)
        page = self._page
        aligned = stop // page * page
        if stop == length and not (self._s.tables.windows.checkpoints and aligned > start):
            return stop
        if aligned > start:
            return aligned
        return start if self.prefilled else stop

    # -- both -------------------------------------------------------------------------------------

    def _record(self, seq: Sequence, start: int, stop: int) -> None:
        """Add the chunk [start, stop), whose pages are in the table."""
        s, table_from, pages = self._s, seq.dirty_from, len(seq.table)
        table = tuple(seq.table[table_from:]) if table_from < pages else ()
        seq.dirty_from = pages
        if s.l1.groups:
            s.tables.windows.stopped(seq, stop)
        tokens = seq.last if start + 1 == seq.length else seq.known(start, stop)
        samples, prefill = stop == seq.length, start < seq.target
        self.chunks.append(Chunk(seq.request.id, seq.row, start, tokens, table_from, table, samples, prefill))
        self.budget -= stop - start
        if s.rules.plan_ahead and stop // self._page > seq.shared:
            self._plan_ahead(seq, stop)
        if not seq.started:
            seq.started = True
            s.emit(ev.PrefillStarted(s.now, seq.request.id))

    def _plan_ahead(self, seq: Sequence, stop: int) -> None:
        s = self._s
        upto = stop if s.rules.outputs_each_step else min(stop, seq.target)
        added = s.tables.plan_ahead(seq, upto)
        if added:
            s.note_published(seq, added, planned=True)
