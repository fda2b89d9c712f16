"""The fleet core: one object that router and simulator both drive. Owns: the call order at its edge.

Which worker: `Fleet.route` makes a view of the workers that may be chosen, and one function of policies.py
chooses. Everything else here keeps what that function sees up to date.

Rules:
1. No I/O. Time comes in as an argument and never goes backwards. Randomness is passed in.
2. A request is given a worker at most once at a time: a second `route` of it needs an ending before.
3. Something is always chosen if a worker may be chosen. A request waits here only if none may, and only for
   `hold_s`.
4. What comes of a request or a life that has ended is counted and changes nothing.

    join / drain / leave / report / events      what is known of the workers
    route(request, now) -> Decision | Wait      which of them
    progress(request, stage, now, seen)         how the request goes on there
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hotprefix.errors import ConfigError, ProtocolError
from hotprefix.fleet import records as rec
from hotprefix.fleet.bookings import Booking, Bookings, Work
from hotprefix.fleet.config import Arm, FleetConfig
from hotprefix.fleet.event_order import Todo
from hotprefix.fleet.index import PageIndex
from hotprefix.fleet.load import load_of
from hotprefix.fleet.members import Member, Members
from hotprefix.fleet.policies import POLICIES
from hotprefix.fleet.records import Keys, RouteRequest, Seen, Shelf, Stage
from hotprefix.fleet.sessions import SessionHomes
from hotprefix.fleet.view import Draw, Place, View

ENDINGS = (Stage.ENDED, Stage.FAILED, Stage.CANCELLED)


@dataclass(slots=True)
class FleetCounters:
    """Monotonic counters; `waiting` is a gauge.

    routed, waits, expired: what `route` answered. late: reports of progress for requests that have ended.
    restarts: lives that were seen to end without a leave. gaps: questions for missing events. dropped: how
    often a worker's entries were dropped because they could not be had.
    """

    routed: int = 0
    waits: int = 0
    expired: int = 0
    late: int = 0
    restarts: int = 0
    gaps: int = 0
    dropped: int = 0


class Fleet:
    """See the module's rules. Methods raise ProtocolError on a broken call order."""

    def __init__(self, config: FleetConfig, draw: Draw | None = None) -> None:
        """draw: needed by the arms that draw (`random`, `plan`). Raises ConfigError if it is missing."""
        if draw is None and config.arm in (Arm.RANDOM, Arm.PLAN):
            raise ConfigError(f"arm={config.arm} draws: give draw, such as Random(0).randrange", param="draw")
        self.config = config
        self.counters = FleetCounters()
        self._policy = POLICIES[config.arm]
        self._draw = draw or _none
        self._members = Members(config.page_size, config.held)
        self._bookings = Bookings()
        self._index = PageIndex(config.entries)
        self._homes = SessionHomes(config.sessions)
        self._waiting: dict[str, float] = {}
        self._wake = math.inf
        self._turn = 0
        self._now = -math.inf

    # -- workers ----------------------------------------------------------------------------------

    def join(self, worker: str, profile: rec.Profile, now: float) -> None:
        """A worker may be chosen from now on. Raises ConfigError if its page size is not the fleet's."""
        self._tick(now)
        self._members.join(worker, profile, now)
        self._bookings.work[worker] = Work()
        self._changed(now)

    def drain(self, worker: str, now: float) -> None:
        """The worker gets no further requests; what it has goes on."""
        self._tick(now)
        self._members[worker].draining = True

    def leave(self, worker: str, now: float) -> None:
        """The worker is gone, with its pages and requests."""
        self._tick(now)
        member = self._members[worker]
        self._forget(member, now)
        self._members.leave(member)
        self._homes.leave(worker)
        del self._bookings.work[worker]

    def report(self, worker: str, report: rec.WorkerReport, now: float) -> None:
        """What the worker said. What was said before the last report, or before this life, is ignored."""
        self._tick(now)
        member = self._members[worker]
        if not self._lives(member, report.incarnation, now) or report.made < member.since:
            return
        if member.report is None or report.made >= member.report.made:
            member.report = report
            self._changed(now)

    def _lives(self, member: Member, told: int | None, now: float) -> bool:
        """Whether something that the worker said is of its present life. A later life begins with it."""
        if told is None or told == member.told:
            return True
        if member.told is not None:
            if told < member.told:
                return False
            member.order.restart()
            self._begin_again(member, now)
        member.told = told
        return True

    def _begin_again(self, member: Member, now: float) -> None:
        self.counters.restarts += 1
        self._forget(member, now)
        self._members.begin_again(member, now)

    def _forget(self, member: Member, now: float) -> None:
        """Drop what belonged to the worker's life."""
        self._bookings.drop(member, now)
        self._index.drop(member.mask)
        self._changed(now)

    # -- what is cached where ---------------------------------------------------------------------

    def cached(self, worker: str, shelf: Shelf, now: float, stored: Keys = (), removed: Keys = ()) -> None:
        """What the worker stored and removed, from a source that loses nothing and keeps the order."""
        self._tick(now)
        self._apply(self._members[worker], rec.Change(shelf, stored, removed))

    def events(self, worker: str, batch: rec.Batch, now: float) -> rec.ReplayWanted | None:
        """A live batch of the worker's numbered events. Returns what to ask the worker for, if events are
        missing. Until that is answered by `replayed` or `replay_failed`, further batches are held back."""
        self._tick(now)
        member = self._members[worker]
        if not self._lives(member, batch.incarnation, now):
            return None
        return self._do(member, member.order.live(batch), now)

    def replayed(
        self, wanted: rec.ReplayWanted, batches: tuple[rec.Batch, ...], now: float
    ) -> rec.ReplayWanted | None:
        """The answer to a question for events. It is ignored if the fleet does not wait for it any more."""
        self._tick(now)
        member = self._asked(wanted)
        return (
            None if member is None else self._do(member, member.order.replayed(wanted.ticket, batches), now)
        )

    def replay_failed(self, wanted: rec.ReplayWanted, now: float) -> rec.ReplayWanted | None:
        """The worker cannot replay: its entries are dropped, and live events build them up again."""
        self._tick(now)
        member = self._asked(wanted)
        return None if member is None else self._do(member, member.order.failed(wanted.ticket), now)

    def snapshot(self, worker: str, batch: rec.Batch, now: float) -> rec.ReplayWanted | None:
        """All that the worker has after its batch of this number, in the place of all batches up to it."""
        self._tick(now)
        member = self._members[worker]
        if not self._lives(member, batch.incarnation, now):
            return None
        return self._do(member, member.order.snapshot(batch), now)

    def _asked(self, wanted: rec.ReplayWanted) -> Member | None:
        member = self._members.all.get(wanted.worker)
        return member if member is not None and member.incarnation == wanted.incarnation else None

    def _do(self, member: Member, todo: Todo, now: float) -> rec.ReplayWanted | None:
        if todo.begin_again:
            self._begin_again(member, now)
        elif todo.drop:
            self._index.drop(member.mask)
            self.counters.dropped += 1
        for batch in todo.apply:
            for change in batch.changes:
                self._apply(member, change)
        if todo.ask is None:
            return None
        self.counters.gaps += 1
        return rec.ReplayWanted(member.name, todo.ask, member.incarnation, member.order.ticket)

    def _apply(self, member: Member, change: rec.Change) -> None:
        mask = self._members.holder(member, change.shelf)
        if change.cleared:
            self._index.drop(mask, change.shelf)
        if change.removed:
            self._index.remove(mask, change.shelf, change.removed)
        if change.stored:
            self._index.store(mask, change.shelf, change.stored)

    # -- requests ---------------------------------------------------------------------------------

    def route(self, request: RouteRequest, now: float) -> rec.Decision | rec.Wait:
        """Choose the request's worker and book the choice, or tell until when to wait. A request that waits
        is routed again by its driver, or cancelled."""
        self._tick(now)
        if request.id in self._bookings.all:
            raise ProtocolError(f"request {request.id!r} has a worker: end it there first")
        since = self._waiting.pop(request.id, now)
        expired = now - since >= self.config.hold_s
        places = self._places(request, now, at_bound=expired)
        decoders = [m for m in self._members.all.values() if m.decodes and not m.draining]
        if not places or not decoders:
            return self._wait(request, since, expired)
        view = View(request, places, now, self.config, self._homes, self._draw)
        place, rule = self._policy(view)
        return self._decide(view, place, rule)

    def _places(self, request: RouteRequest, now: float, at_bound: bool) -> list[Place]:
        """The workers that may be chosen. at_bound: also those that have as many requests as they may."""
        bound, work = self.config.bound, self._bookings.work
        places = []
        for member in self._members.all.values():
            if member.draining or not member.prefills or member.name in request.avoid:
                continue
            own = work[member.name]
            if bound and not at_bound and len(own.all) >= bound:
                continue
            places.append(Place(member, len(own.all), load_of(member, own, self.config, now)))
        return places

    def _wait(self, request: RouteRequest, since: float, expired: bool) -> rec.Wait:
        until = since + self.config.hold_s
        if expired:
            self.counters.expired += 1
            return rec.Wait(request.id, self._why(request), until, True)
        self.counters.waits += 1
        self._waiting[request.id], self._wake = since, math.inf
        return rec.Wait(request.id, self._why(request), until)

    def _why(self, request: RouteRequest) -> str:
        members = [m for m in self._members.all.values() if m.name not in request.avoid]
        if not members:
            return "no_worker"
        able = [m for m in members if not m.draining]
        if not able:
            return "all_drain"
        if not any(m.prefills for m in able):
            return "no_prefill_worker"
        return "no_decode_worker" if not any(m.decodes for m in able) else "all_at_bound"

    def _decide(self, view: View, place: Place, rule: str) -> rec.Decision:
        request, member, now = view.request, place.member, view.now
        decoder = member
        parts, found = rec.Parts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None), rec.Found()
        self._turn += 1
        member.chosen = self._turn
        self.counters.routed += 1
        booking = Booking(
            request.id, member, decoder, request.keys, request.prompt, found, parts, 0, request.prompt,
            len(request.keys), request.session, now,
        )  # fmt: skip
        self._bookings.add(booking, now)
        report = member.known(now, self.config.report_ttl_s)
        return rec.Decision(
            request.id, now, member.name, member.incarnation, decoder.name, decoder.incarnation, None,
            request.prompt, found, 0, parts, place.loads, (), rule,
            None if report is None else now - report.made, () if report is not None else ("report",), None, 0,
        )  # fmt: skip

    def progress(self, request: str, stage: Stage, now: float, seen: Seen | None = None) -> None:
        """How the request has come on. seen: what was observed by its first token."""
        self._tick(now)
        booking = self._bookings.all.get(request)
        if booking is None:
            if self._waiting.pop(request, None) is None or stage not in ENDINGS:
                self.counters.late += 1
            return
        if stage is Stage.FIRST_TOKEN:
            self._bookings.first_token(booking, now)
            if booking.session is not None:
                self._homes.bind(booking.session, booking.decoder.name)
        elif stage in ENDINGS:
            self._bookings.end(booking, now)
            self._changed(now)

    def wake_at(self) -> float | None:
        """When the waiting requests are to be routed again; None while none waits."""
        if not self._waiting:
            return None
        return min(self._wake, min(self._waiting.values()) + self.config.hold_s)

    def loads(self, now: float) -> dict[str, rec.Load]:
        """Each worker's load now."""
        work, config = self._bookings.work, self.config
        return {name: load_of(m, work[name], config, now) for name, m in self._members.all.items()}

    def check(self) -> None:
        """Raise ProtocolError unless everything outstanding belongs to a booking. It is for tests and for
        idle moments."""
        self._bookings.check()

    def _changed(self, now: float) -> None:
        """Something has changed that may let waiting requests go."""
        self._wake = now

    def _tick(self, now: float) -> None:
        if now < self._now:
            raise ProtocolError(f"time went from {self._now} back to {now}")
        self._now = now


def _none(_: int) -> int:
    raise ProtocolError("this arm does not draw")
