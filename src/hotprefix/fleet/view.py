"""What a policy sees. Owns: `Place`, one worker that may be chosen, and `View`, all of them at one moment.

Rules: a view is made for one decision and is not kept. Reading it changes nothing of the fleet.
"""

from __future__ import annotations

from collections.abc import Callable

from hotprefix.fleet.config import FleetConfig, Homes
from hotprefix.fleet.members import Member
from hotprefix.fleet.records import Load, RouteRequest
from hotprefix.fleet.sessions import SessionHomes, score

Draw = Callable[[int], int]
"""draw(n): a number from 0 to n - 1, such as `random.Random(seed).randrange`."""


class Place:
    """One worker that may be chosen, as it stands now.

    requests: that it has. loads, load: its load by component, and the largest.
    """

    __slots__ = ("load", "loads", "member", "requests")

    def __init__(self, member: Member, requests: int, loads: Load) -> None:
        self.member, self.requests, self.loads, self.load = member, requests, loads, loads.largest


class View:
    """The places at one moment, in the order in which the workers joined. draw: see `Draw`."""

    def __init__(
        self, request: RouteRequest, places: list[Place], now: float, config: FleetConfig,
        homes: SessionHomes, draw: Draw,
    ) -> None:  # fmt: skip
        self.request, self.places, self.now, self.config, self.draw = request, places, now, config, draw
        self._homes = homes

    def home(self) -> Place | None:
        """Where the request's session is at home, if that may be chosen."""
        session = self.request.session
        name = None if session is None else self._homes.get(session)
        return next((place for place in self.places if place.member.name == name), None)

    def new_home(self) -> Place:
        """The place for a session without a home."""
        session = self.request.session or ""
        if self.config.homes is Homes.TURNS:
            return min(self.places, key=lambda p: (p.member.chosen, p.member.bit))
        return max(self.places, key=lambda p: score(session, p.member.name))
