"""What a policy sees. Owns: `Place`, one worker at one moment, and `View`, all that may be chosen.

Rules: a view is made for one decision and is not kept. Reading it changes nothing of the fleet.
"""

from __future__ import annotations

from collections.abc import Callable

from hotprefix.fleet.bookings import Booking, Work
from hotprefix.fleet.config import FleetConfig, Homes
from hotprefix.fleet.load import Components, largest
from hotprefix.fleet.members import Member
from hotprefix.fleet.records import Found, Parts, RouteRequest, RunnerUp
from hotprefix.fleet.sessions import SessionHomes, score

Draw = Callable[[int], int]
"""draw(n): a number from 0 to n - 1, such as `random.Random(seed).randrange`."""


class Place:
    """One worker, as it stands now for one request.

    work: what is outstanding there. loads: its load by component. load: the largest that is known; of a
    worker without a report at least the mean of the others. wait: likewise its queue, in seconds. pages:
    leading pages that it has or will have. resident: those that it has in L1 or L2, for its peers. decoder:
    where the answer is generated; this place unless roles are split. l1, l2, l3, flight: tokens, as in
    `Found`. there_at: when the last page in flight is there. leans: the booking that computes it. peer: the
    place to pull `pulled` tokens from; None if nothing is to be pulled. The rest is as in `Parts`; cost: what
    the first token and the choice's cost to others add up to.
    """

    __slots__ = (
        "behind", "compute", "cost", "decode_wait", "decoder", "delay", "displacement", "first", "flight",
        "hand_off", "l1", "l2", "l3", "leans", "load", "loads", "member", "pages", "peer", "pull", "pulled",
        "queue", "resident", "restore", "there_at", "wait", "work",
    )  # fmt: skip

    def __init__(self, member: Member, work: Work, loads: Components, wait: float) -> None:
        self.member, self.work, self.loads, self.wait = member, work, loads, wait
        self.load = largest(loads)
        self.decoder = self
        self.pages = self.resident = self.l1 = self.l2 = self.l3 = self.flight = self.pulled = 0
        self.there_at = 0.0
        self.leans: Booking | None = None
        self.peer: Place | None = None
        self.queue = self.restore = self.pull = self.compute = self.hand_off = self.decode_wait = 0.0
        self.delay = self.behind = self.first = self.cost = 0.0
        self.displacement: float | None = None

    @property
    def requests(self) -> int:
        """Requests that were given to the worker and have not ended."""
        return len(self.work.all)

    @property
    def matched(self) -> int:
        """Prompt tokens that need not be computed, those of peers apart."""
        return self.l1 + self.l2 + self.l3 + self.flight

    @property
    def reused(self) -> int:
        """Prompt tokens that need not be computed."""
        return self.matched + self.pulled

    @property
    def found(self) -> Found:
        return Found(self.l1, self.l2, self.l3, self.flight, self.pulled)

    @property
    def parts(self) -> Parts:
        return Parts(
            self.queue, self.restore, self.pull, self.compute, self.hand_off, self.decode_wait, self.delay,
            self.behind, self.displacement,
        )  # fmt: skip

    @property
    def runner_up(self) -> RunnerUp:
        return RunnerUp(self.member.name, self.found, self.parts, self.load)


class View:
    """The places that may be chosen at one moment, in the order in which the workers joined.

    planned: the workers of the request's key in the plan. draw: see `Draw`.
    """

    def __init__(
        self, request: RouteRequest, places: list[Place], planned: tuple[str, ...], now: float,
        config: FleetConfig, homes: SessionHomes, draw: Draw,
    ) -> None:  # fmt: skip
        self.request, self.places, self.planned, self.now = request, places, planned, now
        self.config, self.draw = config, draw
        self._homes = homes

    def home(self) -> Place | None:
        """Where the request's session is at home, if that may be chosen."""
        session = self.request.session
        name = None if session is None else self._homes.get(session)
        return next((place for place in self.places if place.member.name == name), None)

    def turn(self) -> Place:
        """The next place in the turns that requests without a session take."""
        return self.places[self._homes.strangers % len(self.places)]

    def new_home(self) -> Place:
        """The place for a session without a home."""
        session = self.request.session or ""
        if self.config.homes is Homes.TURNS:
            return self.places[self._homes.opened % len(self.places)]
        return max(self.places, key=lambda p: score(session, p.member.name))
