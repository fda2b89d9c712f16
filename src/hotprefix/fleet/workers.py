"""What is known of the workers. Owns: `Workers`, the half of the fleet's edge by which knowledge comes in:
who is there, what they say of themselves, and what they cache.

Rules:
1. Time comes in as an argument and never goes backwards.
2. What a worker said of a life that is over is ignored.
3. What comes of a life that has ended ends with it: its entries, its bookings, its pages in flight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hotprefix.errors import ProtocolError
from hotprefix.fleet import records as rec
from hotprefix.fleet.bookings import Booking, Bookings, Work
from hotprefix.fleet.config import FleetConfig
from hotprefix.fleet.correction import Errors
from hotprefix.fleet.event_order import Todo
from hotprefix.fleet.hot import HotPrefix, hottest
from hotprefix.fleet.index import PageIndex
from hotprefix.fleet.inflight import PagesInFlight
from hotprefix.fleet.load import components
from hotprefix.fleet.members import Member, Members
from hotprefix.fleet.records import Keys, Shelf
from hotprefix.fleet.sessions import SessionHomes
from hotprefix.fleet.wanted import Wanted


@dataclass(slots=True)
class FleetCounters:
    """Monotonic counters.

    routed, waits, expired: what `route` answered. unknown: decisions for a worker without a report.
    late: reports of progress for requests that have ended, or were never routed.
    restarts: lives that were seen to end without a leave. gaps: questions for missing events. dropped: how
    often a worker's entries were dropped because of missing events, or for a snapshot.
    """

    routed: int = 0
    waits: int = 0
    expired: int = 0
    unknown: int = 0
    late: int = 0
    restarts: int = 0
    gaps: int = 0
    dropped: int = 0


class Workers:
    """See the module's rules. Methods raise ProtocolError for a worker that is not a member."""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.counters = FleetCounters()
        self._members = Members(config)
        self._bookings = Bookings()
        self._index = PageIndex(config.entries)
        self._flights = PagesInFlight()
        self._homes = SessionHomes(config.sessions)
        self._wanted = Wanted()
        self._report_ttl_s = config.report_ttl_s
        self._changes, self._changed_at = 0, -math.inf
        self._now = -math.inf

    # -- workers ----------------------------------------------------------------------------------

    def join(self, worker: str, profile: rec.Profile, now: float, incarnation: int | None = None) -> None:
        """A worker may be chosen from now on. incarnation: the number that it gives this life, as in its
        reports; what is still on its way from an earlier one is then known to be old. Raises ConfigError if
        its page size is not the fleet's."""
        self._tick(now)
        self._members.join(worker, profile, now).told = incarnation
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

    def flushed(self, worker: str, now: float) -> None:
        """The worker has dropped its cache: what it was presumed to have is gone. What events say is taken
        away by events."""
        self._tick(now)
        self._members[worker]
        self._flights.drop(worker)

    def _fade(self, now: float) -> None:
        """Reports that are too old are not known any more."""
        for name, member in self._members.all.items():
            if member.report is not None and now - member.report.made > self._report_ttl_s:
                member.report = None
                self._bookings.work[name].forget_report()

    def report(self, worker: str, report: rec.WorkerReport, now: float) -> None:
        """What the worker said. What was said before the last report, or before this life, is ignored."""
        self._tick(now)
        member = self._members[worker]
        if report.made < member.since or not self._lives(member, report.incarnation, now):
            return
        if member.report is None or report.made >= member.report.made:
            member.report = report
            self._bookings.work[worker].reported(report, member)
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
        for booking in list(self._bookings.work[member.name].all.values()):
            self._close(booking, now, gone=member)
        self._flights.drop(member.name)
        self._bookings.work[member.name] = Work()
        self._index.drop(member.mask)
        self._changed(now)

    def _close(self, booking: Booking, now: float, gone: Member | None = None) -> None:
        """A booking has ended. gone: the worker with whose life it ended. If it only was to decode there,
        others may count on pages that it was computing elsewhere."""
        self._bookings.end(booking, now)
        if booking.made:
            return
        if booking.member is gone:
            self._flights.remove(booking)
        else:
            self._flights.fail(booking, self._bookings.work[booking.member.name])
        if booking.session is not None:
            self._homes.failed(booking.session)

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
            if change.shelf == Shelf.L1:
                self._wanted.removed(change.removed)
        if change.stored:
            self._index.store(mask, change.shelf, change.stored)
            if change.shelf == Shelf.L1:
                self._wanted.stored(change.stored)

    # -- what is told -----------------------------------------------------------------------------

    def loads(self, now: float) -> dict[str, rec.Load]:
        """Each worker's load now."""
        self._tick(now)
        self._fade(now)
        found = {}
        for name, member in self._members.all.items():
            work = self._bookings.work[name]
            found[name] = rec.Load(*components(member, work, work.wait(now), self.config.horizon_s))
        return found

    def members(self) -> Mapping[str, Member]:
        """The workers, to be read only."""
        return self._members.all

    def hottest(self, most: int = 12) -> list[HotPrefix]:
        """The prefixes that the last requests asked for most, and who has them."""
        return hottest(self._index, self._flights, self._members, most)

    def outstanding(self, worker: str) -> int:
        """Prompt tokens that were given to the worker and are still to be computed, as far as is known."""
        return self._bookings.work[self._members[worker].name].tokens

    def errors(self) -> dict[str, Errors]:
        """How far each worker's predictions were off."""
        return {name: member.errors for name, member in self._members.all.items()}

    def check(self) -> None:
        """Raise ProtocolError unless everything outstanding belongs to a booking. It is for tests and for
        idle moments."""
        self._bookings.check()

    def _changed(self, now: float) -> None:
        """Something has changed that may let waiting requests go."""
        self._changes, self._changed_at = self._changes + 1, now

    def _tick(self, now: float) -> None:
        if now < self._now:
            raise ProtocolError(f"time went from {self._now} back to {now}")
        self._now = now
        self._flights.expire(now)
