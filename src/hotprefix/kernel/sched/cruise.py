"""Decodes inside a page. Owns: `Cruise`, the sequences about which nothing is to be decided for a while.

Rules: a sequence that decodes and neither needs nor completes a page gains one position in every forward
pass, like all others of its kind. So one clock counts for all of them: what a member has computed is the
clock and a number of its own. A member is in every plan. It leaves when it is `due` (before the step that
completes its page, or with its last output), when it is stopped or aborted, and when anybody else wants to
change it. Nobody may read a member's moving fields before `settle`: `State.running`, the one way to all
running sequences, sees to that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from math import ceil

from hotprefix.kernel import tokens as tk
from hotprefix.kernel.plan import Chunk, Chunks, Progress, Sampled, Transcript, said
from hotprefix.kernel.request import RequestId
from hotprefix.kernel.sequence import Sequence


class Lane:
    """A member, for as long as it is one; never changes. offset: positions it has computed, less the clock.
    end: the clock at its last output. pages: in its table."""

    __slots__ = ("end", "offset", "pages", "place", "request", "seq", "slot")

    def __init__(self, seq: Sequence, clock: int) -> None:
        self.seq = seq
        self.place = seq.place
        self.request = seq.request.id
        self.slot = seq.slot
        self.offset = seq.computed - clock
        self.end = clock + seq.outputs_left
        self.pages = len(seq.table)


class Cruise:
    """See the module's rules. clock: positions that each member would have gained since the start."""

    def __init__(self, page_size: int) -> None:
        self._page = page_size
        self._clock = 0
        self._lanes: dict[RequestId, Lane] = {}
        self._due: list[tuple[int, int, Sequence]] = []
        self._called: list[Sequence] = []
        # Nobody stays longer than a page, so no outcome from before the last `page_size` is asked for.
        self._heard: deque[tuple[int, dict[RequestId, bytes] | Transcript]] = deque(maxlen=page_size)
        self._offsets = 0
        self._departures = 0

    def __len__(self) -> int:
        return len(self._lanes)

    def still(self, beyond: int) -> int:
        """Positions that every member can gain before one of them is due, or that many beyond (0 or 1: its
        page may be completed) where it has outputs left; there is at least one member."""
        while self._gone(self._due[0]):
            heappop(self._due)
        first = self._due[0][0] + beyond
        if beyond:
            for lane in self._lanes.values():
                first = min(first, lane.end)
        return first - self._clock

    # -- members ----------------------------------------------------------------------------------

    def room(self, seq: Sequence) -> int:
        """Positions that a decoding sequence could gain before it is due; 0 where its next one needs or
        completes a page, or its table has changed since it was last told."""
        inside = seq.computed % self._page
        if not inside or seq.dirty_from != len(seq.table):
            return 0
        return min(self._page - 1 - inside, seq.outputs_left)

    def join(self, seq: Sequence, room: int) -> None:
        """Take a sequence in that has room."""
        lane = self._lanes[seq.request.id] = Lane(seq, self._clock)
        seq.since = self._clock
        seq.due = self._clock + room
        self._offsets += lane.offset
        heappush(self._due, (seq.due, seq.place, seq))

    def leave(self, seq: Sequence) -> None:
        """Let a member go, up to date; anybody else may leave too."""
        if seq.since is not None:
            self._settle(seq, seq.since)
            seq.since = None
            self._departures += 1
            self._offsets -= self._lanes.pop(seq.request.id).offset
            if not self._lanes:  # nothing is remembered of ended requests
                self._due.clear()
                self._heard.clear()

    def call(self, seq: Sequence) -> None:
        """An abort while a step is in flight: the member leaves as it was before that step, which gives it
        one position more and no token."""
        self.leave(seq)
        self._called.append(seq)

    def called(self) -> list[Sequence]:
        """Whom `call` was told of since the last call of this."""
        called, self._called = self._called, []
        return called

    def settle(self) -> None:
        """Bring every member up to date."""
        for lane in self._lanes.values():
            seq = lane.seq
            if seq.since is not None and seq.since != self._clock:
                self._settle(seq, seq.since)

    def _settle(self, seq: Sequence, since: int) -> None:
        gained = self._clock - since
        if gained:
            seq.append(self._tokens(seq, since))
            seq.computed += gained
            seq.highest = seq.computed
            seq.computed_total += gained
            seq.since = self._clock

    def _tokens(self, seq: Sequence, since: int) -> bytes:
        """What a member has said since then."""
        request, parts, stop = seq.request.id, [], self._clock
        for begun, heard in reversed(self._heard):
            start = begun if begun > since else since
            if isinstance(heard, dict):
                parts.append(heard[request])
            else:
                parts.append(said(heard, request, seq.outputs + start - since, stop - start))
            stop = start
            if start == since:
                break
        parts.reverse()
        return b"".join(parts)

    # -- steps ------------------------------------------------------------------------------------

    def chunks(self, written: list[Chunk], places: list[int]) -> Chunks:
        """A plan's chunks: every member's next position, and those written out. places: in the running
        batch, of the leading ones among these that are decodes."""
        if not self._lanes:
            return Chunks(tuple(written), leading=len(places))
        count, lanes = len(self._lanes), tuple(self._lanes.values())
        clock, fixed, at = self._clock, tuple(written), tuple(places)
        reach = self._offsets + count * clock
        made = (clock, self._departures)
        return Chunks(fixed, count, reach, len(at), lambda: self._merged(lanes, made, fixed, at))

    def _merged(
        self,
        lanes: tuple[Lane, ...],
        made: tuple[int, int],
        written: tuple[Chunk, ...],
        places: tuple[int, ...],
    ) -> tuple[Chunk, ...]:
        """All chunks of a plan. made: the clock and the departures then."""
        clock, _ = made
        if made == (self._clock, self._departures):
            tokens = self._last(lanes)
        else:
            tokens = [self._token(lane, lane.offset + clock) for lane in lanes]
        decodes = [
            (at.place, Chunk(at.request, at.slot, at.offset + clock, token, at.pages, (), True, False))
            for at, token in zip(lanes, tokens, strict=True)
        ]
        decodes += zip(places, written, strict=False)
        decodes.sort()
        return (*(chunk for _, chunk in decodes), *written[len(places) :])

    def _token(self, lane: Lane, position: int) -> bytes:
        """What was planned at a position, by somebody who may have ended since."""
        seq = lane.seq
        if seq.since is not None and position >= seq.length:
            self._settle(seq, seq.since)
        return seq.known(position, position + 1)

    def _last(self, lanes: Iterable[Lane]) -> list[bytes]:
        """The last token of each of these members."""
        heard = self._heard[-1][1] if self._heard else {}
        if not isinstance(heard, dict):
            self.settle()
            return [lane.seq.last for lane in lanes]
        clock = self._clock
        return [
            lane.seq.last if lane.seq.since == clock else heard[lane.request][-tk.TOKEN_BYTES :]
            for lane in lanes
        ]

    def progress(self) -> list[tuple[int, Progress | None]]:
        """What a driver may be told of each member, after its place."""
        lanes, clock = list(self._lanes.values()), self._clock
        return [
            (
                lane.place,
                Progress(
                    lane.request, tk.last(token), None, seq.cached, seq.computed_total + clock - since, None,
                    seq.host, seq.storage, seq.recomputed, seq.outputs + clock - since,
                ),
            )
            for lane, token in zip(lanes, self._last(lanes), strict=True)
            for seq in (lane.seq,)
            for since in (clock if seq.since is None else seq.since,)
        ]  # fmt: skip

    def advance(self, sampled: Sampled, repeats: int, stopped: Iterable[RequestId]) -> list[Sequence]:
        """A plan has run: members gain that many positions, and who is due or was stopped leaves."""
        if not isinstance(sampled, Transcript):
            words = {r: v if isinstance(v, bytes) else tk.word(v) for r in self._lanes for v in (sampled[r],)}
            self._heard.append((self._clock, words))
        elif not self._heard or self._heard[-1][1] is not sampled:
            self._heard.append((self._clock, sampled))
        self._clock += repeats
        gone = [self._lanes[request].seq for request in stopped if request in self._lanes]
        for seq in gone:
            self.leave(seq)
        due = self._due
        while due and (due[0][0] <= self._clock or self._gone(due[0])):
            entry = heappop(due)
            if not self._gone(entry):
                self.leave(entry[2])
                gone.append(entry[2])
        return gone

    @staticmethod
    def _gone(entry: tuple[int, int, Sequence]) -> bool:
        due, place, seq = entry
        return seq.since is None or seq.due != due or seq.place != place

    # -- room -------------------------------------------------------------------------------------

    def owed(self, share: float) -> int:
        """Pages that members lack of what they will hold at the end of that share of their outputs
        (`Admission`). For what is known their tables have room."""
        clock, page, owed = self._clock, self._page, 0
        if not share:
            return 0
        for lane in self._lanes.values():
            outputs = (lane.end - clock) * share
            if outputs > 1:  # the last one sampled never gets KV
                lacks = -(-(lane.offset + clock + ceil(outputs)) // page) - lane.pages
                if lacks > 0:
                    owed += lacks
        return owed
