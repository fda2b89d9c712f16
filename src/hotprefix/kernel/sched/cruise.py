"""Decodes inside a page. Owns: `Cruise`, the sequences about which nothing is to be decided for a while.

The problem: in most steps most running requests decode and neither need nor complete a page. Each of them
gains one position and one token, and nothing else about it changes. Handling each of them in every step would
be most of the kernel's work. So these sequences *cruise*: they are only counted.

Rules:
1. All members gain one position in every forward pass, so one clock counts for all of them. The positions
   that a member has computed are the clock plus a number of its own (`Lane.offset`).
2. A member is in every plan.
3. A member leaves when it is due: before the step that completes its page, or with its last output. It also
   leaves when it is stopped, aborted or retracted.
4. A member's own fields (`computed`, `length`, `said`, ...) are not written while it cruises. `settle` brings
   them up to date. Read them only after it: `State.running`, the one way to all running sequences, calls it.

Example: pages of 16. At clock 1000 a sequence with 100 computed positions and 50 outputs left joins. Its
offset is -900. Its page is complete with position 111, so it has room for 11 positions (100 to 110) and is
due at clock 1011. At clock 1004 it has computed 1004 - 900 = 104 positions; its own `computed` still says
100, until `settle` adds 4 and appends the 4 tokens that were heard since.
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
    """One member's place in the cruise. It never changes while the sequence is a member.

    seq: the member. place, request, row: copied from it.
    offset: the positions that it has computed less the clock.
    end: the clock at which it has its last output.
    pages: how many its table has.
    """

    __slots__ = ("end", "offset", "pages", "place", "request", "row", "seq")

    def __init__(self, seq: Sequence, clock: int) -> None:
        self.seq = seq
        self.place = seq.place
        self.request = seq.request.id
        self.row = seq.row
        self.offset = seq.computed - clock
        self.end = clock + seq.outputs_left
        self.pages = len(seq.table)


class Cruise:
    """See the module's rules.

    _clock: positions that a member would have gained if it had cruised from the start.
    _lanes: the members, in the order in which they joined.
    _due: a heap of (due, place, sequence). Entries of sequences that have left or joined again since stay in
    it and are passed over (`_gone`).
    _called: the members that `call` took out since the last `called`.
    _heard: (the clock before a plan ran, the tokens it sampled by request; or a transcript, which holds from
    that clock on until the next entry).
    _offsets: the sum of the members' offsets.
    _departures: how many members have left; with the clock it tells whether the members are the same.
    """

    def __init__(self, page_size: int) -> None:
        self._page = page_size
        self._clock = 0
        self._lanes: dict[RequestId, Lane] = {}
        self._due: list[tuple[int, int, Sequence]] = []
        self._called: list[Sequence] = []
        # No member stays longer than a page, so at most the last `page_size` outcomes are asked for.
        self._heard: deque[tuple[int, dict[RequestId, bytes] | Transcript]] = deque(maxlen=page_size)
        self._offsets = 0
        self._departures = 0

    def __len__(self) -> int:
        return len(self._lanes)

    def still(self, beyond: int) -> int:
        """How many positions every member can gain before one of them must be looked at. There must be at
        least one member. beyond: 1 if the last of these positions may complete a page, else 0. No member
        gains more positions than it has outputs left."""
        while self._gone(self._due[0]):
            heappop(self._due)
        first = self._due[0][0] + beyond
        if beyond:
            for lane in self._lanes.values():
                first = min(first, lane.end)
        return first - self._clock

    # -- members ----------------------------------------------------------------------------------

    def room(self, seq: Sequence) -> int:
        """How many positions a decoding sequence could gain before it is due. 0 if its next position needs or
        completes a page, or if the executor has not been told its whole table yet."""
        inside = seq.computed % self._page
        if not inside or seq.dirty_from != len(seq.table):
            return 0
        return min(self._page - 1 - inside, seq.outputs_left)

    def join(self, seq: Sequence, room: int) -> None:
        """Take in a sequence that can gain `room` positions, >= 1."""
        lane = self._lanes[seq.request.id] = Lane(seq, self._clock)
        seq.since = self._clock
        seq.due = self._clock + room
        self._offsets += lane.offset
        heappush(self._due, (seq.due, seq.place, seq))

    def leave(self, seq: Sequence) -> None:
        """Let a member go, with its fields up to date. Does nothing for a sequence that is no member."""
        if seq.since is not None:
            self._settle(seq, seq.since)
            seq.since = None
            self._departures += 1
            self._offsets -= self._lanes.pop(seq.request.id).offset
            if not self._lanes:  # nothing is remembered of ended requests
                self._due.clear()
                self._heard.clear()

    def call(self, seq: Sequence) -> None:
        """Take out a member that gets no token from the step in flight (it was aborted, or none could be
        sampled). Its fields are as before that step, which still computes one more position for it."""
        self.leave(seq)
        self._called.append(seq)

    def called(self) -> list[Sequence]:
        """The members that `call` took out since `called` was called last."""
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
        """The tokens that were sampled for a member since the clock was at `since`, int32 bytes."""
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
        """A plan's chunks: every member's next position, and those written out. places: for each written
        chunk that stands among the decodes (these come first), its sequence's place in the running batch."""
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
        """All chunks of a plan, as they were when it was made. made: the clock and the number of departures
        at that moment; if both are unchanged, each member's last token is the one that was planned."""
        clock, _ = made
        if made == (self._clock, self._departures):
            tokens = self._last(lanes)
        else:
            tokens = [self._token(lane, lane.offset + clock) for lane in lanes]
        decodes = [
            (at.place, Chunk(at.request, at.row, at.offset + clock, token, at.pages, (), True, False))
            for at, token in zip(lanes, tokens, strict=True)
        ]
        decodes += zip(places, written, strict=False)
        decodes.sort()
        return (*(chunk for _, chunk in decodes), *written[len(places) :])

    def _token(self, lane: Lane, position: int) -> bytes:
        """The token at a member's position in an earlier plan. The sequence may have ended since."""
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
        """(place, progress) of each member, for the driver."""
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
        """A plan has run `repeats` times: the members gain as many positions. Returns the members that leave,
        because they are due or were stopped."""
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
        # True if the entry's sequence has left the cruise, or left and joined again, since it was made.
        due, place, seq = entry
        return seq.since is None or seq.due != due or seq.place != place

    # -- room -------------------------------------------------------------------------------------

    def owed(self, share: float) -> int:
        """Pages that members lack of what they will hold at the end of that share of their outputs, as
        `Admission` counts them. Their tables have room for what is known, so with share 0 they lack none."""
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
