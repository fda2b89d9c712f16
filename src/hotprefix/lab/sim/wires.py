"""What moves between tiers and how long it takes. Owns: `Wire`, one direction of one link, and `Wires`.

Rules:
1. Bytes count per physical link, in the direction in which they move.
2. A wire carries one transfer at a time, in order. A transfer that comes while the wire is busy waits until
   `free_at`. No transfer fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hotprefix.cost.model import Link, Links
from hotprefix.errors import ConfigError


@dataclass(slots=True)
class Wire:
    """One direction of a link.

    name: which one.
    link: its speed and latency.
    free_at: when its last transfer ends.
    bytes: moved so far.
    seconds: how long it was busy.
    transfers, cancels: how many there were.
    """

    name: str
    link: Link
    free_at: float = 0.0
    bytes: int = 0
    seconds: float = 0.0
    transfers: int = 0
    cancels: int = 0

    def send(self, size: int, now: float) -> float:
        """Carry `size` bytes; returns the time at which they have arrived, seconds."""
        took = self.link.seconds(size)
        self.free_at = max(now, self.free_at) + took
        self.bytes += size
        self.seconds += took
        self.transfers += 1
        return self.free_at


@dataclass(slots=True)
class Wires:
    """The wires of one instance below L1; None if the tier does not exist."""

    save: Wire | None = None
    restore: Wire | None = None
    put: Wire | None = None
    fetch: Wire | None = None
    all: list[Wire] = field(default_factory=list)

    def begin_again(self, now: float) -> None:
        """Nothing is on its way any more: the instance has died and is back."""
        for wire in self.all:
            wire.free_at = now


def wires(links: Links, host: bool, storage: bool) -> Wires:
    """The wires that the configured tiers need. Raises ConfigError if a link's figure is missing."""
    made = Wires()
    wanted = {"save": host, "restore": host, "put": storage, "fetch": storage}
    names = {"save": "l1-l2", "restore": "l2-l1", "put": "l2-l3", "fetch": "l3-l2"}
    for field_name, needed in wanted.items():
        if not needed:
            continue
        link = getattr(links, field_name)
        if link is None:
            raise ConfigError(
                f"links.{field_name} is not known, but the replay has that tier: give its figures",
                param=f"links.{field_name}",
            )
        wire = Wire(names[field_name], link)
        setattr(made, field_name, wire)
        made.all.append(wire)
    return made


def link_rows(instances: Sequence[Wires]) -> list[dict[str, Any]]:
    """The rows of the link table (rows.py). instances: the wires of each."""
    return [
        {
            "instance": index, "link": wire.name, "bytes": wire.bytes, "seconds": wire.seconds,
            "transfers": wire.transfers, "cancels": wire.cancels,
        }
        for index, some in enumerate(instances)
        for wire in some.all
    ]  # fmt: skip
