"""What was chosen and has not ended. Owns: `Booking`, `Work` (what is outstanding on one worker), `Bookings`.

Rules:
1. A choice is booked in the moment in which it is made, so the next choice sees it.
2. A booking belongs to a request and to the lives of the workers that serve it. It has one ending: the
   request's, or that of a life that it needs.
3. Prefill work is outstanding from the choice to the first token, decode work from there to the end. When
   nothing is booked, everything outstanding is 0.
"""

from __future__ import annotations

from hotprefix.errors import ProtocolError
from hotprefix.fleet.members import Member
from hotprefix.fleet.records import Found, Keys, Parts


class Booking:
    """One request on its workers.

    member, decoder: where the prompt is computed, and where the answer is generated.
    first_new: the first page that it computes itself. seconds, tokens: its prefill work.
    at: when it was chosen; start, end: predicted times of its prefill.
    pages: that it adds to the worker. restore_s, hand_off_s: what it adds to these links.
    """

    __slots__ = (
        "at", "decoder", "end", "first_new", "found", "hand_off_s", "keys", "member", "pages", "parts",
        "prompt", "request", "restore_s", "seconds", "session", "start", "tokens",
    )  # fmt: skip

    def __init__(
        self, request: str, member: Member, decoder: Member, keys: Keys, prompt: int, found: Found,
        parts: Parts, first_new: int, tokens: int, pages: int, session: str | None, at: float,
    ) -> None:  # fmt: skip
        self.request, self.member, self.decoder = request, member, decoder
        self.keys, self.prompt, self.found, self.parts = keys, prompt, found, parts
        self.first_new, self.tokens, self.pages, self.session = first_new, tokens, pages, session
        self.seconds, self.restore_s, self.hand_off_s = parts.compute, parts.restore, parts.hand_off
        self.at = at
        self.start = at + max(parts.queue, parts.restore, parts.pull)
        self.end = self.start + parts.compute


class Work:
    """What is outstanding on one worker.

    prefilling: bookings without a first token, in the order of their choice. all: every booking.
    seconds, tokens: of the prefill work. since: when the first of them began, as far as is known.
    """

    __slots__ = ("all", "hand_off_s", "pages", "prefilling", "restore_s", "seconds", "since", "tokens")

    def __init__(self) -> None:
        self.all: dict[str, Booking] = {}
        self.prefilling: dict[str, Booking] = {}
        self.seconds = self.restore_s = self.hand_off_s = self.since = 0.0
        self.tokens = self.pages = 0

    def wait(self, now: float) -> float:
        """Seconds until the prefill work that is booked will be done. Time passes for the first booking only:
        what has not begun cannot be done."""
        if not self.prefilling:
            return 0.0
        head = next(iter(self.prefilling.values()))
        return self.seconds - min(head.seconds, max(0.0, now - self.since))

    def begin(self, booking: Booking, now: float) -> None:
        """The booking's prefill is outstanding from now on."""
        if not self.prefilling:
            self.since = now
        self.prefilling[booking.request] = booking
        self.seconds += booking.seconds
        self.restore_s += booking.restore_s
        self.tokens += booking.tokens

    def done(self, booking: Booking, now: float) -> None:
        """The booking's prefill is not outstanding any more."""
        if next(iter(self.prefilling)) == booking.request:
            self.since = now
        del self.prefilling[booking.request]
        if not self.prefilling:  # sums of floats end exactly at 0
            self.seconds = self.restore_s = 0.0
            self.tokens = 0
            return
        self.seconds -= booking.seconds
        self.restore_s -= booking.restore_s
        self.tokens -= booking.tokens


class Bookings:
    """Every request that was given a worker and has not ended."""

    def __init__(self) -> None:
        self.all: dict[str, Booking] = {}
        self.work: dict[str, Work] = {}

    def add(self, booking: Booking, now: float) -> None:
        """Book a choice."""
        self.all[booking.request] = booking
        member, decoder = self.work[booking.member.name], self.work[booking.decoder.name]
        member.all[booking.request] = booking
        decoder.all[booking.request] = booking
        member.begin(booking, now)
        decoder.pages += booking.pages

    def first_token(self, booking: Booking, now: float) -> None:
        """Its prefill is done; it decodes."""
        work = self.work[booking.member.name]
        if booking.request in work.prefilling:
            work.done(booking, now)
        if booking.member is not booking.decoder:
            work.all.pop(booking.request, None)

    def end(self, booking: Booking, now: float) -> None:
        """It is over: nothing of it is outstanding any more."""
        self.first_token(booking, now)
        decoder = self.work[booking.decoder.name]
        del decoder.all[booking.request]
        decoder.pages -= booking.pages
        del self.all[booking.request]

    def drop(self, member: Member, now: float) -> list[Booking]:
        """End every booking that needs this life of the worker, and return them."""
        ended = list(self.work[member.name].all.values())
        for booking in ended:
            self.end(booking, now)
        return ended

    def check(self) -> None:
        """Raise ProtocolError unless what is outstanding is that of the bookings."""
        for name, work in self.work.items():
            own = {id for id, b in self.all.items() if name in (b.member.name, b.decoder.name)}
            if not work.all.keys() <= own or not work.prefilling.keys() <= work.all.keys():
                raise ProtocolError(f"worker {name!r}: work of requests that have ended")
            if not work.all and (work.seconds, work.tokens, work.pages, work.restore_s) != (0.0, 0, 0, 0.0):
                raise ProtocolError(f"worker {name!r} has no request, yet work is outstanding")
