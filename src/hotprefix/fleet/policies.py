"""How a worker is chosen. Owns: one small function for each arm, and `POLICIES`, their registry.

Rules:
1. A policy reads the view and changes nothing. It returns one of the view's options and the rule that chose.
2. Of equals it takes the worker that was chosen longest ago, so ties never all go to the first.
"""

from __future__ import annotations

from collections.abc import Callable

from hotprefix.fleet.config import Arm
from hotprefix.fleet.view import Place, View

Chosen = tuple[Place, str]
Policy = Callable[[View], Chosen]


def round_robin(view: View) -> Chosen:
    """The workers by turns: the one that was chosen longest ago."""
    return min(view.places, key=lambda p: (p.member.chosen, p.member.bit)), "turn"


def random(view: View) -> Chosen:
    """Any, with equal chances."""
    return view.places[view.draw(len(view.places))], "drawn"


def least_requests(view: View) -> Chosen:
    """The fewest requests, whatever they cost."""
    return min(view.places, key=lambda p: (p.requests, p.member.chosen, p.member.bit)), "fewest_requests"


def session(view: View) -> Chosen:
    """Where its session is; without a session, by turns."""
    if view.request.session is None:
        return round_robin(view)
    home = view.home()
    return (home, "home") if home is not None else (view.new_home(), "new_home")


def least_load(view: View) -> Chosen:
    """The smallest normalised load."""
    return min(view.places, key=lambda p: (p.load, p.member.chosen, p.member.bit)), "least_load"


POLICIES: dict[Arm, Policy] = {
    Arm.ROUND_ROBIN: round_robin,
    Arm.RANDOM: random,
    Arm.LEAST_REQUESTS: least_requests,
    Arm.SESSION: session,
    Arm.LEAST_LOAD: least_load,
}
