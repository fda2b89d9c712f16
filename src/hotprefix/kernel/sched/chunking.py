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
from hotprefix.kernel.plan import Chunk, Chunks
from hotprefix.kernel.sequence import Sequence
from hotprefix.kernel.state import SchedulerState


class StepChunks:
    """The step being planned.

    budget: tokens that may still be planned.
    prefilled: whether a request that lacked more than one position has a chunk.
    chunks: the chunks written out: first those of requests that lacked one position, then prefills.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._s = state
        self._cruises = not state.l1.groups  # a group's window moves with every position
        self._places: list[int] = []
        self.budget = 0
        self.prefilled = False
        self.chunks: list[Chunk] = []

    def begin(self) -> None:
        """Begin a step, with no chunk."""
        self.chunks, self._places = [], []
        self.prefilled = False

    def refill(self) -> None:
        """Give the whole budget of a step. What cruising requests take of it is subtracted in
        `add_decodes`."""
        self.budget = self._s.config.max_batched_tokens

    @property
    def computes(self) -> bool:
        """Whether the step computes anything. Cruising requests are in every plan."""
        return bool(self.chunks) or len(self._s.cruise) > 0

    def finished(self) -> Chunks:
        """All chunks, for the plan."""
        return self._s.cruise.chunks(self.chunks, self._places)

    # -- decodes ----------------------------------------------------------------------------------

    def add_decodes(self) -> None:
        """Plan one position for each request that lacks one: decodes, and prefills that lack one token. A
        decode that has room in its page begins to cruise and gets no chunk of its own."""
        s = self._s
        cruising = self._cruises and not s.suspects
        self.budget -= len(s.cruise)
        joined = False
        for seq in s.awake:
            start = seq.computed
            if seq.length - start != 1:
                continue
            if cruising and start >= seq.target and (room := s.cruise.room(seq)):
                s.cruise.join(seq, room)
                self.budget -= 1
                joined = True
            else:
                self._add_decode(seq, start)
        if joined:
            s.awake = [seq for seq in s.awake if seq.since is None]

    def _add_decode(self, seq: Sequence, start: int) -> None:
        """Plan one position, if the budget and, for a new page, L1 allow it."""
        s = self._s
        if not self.budget:
            return
        if start // s.config.page_size < len(seq.table) or s.tables.grow(seq, start + 1):
            self._record(seq, start, start + 1)
            self._places.append(seq.place)

    # -- prefills ---------------------------------------------------------------------------------

    def go_on(self, seq: Sequence) -> None:
        """Plan a running prefill's next chunk if there is budget and nothing to wait for."""
        if self.budget and not self._must_pause(seq):
            self.add(seq)

    def _must_pause(self, seq: Sequence) -> bool:
        """Take over what other requests have published or plan in this step. True if the next pages are
        planned by another request and cannot be read before the step is committed."""
        s = self._s
        if not (s.rules.share_flight and seq.prefilling):
            return False
        match = s.tables.further(seq)
        if match.planned and not s.rules.read_planned:
            seq.held = s.step if seq.held is None else seq.held
            return True
        s.take_over(seq, match)
        seq.held = None
        return False

    def add(self, seq: Sequence) -> None:
        """Plan the sequence's next positions, as many as budget and pages allow."""
        s = self._s
        page = s.config.page_size
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
        page = self._s.config.page_size
        aligned = stop // page * page
        if stop == length and not (self._s.checkpoints and aligned > start):
            return stop
        if aligned > start:
            return aligned
        return start if self.prefilled else stop

    # -- both -------------------------------------------------------------------------------------

    def _record(self, seq: Sequence, start: int, stop: int) -> None:
        """Write out the chunk [start, stop), whose pages are in the table."""
        table_from, pages = seq.dirty_from, len(seq.table)
        table = tuple(seq.table[table_from:]) if table_from < pages else ()
        seq.dirty_from = pages
        if self._s.checkpoints:
            self._s.tables.windows.checkpoint(seq, stop)
        tokens = seq.last if start + 1 == seq.length else seq.known(start, stop)
        self.chunks.append(
            Chunk(
                seq.request.id, seq.row, start, tokens, table_from, table, stop == seq.length,
                start < seq.target,
            )
        )  # fmt: skip
        self.budget -= stop - start
        if self._s.rules.plan_ahead and stop // self._s.config.page_size > seq.shared:
            self._plan_ahead(seq, stop)
        if not seq.started:
            seq.started = True
            if self._s.emit.wants(ev.PrefillStarted):
                self._s.emit(ev.PrefillStarted(self._s.now, seq.request.id))

    def _plan_ahead(self, seq: Sequence, stop: int) -> None:
        s = self._s
        upto = stop if s.rules.outputs_each_step else min(stop, seq.target)
        added = s.tables.plan_ahead(seq, upto)
        if added:
            s.note_published(seq, added, planned=True)
