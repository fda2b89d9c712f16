"""Which connections are open. Owns: their number, and which one closes when there is no room for another.

Rules: a connection without a request in progress never keeps another one out. If there is no room, one that
has never sent a request closes; if there is none, one that waits for its next request; of several, the one
that has waited longest. A new connection is refused only if every open one is working on a request.
"""

from __future__ import annotations

import resource
from typing import Protocol

FILES_KEPT = 64
MOST_CONNECTIONS = 4096
LEAST_CONNECTIONS = 16


class Connection(Protocol):
    def give_way(self) -> None: ...


class Connections:
    """The connections of one server.

    limit: how many may be open.
    closed_for_room: how many were closed to make room.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.closed_for_room = 0
        self._new: dict[Connection, None] = {}
        self._resting: dict[Connection, None] = {}
        self._busy: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._new) + len(self._resting) + len(self._busy)

    def join(self, connection: Connection) -> bool:
        """Take in a new connection. False if every place is taken by a connection with a request."""
        if len(self) >= self.limit:
            longest = next(iter(self._new), None) or next(iter(self._resting), None)
            if longest is None:
                return False
            self.leave(longest)
            self.closed_for_room += 1
            longest.give_way()
        self._new[connection] = None
        return True

    def busy(self, connection: Connection) -> None:
        """The connection has sent a request's headers."""
        self.leave(connection)
        self._busy.add(connection)

    def idle(self, connection: Connection) -> None:
        """The connection's request is answered."""
        if connection in self._busy:
            self._busy.remove(connection)
            self._resting[connection] = None

    def leave(self, connection: Connection) -> None:
        self._new.pop(connection, None)
        self._resting.pop(connection, None)
        self._busy.discard(connection)


def connections_allowed() -> int:
    """As many as the process may open files for, less those that it needs itself; `MOST_CONNECTIONS` at most.
    The soft limit on open files is raised as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + FILES_KEPT
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(LEAST_CONNECTIONS, min(MOST_CONNECTIONS, soft - FILES_KEPT))
