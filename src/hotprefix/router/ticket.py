"""A request at its desk. Owns: `Ticket`, what came of it (`Outcome`), and how long it may wait (`Limits`)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from hotprefix.fleet.records import Decision, RouteRequest, Stage


class Limits(NamedTuple):
    """hold_s: how long a request waits. most: how many do. refuse_above_s: as the option; 0 = never."""

    hold_s: float
    most: int
    refuse_above_s: float


@dataclass(eq=False, slots=True)
class Ticket:
    """One request at its desk.

    tokens: what it counts for its tenant. avoid: workers that have failed it. decision, sent: the present
    choice, and when it went out. probe: it tries a worker that has failed. asked: the fleet knows that it
    waits. answer: what it waits for.
    """

    request: RouteRequest
    tenant: str
    tokens: int
    avoid: set[str] = field(default_factory=set)
    decision: Decision | None = None
    sent: float = 0.0
    probe: bool = False
    asked: bool = False
    answer: asyncio.Future[Decision] | None = None

    @property
    def id(self) -> str:
        return self.request.id


class Outcome(NamedTuple):
    """One decision and what came of it. first_s: seconds to the first token; None = there was none, or it
    could not be seen."""

    decision: Decision
    stage: Stage
    first_s: float | None
