"""The router's event log. Owns: `RouteLog`, which writes what one pool's desk decides and what came of it,
and `open_log`.

Rules: the log is an engine's in all but its records (records/event_log.py): written by a thread of its own
from a bounded queue, in parts. It holds names of workers and models, numbers and reasons; nothing that a
client sent, and no page keys.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Literal

from hotprefix import __version__
from hotprefix.fleet.records import Decision, RunnerUp, Seen, Stage
from hotprefix.records.event_log import EventLog
from hotprefix.records.route_schema import Route, RouteEnd, RouteRefused, RouterHeader
from hotprefix.router.config import RouterConfig
from hotprefix.router.ticket import Outcome, Ticket

SETTINGS = ("policy", "page_size", "poll_s", "retries", "bound", "hold_s", "max_held", "refuse_above_s")
ENDINGS: dict[Stage, Literal["ended", "failed", "cancelled"]] = {
    Stage.ENDED: "ended",
    Stage.FAILED: "failed",
    Stage.CANCELLED: "cancelled",
}


def open_log(config: RouterConfig, now: float) -> EventLog | None:
    """The log that is asked for. now: on the router's clock. Raises ConfigError if it cannot be written."""
    if config.event_log is None:
        return None
    header = RouterHeader(
        t=now, run=uuid.uuid4().hex, part=0, wall=time.time(), hotprefix=__version__,
        config={name: getattr(config, name) for name in SETTINGS},
    )  # fmt: skip
    return EventLog(Path(config.event_log), header)


class RouteLog:
    """One pool's part of the log. model: the pool's."""

    def __init__(self, log: EventLog, model: str) -> None:
        self._log, self._model = log, model

    def decided(self, ticket: Ticket, found: Decision) -> None:
        """A choice has been made."""
        parts, there = found.parts, found.found
        self._log.put(Route(
            t=found.at, request=found.request, attempt=ticket.attempt, model=self._model, worker=found.worker,
            decode=found.decode if found.decode != found.worker else None, peer=found.peer, rule=found.rule,
            held_s=found.at - ticket.since, prompt_tokens=found.prompt, available_tokens=found.available,
            found_l1=there.l1, found_l2=there.l2, found_l3=there.l3, found_flight=there.flight,
            found_peer=there.peer, queue_s=parts.queue, restore_s=parts.restore, pull_s=parts.pull,
            compute_s=parts.compute, hand_off_s=parts.hand_off, decode_wait_s=parts.decode_wait,
            first_s=parts.first, delay_s=parts.delay, behind_s=parts.behind,
            displacement_s=parts.displacement,
            load=found.load.largest, runners_up=[_runner_up(each) for each in found.runners_up],
            age_s=found.age_s, unknown=list(found.unknown),
            copying=None if found.copying is None else found.copying.value, copied_tokens=found.copied,
        ))  # fmt: skip

    def ended(self, ticket: Ticket, outcome: Outcome, now: float) -> None:
        """What came of it. The ticket still has its attempt."""
        seen = outcome.seen or Seen()
        self._log.put(RouteEnd(
            t=now, request=ticket.id, attempt=ticket.attempt, worker=outcome.decision.worker,
            ending=ENDINGS[outcome.stage], actual_first_s=outcome.first_s, actual_queue_s=seen.queue_s,
            actual_compute_s=seen.compute_s, delivered_tokens=seen.cached,
            total_s=now - outcome.decision.at,
        ))  # fmt: skip

    def refused(self, ticket: Ticket, reason: str, now: float) -> None:
        """It gets no worker."""
        held_s, prompt = now - ticket.since, ticket.request.prompt
        self._log.put(RouteRefused(t=now, request=ticket.id, model=self._model, reason=reason, held_s=held_s,
                                   prompt_tokens=prompt))  # fmt: skip


def _runner_up(one: RunnerUp) -> dict[str, str | float]:
    return {"worker": one.worker, "first_s": one.parts.first, "found_tokens": one.found.total,
            "load": one.load}  # fmt: skip
