"""What was chosen and has not ended. Owns: `Booking`, `Work` (what is outstanding on one worker), `Bookings`.

Rules:
1. A choice is booked in the moment in which it is made, so the next choice sees it.
2. A booking belongs to a request and to the lives of the workers that serve it. It has one ending: the
   request's, or that of a life that it needs.
3. Prefill work is outstanding from the choice to the first token, decode work from there to the end. When
   nothing is booked, everything outstanding is 0.
4. A report adds what other routers sent there (`foreign`), or takes off what has been done quicker than
   predicted. It never takes off what was sent after it was made.
"""

from __future__ import annotations

import math

from hotprefix.errors import ProtocolError
from hotprefix.fleet.members import Member
from hotprefix.fleet.records import Decision, RouteRequest, WorkerReport

SMOOTH = 0.1
FADE_S = 30.0


class Booking:
    """One request on its workers.

    member, decoder: where the prompt is computed, and where the answer is generated.
    first_new: the first page that it computes itself. seconds, tokens: what its prefill adds to the worker.
    queue, compute: predicted without correction. start, end: predicted times of its prefill. first: predicted
    seconds to the first token.
    fills_steps: at least half of the time of its steps is for its own tokens.
    at: when it was sent, as far as is known; until then, when it was chosen.
    leans: the booking on whose pages it counts. made: it has had its first token, at `answered`.
    pages: that it adds to the worker where it decodes.
    seen, seen_decode: whether the last reports of its two workers were made after it was sent.
    prompt, available, captured: tokens, as in its decision (hits.py).
    """

    __slots__ = (
        "answered", "at", "available", "captured", "compute", "decoder", "end", "fills_steps", "first",
        "first_new",
        "hand_off_s", "keys", "leans", "made", "member", "pages", "prompt", "queue", "request", "restore_s",
        "seconds", "seen", "seen_decode", "session", "start", "tokens",
    )  # fmt: skip

    def __init__(
        self, request: RouteRequest, member: Member, decoder: Member, decision: Decision, first_new: int,
        leans: Booking | None, page_size: int, seconds: float,
    ) -> None:  # fmt: skip
        parts, at = decision.parts, decision.at
        self.request, self.keys, self.session = request.id, request.keys, request.session
        self.member, self.decoder = member, decoder
        self.available, self.captured = decision.available, decision.found.total
        self.prompt, self.first_new, self.leans = request.prompt, first_new, leans
        self.tokens = request.prompt - decision.found.total
        self.pages = -(-(request.prompt + request.outputs) // page_size)
        if member is decoder:
            self.pages -= first_new
        ready = max(parts.queue, parts.restore, parts.pull)
        self.seconds, self.restore_s, self.hand_off_s = seconds, parts.restore, parts.hand_off
        self.queue, self.compute = ready / member.queue.value, parts.compute / member.compute.value
        self.fills_steps = seconds * 2 >= parts.compute
        self.at, self.start, self.end, self.first = at, at + ready, at + ready + parts.compute, parts.first
        self.made, self.seen, self.seen_decode, self.answered = False, False, False, 0.0

    def passes(self, pages: int) -> float:
        """When its prefill is predicted to have computed the prompt's first `pages` pages."""
        if self.made:
            return self.answered
        share = (pages - self.first_new) / max(1, len(self.keys) - self.first_new)
        return self.start + share * (self.end - self.start)


class Work:
    """What is outstanding on one worker.

    all: every booking. prefilling: those without a first token, in the order of their choice.
    seconds, tokens, restore_s: of the prefill work. since: when the first of them began, as far as is known.
    decoding, context: requests that decode, and their prompts' tokens. hand_off_s: of those that will come.
    pages: that were added after the last report.
    residence: seconds from first token to end, smoothed; None = none has ended yet.
    _tokens, _at: reused tokens that fade with time, as of then (`reused`).
    """

    __slots__ = (
        "_at", "_before", "_foreign", "_reported", "_tokens", "all", "context", "decoding", "foreign_decodes",
        "hand_off_s", "pages", "prefilling", "residence", "restore_s", "seconds", "since", "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self._tokens = self._at = 0.0
        self.all: dict[str, Booking] = {}
        self.prefilling: dict[str, Booking] = {}
        self.seconds = self.restore_s = self.hand_off_s = self.since = 0.0
        self.tokens = self.pages = self.decoding = self.context = self.foreign_decodes = 0
        self.residence: float | None = None
        # The last report: when it was made, the seconds that it told more (or less) than was booked, and the
        # seconds of the bookings from before it.
        self._reported, self._foreign, self._before = -1.0, 0.0, 0.0

    def wait(self, now: float) -> float:
        """Seconds until the prefill work will be done. Time passes for the first booking only: what has not
        begun cannot be done."""
        own = 0.0
        if self.prefilling:
            head = next(iter(self.prefilling.values()))
            own = max(0.0, self.seconds - min(head.seconds, max(0.0, now - self.since)))
        if self._foreign > 0:
            return own + max(0.0, self._foreign - (now - self._reported))
        return max(0.0, own + max(self._foreign, -self._before))

    def row_wait(self, rows: int) -> float:
        """Seconds until a request more has one of the worker's `rows`, by how long requests stay."""
        over = len(self.all) + self.foreign_decodes - rows + 1
        return over * self.residence / rows if over > 0 and self.residence is not None else 0.0

    def reported(self, report: WorkerReport, member: Member) -> None:
        """What the worker said stands there."""
        self._reported = report.made
        tokens, self._before, self.pages = 0, 0.0, 0
        for booking in self.prefilling.values():
            booking.seen = booking.at < report.made
            if booking.seen:
                tokens += booking.tokens
                self._before += booking.seconds
        for booking in self.all.values():
            if booking.decoder is member:
                booking.seen_decode = booking.at < report.made
                self.pages += 0 if booking.seen_decode else booking.pages
        self._foreign = (report.prefill_tokens - tokens) * member.token_s
        self.foreign_decodes = max(0, report.decodes - self.decoding)

    def reuse(self, tokens: int, now: float) -> None:
        """A request that reuses so many tokens was given to the worker."""
        self._tokens, self._at = self.reused(now) * FADE_S + tokens, now

    def reused(self, now: float) -> float:
        """Tokens reused a second, over about the last `FADE_S` seconds."""
        return self._tokens * math.exp((self._at - now) / FADE_S) / FADE_S

    def forget_report(self) -> None:
        """The last report is not known any more."""
        self._reported, self._foreign, self._before, self.foreign_decodes = -1.0, 0.0, 0.0, 0

    def begin(self, booking: Booking, now: float) -> None:
        """The booking's prefill is outstanding from now on."""
        if not self.prefilling:
            self.since = now
        self.prefilling[booking.request] = booking
        self.seconds += booking.seconds
        self.restore_s += booking.restore_s
        self.tokens += booking.tokens

    def take_over(self, booking: Booking, failed: Booking) -> None:
        """The booking also computes the pages before its own, which `failed` would have computed."""
        more = booking.first_new - failed.first_new
        share = more / (len(failed.keys) - failed.first_new)
        seconds, tokens = failed.seconds * share, round(failed.tokens * share)
        booking.first_new, booking.leans = failed.first_new, failed.leans
        if booking.decoder is booking.member:
            booking.pages += more
        booking.seconds, booking.tokens = booking.seconds + seconds, booking.tokens + tokens
        booking.start = min(booking.start, failed.start)
        self.seconds, self.tokens = self.seconds + seconds, self.tokens + tokens
        if booking.seen:
            self._before += seconds
        if not booking.seen_decode and booking.decoder is booking.member:
            self.pages += more

    def done(self, booking: Booking, now: float) -> None:
        """The booking's prefill is not outstanding any more."""
        if next(iter(self.prefilling)) == booking.request:
            self.since = now
        del self.prefilling[booking.request]
        if booking.seen:
            self._before = max(0.0, self._before - booking.seconds)
        if not self.prefilling:  # sums of floats end exactly at 0
            self.seconds = self.restore_s = self._before = 0.0
            self.tokens = 0
            return
        self.seconds = max(0.0, self.seconds - booking.seconds)
        self.restore_s = max(0.0, self.restore_s - booking.restore_s)
        self.tokens -= booking.tokens


class Bookings:
    """Every request that was given a worker and has not ended. work: what is outstanding, by worker."""

    def __init__(self) -> None:
        self.all: dict[str, Booking] = {}
        self.work: dict[str, Work] = {}

    def add(self, booking: Booking, now: float) -> None:
        """Book a choice."""
        self.all[booking.request] = booking
        member, decoder = self.work[booking.member.name], self.work[booking.decoder.name]
        member.all[booking.request] = decoder.all[booking.request] = booking
        # The prediction waits for what stands on a link before it. Others have booked that.
        booking.restore_s = max(0.0, booking.restore_s - member.restore_s)
        booking.hand_off_s = max(0.0, booking.hand_off_s - decoder.hand_off_s)
        member.begin(booking, now)
        decoder.pages += booking.pages
        decoder.hand_off_s += booking.hand_off_s

    def first_token(self, booking: Booking, now: float) -> None:
        """Its prefill is done; it decodes."""
        booking.made, booking.answered, booking.leans = True, now, None
        self._prefill_done(booking, now)
        decoder = self.work[booking.decoder.name]
        decoder.decoding += 1
        decoder.context += booking.prompt

    def _prefill_done(self, booking: Booking, now: float) -> None:
        member, decoder = self.work[booking.member.name], self.work[booking.decoder.name]
        decoder.hand_off_s = max(0.0, decoder.hand_off_s - booking.hand_off_s)
        member.done(booking, now)
        if member is not decoder:
            del member.all[booking.request]

    def end(self, booking: Booking, now: float) -> None:
        """It is over: nothing of it is outstanding any more."""
        decoder = self.work[booking.decoder.name]
        if booking.made:
            decoder.decoding -= 1
            decoder.context -= booking.prompt
            stayed = now - booking.answered
            known = decoder.residence
            decoder.residence = stayed if known is None else known + SMOOTH * (stayed - known)
        else:
            self._prefill_done(booking, now)
        del decoder.all[booking.request]
        if not booking.seen_decode:
            decoder.pages -= booking.pages
        if not decoder.all:
            decoder.hand_off_s = 0.0
        del self.all[booking.request]

    def check(self) -> None:
        """Raise ProtocolError unless what is outstanding is that of the bookings."""
        for name, work in self.work.items():
            own = {request for request, b in self.all.items() if name in (b.member.name, b.decoder.name)}
            if not work.all.keys() <= own or not work.prefilling.keys() <= work.all.keys():
                raise ProtocolError(f"worker {name!r}: work of requests that have ended")
            left = (work.seconds, work.restore_s, work.hand_off_s, work.tokens, work.pages, work.decoding)
            if not work.all and (any(left) or work.context):
                raise ProtocolError(f"worker {name!r} has no request, yet work is outstanding: {left}")
