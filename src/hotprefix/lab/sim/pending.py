"""A request between its arrival and its end. Owns: `Pending`."""

from __future__ import annotations

from dataclasses import dataclass

from hotprefix.fleet.records import RouteRequest
from hotprefix.lab.sim.arrivals import Item
from hotprefix.lab.sim.block_prompts import Prompt
from hotprefix.lab.sim.replay_recorder import Row


@dataclass(slots=True)
class Pending:
    """A request on its way to an instance, or there.

    name: its id in the tables. row: its row in the request table. asked: how it asks the fleet.
    since: when it came to the fleet, or lost its instance. sent: when it was sent to an instance.
    """

    name: str
    item: Item
    prompt: Prompt
    row: Row
    asked: RouteRequest
    since: float
    sent: float = 0.0
