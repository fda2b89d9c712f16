"""What crosses the pipe between a program and its engine process. Owns: the records, both ways.

Rules: records are frozen and picklable; those of which there are many are NamedTuples (see
`engine.messages`). A record with `call` is answered by exactly one `Reply` with that number, unless the
process dies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hotprefix.engine.messages import Delta, EngineInfo, Generate
from hotprefix.errors import HotprefixError


class Submit(NamedTuple):
    """Start these requests, all or none of them; answered by one `Reply` to `call`."""

    call: int
    requests: tuple[Generate, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """End these requests early. Ids that have ended meanwhile are ignored."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Control:
    """Do one thing that is not a request: call the loop's method of this name, which a `Reply` answers, or
    `exit`, which the end of the process answers."""

    call: int
    name: Literal["flush_cache", "stats", "load", "kv_snapshot", "exit"]


class Reply(NamedTuple):
    """Answer to the message with the same `call`: a value, or an error if it failed."""

    call: int
    value: Any = None
    error: HotprefixError | None = None


@dataclass(frozen=True, slots=True)
class Loading:
    """What loading is doing now, for people to read."""

    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built; requests may come."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not be built; the process ends."""

    error: HotprefixError


@dataclass(frozen=True, slots=True)
class Beat:
    """The loop went round once. busy: it has work, so the next beat comes after the next step."""

    busy: bool


class Deltas(NamedTuple):
    """Output of one step. busy: as in `Beat`."""

    items: tuple[Delta, ...]
    busy: bool


FromChild = Reply | Loading | Ready | Failed | Beat | Deltas
ToChild = Submit | Abort | Control
