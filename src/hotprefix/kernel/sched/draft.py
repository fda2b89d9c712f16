"""The chunks of the step being planned. Owns: its token budget, where chunks end, what they take over first.

Rules: a chunk ends on an absolute page boundary unless it ends the prompt, or is
the step's first prefill and the budget is below a page: a rest below a page goes to nobody else, who would
compute part of a page that one ahead of it computes next. With `coalesced` flights a prefilling request
looks again before each chunk, so it takes over what others have published or plan in this very step.
Whose turn it is, and who gives way, is the planner's to say.
"""

from __future__ import annotations

from hotprefix.kernel import events as ev
from hotprefix.kernel.plan import Chunk, Chunks
from hotprefix.kernel.sequence import Sequence
from hotprefix.kernel.state import State


class Draft:
    """budget: tokens that may still be planned. prefilled: whether anybody who lacks more than one position
    has a chunk. chunks: those written out; first who needed one position, then prefills."""

    def __init__(self, state: State) -> None:
        self._s = state
        self._cruises = not state.l1.groups  # a group's window moves with every position
        self._places: list[int] = []
        self.budget = 0
        self.prefilled = False
        self.chunks: list[Chunk] = []

    def begin(self) -> None:
        """Nothing is planned yet."""
        self.chunks, self._places = [], []
        self.prefilled = False

    def refill(self) -> None:
        """Give the whole budget of a step. Who cruises takes his share of it in `add_decodes`."""
        self.budget = self._s.config.max_batched_tokens

    @property
    def computes(self) -> bool:
        """Whether the step computes anything: who cruises is in every plan."""
        return bool(self.chunks) or len(self._s.cruise) > 0

    def finished(self) -> Chunks:
        """All chunks, for the plan."""
        return self._s.cruise.chunks(self.chunks, self._places)

    # -- decodes ----------------------------------------------------------------------------------

    def add_decodes(self) -> None:
        """`add` for all that need one position: decodes, and rests of prompts. A decode with room in its page
        begins to cruise."""
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
        """One position, which may need a page."""
        s = self._s
        if not self.budget:
            return
        if start // s.config.page_size < len(seq.table) or s.tables.grow(seq, start + 1):
            self._record(seq, start, start + 1)
            self._places.append(seq.place)

    # -- prefills ---------------------------------------------------------------------------------

    def go_on(self, seq: Sequence) -> None:
        """A running prefill's next chunk, as far as there is budget and nothing to wait for."""
        if self.budget and not self._must_pause(seq):
            self.add(seq)

    def _must_pause(self, seq: Sequence) -> bool:
        """Take over what others have published or plan now; True where what comes next is planned by
        another request in this step and cannot be read before it is committed."""
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
        """Where a chunk from `start` ends under the budget; `start` itself where it has to wait."""
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
        """Write a chunk into the plan; its pages are there."""
        table_from, pages = seq.dirty_from, len(seq.table)
        table = tuple(seq.table[table_from:]) if table_from < pages else ()
        seq.dirty_from = pages
        if self._s.checkpoints:
            self._s.tables.windows.checkpoint(seq, stop)
        tokens = seq.last if start + 1 == seq.length else seq.known(start, stop)
        self.chunks.append(
            Chunk(
                seq.request.id, seq.slot, start, tokens, table_from, table, stop == seq.length,
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
