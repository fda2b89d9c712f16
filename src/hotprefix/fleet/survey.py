"""The fleet as one request finds it. Owns: `Survey`, which makes the places of a view.

Rules:
1. Every worker gets a place, also one that may not be chosen: it may be the peer to pull from, and what it
   has counts as available.
2. A worker without a report is taken to be as loaded as the others are on average, and never less than by
   what was sent there. So what is not known is never the least load.
3. A worker that only prefills hands over to the decode worker that has a row soonest.
"""

from __future__ import annotations

from hotprefix.fleet.bookings import Booking, Bookings
from hotprefix.fleet.config import FleetConfig, Term
from hotprefix.fleet.index import PageIndex
from hotprefix.fleet.inflight import PagesInFlight, shared
from hotprefix.fleet.load import components
from hotprefix.fleet.members import Members
from hotprefix.fleet.predict import Predictor
from hotprefix.fleet.records import Keys, RouteRequest, Shelf
from hotprefix.fleet.view import Place


class Survey:
    """See the module's rules."""

    def __init__(
        self,
        config: FleetConfig,
        members: Members,
        bookings: Bookings,
        index: PageIndex,
        flights: PagesInFlight,
    ) -> None:
        self._page_size, self._horizon_s = config.page_size, config.horizon_s
        self._members, self._bookings = members, bookings
        self._index, self._flights = index, flights
        self._in_flight = Term.IN_FLIGHT in config.terms
        self.predictor = Predictor(config)

    def places(self, now: float) -> list[Place]:
        """Every worker with its load, in the order in which they joined."""
        horizon = self._horizon_s
        places: list[Place] = []
        waits, loads, known = 0.0, 0.0, 0
        for member in self._members.all.values():
            work = self._bookings.work[member.name]
            wait = work.wait(now)
            place = Place(member, work, components(member, work, wait, horizon), wait)
            places.append(place)
            if member.report is not None:
                waits, loads, known = waits + wait, loads + place.load, known + 1
        if 0 < known < len(places):
            for place in places:
                if place.member.report is None:
                    place.wait, place.load = max(place.wait, waits / known), max(place.load, loads / known)
        return places

    def match(self, places: list[Place], request: RouteRequest) -> int:
        """Fill in what each worker need not compute. Returns the most that one of them has, in tokens."""
        size, most, keys = self._page_size, request.prompt - 1, request.keys
        by_bit = [places[0]] * self._members.bits
        for place in places:
            by_bit[place.member.bit] = place
        for mask, pages in self._index.reach(keys, Shelf.L1):
            for bit in bits(mask):
                place = by_bit[bit]
                place.pages = place.resident = pages
                place.l1 = min(pages * size, most)
        if self._index.deepest >= Shelf.L2:
            self._match_below(places, by_bit, request, Shelf.L2)
        if self._index.deepest >= Shelf.L3:
            self._match_below(places, by_bit, request, Shelf.L3)
        for booking in self._flights.find(keys):
            if booking.made or self._in_flight:
                self._lean(by_bit[booking.member.bit], booking, keys, most)
        best = 0
        for place in places:
            best = max(best, place.matched)
        return best

    def _match_below(
        self, places: list[Place], by_bit: list[Place], request: RouteRequest, shelf: Shelf
    ) -> None:
        """What workers have on this shelf beyond those above it, as far as they have the links."""
        store = self._members.store
        for mask, pages in self._index.reach(request.keys, shelf):
            found = [by_bit[bit] for bit in bits(mask & ~store)]
            if mask & store:
                found += [place for place in places if place.member.profile.shared_l3]
            for place in found:
                profile = place.member.profile
                more = min(pages * self._page_size, request.prompt - 1) - place.matched
                if more <= 0 or profile.restore is None or (shelf == Shelf.L3 and profile.fetch is None):
                    continue
                place.pages = pages
                if shelf == Shelf.L2:
                    place.resident, place.l2 = pages, more
                else:
                    place.l3 += more

    def _lean(self, place: Place, booking: Booking, keys: Keys, most: int) -> None:
        """Count on the pages that a booking computes, if they go on from those that the worker has."""
        if booking.first_new > place.pages:
            return
        pages = shared(keys, booking.keys, booking.first_new)
        tokens = min(pages * self._page_size, most) - place.matched
        if pages <= place.pages or tokens <= 0:
            return
        place.pages = pages
        if not booking.made:
            place.leans = booking
        elif not place.flight:
            place.l1 += tokens
            return
        place.flight += tokens
        place.there_at = max(place.there_at, booking.passes(pages))

    def decoder(self, places: list[Place], avoid: frozenset[str]) -> Place | None:
        """The decode worker for those that only prefill: where there is a row soonest, then the fewest rows
        in use. None: there is none."""
        able = [
            p for p in places if p.member.decodes and not p.member.draining and p.member.name not in avoid
        ]
        return min(able, key=_rows, default=None)

    def predict(self, places: list[Place], everyone: list[Place], request: RouteRequest, now: float) -> None:
        """Fill in the predicted parts of these places. everyone: among them are the peers."""
        peer = max(everyone, key=lambda p: p.resident)
        known, displaced = 0, 0.0
        for place in places:
            self.predictor.predict(place, request, peer, now)
            if place.displacement is not None:
                known, displaced = known + 1, displaced + place.displacement
        if 0 < known < len(places):
            for place in places:
                if place.displacement is None:
                    place.cost += self.predictor.displacement_cost(displaced / known)


def bits(mask: int) -> list[int]:
    """The positions of the bits that are set."""
    found = []
    while mask:
        bit = mask.bit_length() - 1
        found.append(bit)
        mask ^= 1 << bit
    return found


def _rows(place: Place) -> tuple[float, float, int, int]:
    member = place.member
    return place.work.row_wait(member.profile.max_running), place.loads[1], member.chosen, member.bit
