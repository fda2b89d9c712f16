"""How a worker is chosen. Owns: one small function for each policy, and `POLICIES`, their registry.

Rules:
1. A policy reads the view and changes nothing. It returns one of the view's places, and which of its rules
   chose.
2. Of equals it takes the worker that was chosen longest ago, so ties never all go to the first.
"""

from __future__ import annotations

from collections.abc import Callable

from hotprefix.fleet.config import RoutingPolicy
from hotprefix.fleet.view import Place, View

Chosen = tuple[Place, str]
Policy = Callable[[View], Chosen]


def by_turn(place: Place) -> tuple[int, int]:
    """Orders equals."""
    return place.member.chosen, place.member.bit


def round_robin(view: View) -> Chosen:
    """The workers by turns."""
    return min(view.places, key=by_turn), "turn"


def random(view: View) -> Chosen:
    """Any, with equal chances."""
    return view.places[view.draw(len(view.places))], "drawn"


def least_requests(view: View) -> Chosen:
    """The fewest requests, whatever they cost."""
    return min(view.places, key=lambda p: (p.requests, by_turn(p))), "fewest_requests"


def session(view: View) -> Chosen:
    """Where its session is at home; without a session, by turns."""
    if view.request.session is None:
        return view.turn(), "turn"
    home = view.home()
    return (home, "home") if home is not None else (view.new_home(), "new_home")


def least_load(view: View) -> Chosen:
    """The smallest load."""
    return least_loaded(view.places), "least_load"


def least_loaded(places: list[Place]) -> Place:
    """The place with the smallest load."""
    return min(places, key=lambda p: (p.load, by_turn(p)))


def affinity(view: View) -> Chosen:
    """The most tokens that need not be computed, then the smallest load. No load is too much."""
    best = min(view.places, key=lambda p: (-p.matched, p.load, by_turn(p)))
    return best, "most_matched" if best.matched else "nothing_matched"


def bounded(view: View) -> Chosen:
    """Affinity among the workers whose load is at most (1 + c) times the mean; if none of them has anything
    of the prompt, the smallest load. One hot worker does not switch affinity off for the others."""
    mean = sum(p.load for p in view.places) / len(view.places)
    most = max((1 + view.config.spread) * mean, view.config.floor)
    within = [p for p in view.places if p.load <= most and p.matched]
    if not within:
        return least_loaded(view.places), "least_load"
    return min(within, key=lambda p: (-p.matched, p.load, by_turn(p))), "most_matched_within_bound"


def predicted(view: View) -> Chosen:
    """The earliest predicted first token, plus what the choice costs others. Predictions are not so exact
    that a difference within `slack` means anything: of such places it is the one with the least to compute,
    then the least loaded."""
    least = view.places[0].cost
    for place in view.places:
        least = min(least, place.cost)
    near = least * (1 + view.config.slack)
    equal = [place for place in view.places if place.cost <= near]
    best = min(equal, key=lambda p: (-p.reused, p.load, by_turn(p)))
    return best, "least_predicted" if best.cost == least else "equal_within_slack"


def plan(view: View) -> Chosen:
    """The least loaded worker of its key's set; without one, the less loaded of two that are drawn."""
    hot = [p for p in view.places if p.member.name in view.planned]
    if hot:
        return least_loaded(hot), "planned"
    count = len(view.places)
    first = view.draw(count)
    second = (first + 1 + view.draw(count - 1)) % count if count > 1 else first
    return least_loaded([view.places[first], view.places[second]]), "cold"


def equal_tps(view: View) -> Chosen:
    """The worker that reuses the fewest tokens a second, so that all come to reuse as many."""
    return min(view.places, key=lambda p: (p.work.reused(view.now), by_turn(p))), "least_cached_tps"


POLICIES: dict[RoutingPolicy, Policy] = {
    RoutingPolicy.ROUND_ROBIN: round_robin,
    RoutingPolicy.RANDOM: random,
    RoutingPolicy.LEAST_REQUESTS: least_requests,
    RoutingPolicy.SESSION: session,
    RoutingPolicy.LEAST_LOAD: least_load,
    RoutingPolicy.AFFINITY: affinity,
    RoutingPolicy.BOUNDED: bounded,
    RoutingPolicy.PREDICTED: predicted,
    RoutingPolicy.PLAN: plan,
    RoutingPolicy.EQUAL_TPS: equal_tps,
}
