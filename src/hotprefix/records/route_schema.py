"""The records of a router's event log. Owns: their fields, and `KINDS`, every kind of record there is.

Rules: those of schema.py. A decision has one `route` record when it is made, with what was predicted, and one
`route_end` record with what came. Tokens are of the prompt; seconds count from the decision. The names are
those of the table `routes` of replays (docs/experiments.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hotprefix.records import schema
from hotprefix.records.schema import Opening, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterHeader(Opening):
    """The opening of a router's log. config: the router's settings that decide about requests."""

    k: Literal["router"] = "router"
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route(Record):
    """A worker was chosen.

    request: names the request in this log only. attempt: from 1; more after a worker failed it.
    held_s: how long it had waited at the router for this choice.
    decode, peer: the worker that generates and the one to pull pages from, if it is another one.
    available_tokens: the most that any worker need not compute.
    found_l1, found_l2, found_l3, found_flight, found_peer: what the chosen worker need not compute.
    queue_s, restore_s, pull_s, compute_s, hand_off_s, decode_wait_s: predicted; first_s: what they come to.
    delay_s, behind_s: what the choice costs others. displacement_s: what must be computed again for it.
    load: the worker's. runners_up: the next best: worker, first_s, found_tokens, load.
    age_s: of the worker's report. unknown: what was not known of the worker.
    copying: why tokens are computed a further time. copied_tokens: how many.
    """

    k: Literal["route"] = "route"
    request: str
    attempt: int
    model: str
    worker: str
    decode: str | None = None
    peer: str | None = None
    rule: str
    held_s: float
    prompt_tokens: int
    available_tokens: int
    found_l1: int
    found_l2: int
    found_l3: int
    found_flight: int
    found_peer: int
    queue_s: float
    restore_s: float
    pull_s: float
    compute_s: float
    hand_off_s: float
    decode_wait_s: float
    first_s: float
    delay_s: float
    behind_s: float
    displacement_s: float | None = None
    load: float
    runners_up: list[dict[str, Any]]
    age_s: float | None = None
    unknown: list[str]
    copying: str | None = None
    copied_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteEnd(Record):
    """What came of a decision.

    ending: ended; failed (then the request may have another `route`); cancelled (its client left).
    actual_first_s: when its first token came. Absent: none did, or it came with the whole answer.
    actual_queue_s, actual_compute_s: parts of that, if the worker told them.
    delivered_tokens: prompt tokens that the worker did not compute, if it told.
    total_s: until the end.
    """

    k: Literal["route_end"] = "route_end"
    request: str
    attempt: int
    worker: str
    ending: Literal["ended", "failed", "cancelled"]
    actual_first_s: float | None = None
    actual_queue_s: float | None = None
    actual_compute_s: float | None = None
    delivered_tokens: int | None = None
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRefused(Record):
    """The router refused a request after it had waited `held_s`. reason: overload, no_worker or too_late."""

    k: Literal["route_refused"] = "route_refused"
    request: str
    model: str
    reason: str
    held_s: float
    prompt_tokens: int


KINDS: tuple[type[Record], ...] = (*schema.KINDS, RouterHeader, Route, RouteEnd, RouteRefused)
