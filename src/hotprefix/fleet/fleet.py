"""The fleet core: one object that router and simulator both drive. Owns: the choice and its bookkeeping.

Which worker: `Fleet.route` makes a view of the workers that may be chosen, and one function of policies.py
chooses. Everything else keeps what that function sees up to date.

Rules:
1. No I/O. Time comes in as an argument and never goes backwards. Randomness is passed in.
2. A request has one worker at a time: a second `route` of it needs an ending before.
3. Something is always chosen if a worker may be chosen. A request waits here only if none may, and only for
   `hold_s`; then also workers at their bound may be chosen.
4. A choice is booked in the moment in which it is made, and has one ending. What comes later of a request
   that has ended is counted and changes nothing.

    join / drain / leave / report / events      what is known of the workers (workers.py)
    route(request, now) -> Decision | Wait      which of them
    progress(request, stage, now, seen)         how the request goes on there
"""

from __future__ import annotations

from hotprefix.errors import ConfigError, ProtocolError
from hotprefix.fleet.bookings import Booking
from hotprefix.fleet.config import FleetConfig, RoutingPolicy
from hotprefix.fleet.correction import Errors
from hotprefix.fleet.hits import Hits
from hotprefix.fleet.plan import Plan
from hotprefix.fleet.policies import POLICIES
from hotprefix.fleet.records import Copying, Decision, Load, RouteRequest, Seen, Stage, Wait
from hotprefix.fleet.survey import Survey
from hotprefix.fleet.view import Draw, Place, View
from hotprefix.fleet.workers import Workers

ENDINGS = (Stage.ENDED, Stage.FAILED, Stage.CANCELLED)
LEAST_S = 0.001


class Fleet(Workers):
    """See the module's rules. Methods raise ProtocolError on a broken call order.

    hits: where hits went. error: how far predictions were off, over all workers. copies: tokens that were
    computed a further time by choice, by reason. plan: that policy's plan.
    """

    def __init__(self, config: FleetConfig, draw: Draw | None = None) -> None:
        """draw: needed by the policies that draw (`random`, `plan`). Raises ConfigError if it is missing."""
        super().__init__(config)
        if draw is None and config.policy in (RoutingPolicy.RANDOM, RoutingPolicy.PLAN):
            raise ConfigError(
                f"policy={config.policy} draws: give draw, such as Random(0).randrange", param="draw"
            )
        self.hits, self.error, self.plan = Hits(), Errors(), Plan(config.plan)
        self.copies = dict.fromkeys(Copying, 0)
        self._policy = POLICIES[config.policy]
        self._draw: Draw = draw or _none
        self._survey = Survey(config, self._members, self._bookings, self._index, self._flights)
        # Since when each waiting request has waited, the oldest first; and after how many changes each was
        # last looked at, the longest ago first.
        self._waiting: dict[str, float] = {}
        self._looked: dict[str, int] = {}
        self._turn = 0

    def route(self, request: RouteRequest, now: float) -> Decision | Wait:
        """Choose the request's worker and book the choice, or tell until when to wait. A request that waits
        is routed again by its driver, or cancelled. Raises ConfigError if it has more keys than pages."""
        self._tick(now)
        self._check(request)
        since = self._waiting.get(request.id, now)
        expired = now >= since + self.config.hold_s  # just what `wake_at` says, to the last bit
        self._fade(now)
        everyone = self._survey.places(now)
        places = self._allowed(everyone, request, expired)
        if not places:
            return self._wait(request, since, expired, everyone)
        best = self._survey.match(everyone, request)
        self._survey.predictor.wanted = self._wanted.share
        self._survey.predict(places, everyone, request, now)
        self._index.asked(request.keys)
        planned: tuple[str, ...] = ()
        if self.config.policy is RoutingPolicy.PLAN:
            planned = self.plan.count(request.keys, [p.member for p in places], now)
        view = View(request, places, planned, now, self.config, self._homes, self._draw)
        place, rule = self._policy(view)
        return self._decide(view, place, rule, best, everyone)

    def _check(self, request: RouteRequest) -> None:
        if request.id in self._bookings.all:
            raise ProtocolError(f"request {request.id!r} has a worker: end it there first")
        keys, prompt, size = len(request.keys), request.prompt, self.config.page_size
        if keys * size > prompt:
            raise ConfigError(
                f"request {request.id!r} has {keys} keys, and its prompt={prompt} has {prompt // size} "
                f"complete pages of {size} tokens: give keys of pages of that size",
                param="keys",
            )

    def _allowed(self, everyone: list[Place], request: RouteRequest, at_bound: bool) -> list[Place]:
        """The places that may be chosen. at_bound: also workers that have as many requests as they may."""
        bound, avoid = self.config.bound, request.avoid
        decoder: Place | None = None
        places = []
        for place in everyone:
            member = place.member
            if member.draining or not member.prefills or (avoid and member.name in avoid):
                continue
            if bound and not at_bound and place.requests >= bound:
                continue
            if not member.decodes:
                if decoder is None:
                    decoder = self._survey.decoder(everyone, avoid)
                if decoder is None:
                    break
                place.decoder = decoder
            places.append(place)
        return places

    def _wait(self, request: RouteRequest, since: float, expired: bool, everyone: list[Place]) -> Wait:
        able = [p for p in everyone if not p.member.draining and p.member.name not in request.avoid]
        if not able:
            reason = "all_drain" if everyone else "no_worker"
        elif not any(p.member.prefills for p in able):
            reason = "no_prefill_worker"
        else:
            reason = "all_at_bound" if any(p.member.decodes for p in able) else "no_decode_worker"
        until = since + self.config.hold_s
        if expired:
            self.counters.expired += 1
            self._waits_no_more(request.id)
        else:
            self.counters.waits += 1
            self._waiting.setdefault(request.id, since)  # they stay in the order in which they came
            self._looked.pop(request.id, None)
            self._looked[request.id] = self._changes
        return Wait(request.id, reason, until, expired)

    def _decide(self, view: View, place: Place, rule: str, best: int, everyone: list[Place]) -> Decision:
        request, now, member, decoder = view.request, view.now, place.member, place.decoder.member
        found, report = place.found, member.report
        others = cheapest(view.places, place, self.config.runners_up)
        copied = max(0, best - found.total)
        copying = self._why_copied(view, place, best) if copied else None
        decision = Decision(
            request.id, now, member.name, member.incarnation, decoder.name, decoder.incarnation,
            place.peer.member.name if place.peer is not None else None, request.prompt, found,
            max(best, found.total), place.parts, Load(*place.loads), tuple(p.runner_up for p in others), rule,
            None if report is None else now - report.made, () if report is not None else ("report",), copying,
            copied,
        )  # fmt: skip
        if copying is not None:
            self.copies[copying] += copied
        self.counters.routed += 1
        self.counters.unknown += report is None
        self._book(view, place, decision)
        return decision

    def _why_copied(self, view: View, place: Place, best: int) -> Copying:
        holders = [p for p in view.places if p.matched == best]
        if not holders:
            return Copying.NOT_ALLOWED
        if self.config.policy is not RoutingPolicy.PREDICTED:
            return Copying.BY_RULE
        earliest = min(p.first for p in holders)
        return Copying.EARLIER_HERE if place.first <= earliest else Copying.COSTS_OTHERS_LESS

    def _book(self, view: View, place: Place, decision: Decision) -> None:
        member, decoder = place.member, place.decoder.member
        self._waits_no_more(view.request.id)
        self._turn += 1
        member.chosen = decoder.chosen = self._turn
        booking = Booking(
            view.request, member, decoder, decision, place.pages, place.leans, self.config.page_size,
            self._survey.predictor.own_work(place, view.request),
        )  # fmt: skip
        place.work.reuse(decision.found.total, view.now)
        self._bookings.add(booking, view.now)
        self._flights.add(booking)
        self._homes.chosen(booking.session, decoder.name)

    def progress(self, request: str, stage: Stage, now: float, seen: Seen | None = None) -> None:
        """How the request has come on. seen: what was observed by its first token."""
        self._tick(now)
        booking = self._bookings.all.get(request)
        if booking is None:
            if stage not in ENDINGS or not self._waits_no_more(request):
                self.counters.late += 1
        elif stage is Stage.SENT:
            booking.at = now
        elif stage is Stage.FIRST_TOKEN:
            if not booking.made:
                self._first_token(booking, now, seen or Seen())
        else:
            self._close(booking, now)
            self._changed(now)

    def _first_token(self, booking: Booking, now: float, seen: Seen) -> None:
        member = booking.member
        if not seen.whole:
            self._learn(booking, now - booking.at, seen)
        self.hits.add(booking.prompt, booking.available, booking.captured, seen.cached)
        self._bookings.first_token(booking, now)
        stay = self.config.confirm_s if member.profile.events else self.config.presume_s
        self._flights.first_token(booking, now + stay)
        if booking.session is not None:
            self._homes.bind(booking.session, booking.decoder.name)

    def _learn(self, booking: Booking, observed: float, seen: Seen) -> None:
        """Compare what was predicted with what came. observed: seconds to the first token."""
        member = booking.member
        for errors in (self.error, member.errors):
            errors.add(booking.first, observed)
        if seen.queue_s is not None:
            member.queue.learn(seen.queue_s, booking.queue)
        if booking.fills_steps:  # otherwise what was seen is the time of others' tokens in the same step
            if seen.compute_s is not None:
                member.compute.learn(seen.compute_s, booking.compute)
            elif booking.queue < LEAST_S:  # nothing else took time
                member.compute.learn(observed, booking.compute)

    def wake_at(self) -> float | None:
        """When the waiting requests are to be routed again; None while none waits."""
        if not self._waiting:
            return None
        until = next(iter(self._waiting.values())) + self.config.hold_s
        return until if next(iter(self._looked.values())) == self._changes else min(until, self._changed_at)

    def _waits_no_more(self, request: str) -> bool:
        """Forget a request that waits here. Returns whether it did."""
        self._looked.pop(request, None)
        return self._waiting.pop(request, None) is not None


def _none(_: int) -> int:
    raise ProtocolError("this policy does not draw")


def cheapest(places: list[Place], but: Place, count: int) -> list[Place]:
    """The `count` places with the least cost, the least first, one of them left out."""
    found: list[Place] = []
    for place in places:
        if place is but or (len(found) == count and (not count or place.cost >= found[-1].cost)):
            continue
        at = len(found)
        while at and place.cost < found[at - 1].cost:
            at -= 1
        found.insert(at, place)
        del found[count:]
    return found
