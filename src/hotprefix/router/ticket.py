"""A request at its desk. Owns: `Ticket`, what came of it (`Outcome`), how long it may wait (`Limits`), and
what it is told if it gets no worker."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from hotprefix.fleet.records import Decision, RouteRequest, Seen, Stage
from hotprefix.server.errors import ApiError


class Limits(NamedTuple):
    """hold_s: how long a request waits. most: how many do. refuse_above_s: as the option; 0 = never."""

    hold_s: float
    most: int
    refuse_above_s: float


@dataclass(eq=False, slots=True)
class Ticket:
    """One request at its desk.

    tokens: what it counts for its tenant. begun: its client has a part of the answer. avoid: workers that
    have failed it, or cannot go on with what has begun. since: when it asked for a worker. attempt: how many
    choices it has had. decision, sent: the present one, and when it went out. first_s, seen: when its first
    token came there, and what was told by then. probe: it tries a worker that has failed. asked: the fleet
    knows that it waits. answer: what it waits for.
    """

    request: RouteRequest
    tenant: str
    tokens: int
    begun: bool = False
    avoid: set[str] = field(default_factory=set)
    since: float = 0.0
    attempt: int = 0
    decision: Decision | None = None
    sent: float = 0.0
    first_s: float | None = None
    seen: Seen | None = None
    probe: bool = False
    asked: bool = False
    answer: asyncio.Future[Decision] | None = None

    @property
    def id(self) -> str:
        return self.request.id


class Outcome(NamedTuple):
    """One decision and what came of it. first_s: seconds to the first token; None = there was none, or it
    could not be seen. seen: what was told by then."""

    decision: Decision
    stage: Stage
    first_s: float | None
    seen: Seen | None = None


def too_late(soonest_s: float, most_s: float) -> ApiError:
    """No worker would give the first token in time."""
    wait = max(1, round(soonest_s - most_s))
    message = (
        f"the first token would come after {soonest_s:.1f} s at the earliest, and {most_s:g} s is the most "
        f"that is taken (--refuse-above): try again in {wait} s"
    )
    return ApiError(429, message, code="too_late", headers={"retry-after": str(wait)})


def overloaded(waiting: int, wait_s: int) -> ApiError:
    """There is no room. waiting: requests that wait."""
    message = f"every worker is full and {waiting} requests wait here: try again in {wait_s} s"
    return ApiError(429, message, code="overloaded", headers={"retry-after": str(wait_s)})


def nobody(failed: Collection[str]) -> ApiError:
    """No worker may be chosen. failed: those that failed this request."""
    told = f" ({', '.join(sorted(failed))} failed this request)" if failed else ""
    message = f"no worker can take the request now{told}: try again"
    return ApiError(503, message, code="no_worker", headers={"retry-after": "1"})
