"""When requests arrive. Owns: `Workload`: open loop by the clock, closed loop by completion and think time.

Rules:
1. In open loop a request arrives at `arrival_s / speed`.
2. In closed loop a request arrives `think_s` after its parent's completion, so a quicker system sees more
   load.
3. In closed loop `concurrency` sessions are alive at a time, and a new one begins when one has ended. Without
   `concurrency` each session begins at its recorded start.
4. The seed shuffles the order of sessions, and nothing else.
5. A request whose parent was rejected arrives all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from hotprefix.errors import InputError
from hotprefix.lab.trace.trace_request import TraceRequest


class Loop(StrEnum):
    """How arrivals come about."""

    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A request of the workload. ideal_tokens, heat: see `rows.REQUEST_COLUMNS`."""

    request: TraceRequest
    ideal_tokens: int
    heat: int


@dataclass(slots=True)
class _Session:
    roots: list[Item] = field(default_factory=list)
    children: dict[str, list[Item]] = field(default_factory=dict)
    left: int = 0


Arrival = tuple[float, Item]


class Workload:
    """Arrivals of one replay. items: in trace order. Raises InputError if the trace lacks what the loop
    needs."""

    def __init__(
        self, items: Iterable[Item], loop: Loop, *, seed: int, concurrency: int | None = None,
        speed: float = 1.0,
    ) -> None:  # fmt: skip
        self._speed = speed
        self._sessions: dict[str, _Session] = {}
        self._waiting: deque[_Session] = deque()
        self._first: list[Arrival] = []
        self.size = 0
        if loop is Loop.OPEN:
            self._load_open(items)
        else:
            self._load_closed(items, seed, concurrency)

    def _load_open(self, items: Iterable[Item]) -> None:
        for item in items:
            at = item.request.arrival_s
            if at is None:
                raise InputError(
                    f"request {item.request.id!r} has no arrival time: replay this trace in closed loop",
                    param="load.loop",
                )
            self._first.append((at / self._speed, item))
        self.size = len(self._first)

    def _load_closed(self, items: Iterable[Item], seed: int, concurrency: int | None) -> None:
        sessions: dict[str, _Session] = {}
        for item in items:
            request = item.request
            if request.session is None:
                raise InputError(
                    f"request {request.id!r} has no session: replay this trace in open loop",
                    param="load.loop",
                )
            session = sessions.setdefault(request.session, _Session())
            session.left += 1
            self.size += 1
            if request.parent is None:
                session.roots.append(item)
            else:
                session.children.setdefault(request.parent, []).append(item)
        names = list(sessions)
        order = np.random.default_rng(seed).permutation(len(names))
        self._sessions = sessions
        self._waiting.extend(sessions[names[i]] for i in order)
        self._begin(concurrency)

    def _begin(self, concurrency: int | None) -> None:
        if concurrency is not None:
            for _ in range(min(concurrency, len(self._waiting))):
                self._first += self._start(0.0)
            return
        self._first += [
            (item.request.arrival_s or 0.0, item) for session in self._waiting for item in session.roots
        ]
        self._waiting.clear()

    def _start(self, now: float) -> list[Arrival]:
        """The next session's first requests, as far apart as recorded."""
        if not self._waiting:
            return []
        roots = self._waiting.popleft().roots
        first = min((r.request.arrival_s or 0.0 for r in roots), default=0.0)
        return [(now + ((r.request.arrival_s or 0.0) - first), r) for r in roots]

    def initial(self) -> list[Arrival]:
        """The arrivals that depend on no completion; they are handed over once. Arrivals of one moment stand
        in the order in which they are to come."""
        arrivals, self._first = self._first, []
        return arrivals

    def awaited(self, request: TraceRequest) -> str | None:
        """The kind of the request that follows this one's end; None if none is recorded. An engine reads it
        off the answer, which is a tool call or the last word."""
        session = self._sessions.get(request.session or "")
        following = session.children.get(request.id) if session is not None else None
        return following[0].request.kind if following else None

    def completed(self, request: TraceRequest, now: float) -> list[Arrival]:
        """The arrivals that a request's end brings about."""
        if not self._sessions or request.session is None:
            return []
        session = self._sessions[request.session]
        session.left -= 1
        arrivals = [(now + (c.request.think_s or 0.0), c) for c in session.children.pop(request.id, [])]
        if not session.left:
            del self._sessions[request.session]
            arrivals += self._start(now)
        return arrivals
