"""Where sessions are at home. Owns: `SessionHomes`, bounded.

Rules:
1. A session is bound to its worker by its first answer, not by the choice: a turn that fails leaves nothing.
   Until then its further requests follow the one that is under way.
2. A home that may not be chosen is passed over. If the worker is gone, only its own sessions move.
3. A new session's home is decided by a hash of both names, so two routers agree without talking (rendezvous
   hashing): a worker that comes takes over a share of the new sessions and none of the old ones. Or, with
   `Homes.TURNS`, by turns that only new sessions take.
"""

from __future__ import annotations

from hashlib import blake2b


class SessionHomes:
    """The homes of at most `limit` sessions; those that were used longest ago are forgotten.

    opened: sessions that were given a home. strangers: requests without a session.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._homes: dict[str, str] = {}
        # Worker and number of the requests under way, of sessions without a home.
        self._coming: dict[str, tuple[str, int]] = {}
        self.opened = self.strangers = 0

    def __len__(self) -> int:
        return len(self._homes) + len(self._coming)

    def get(self, session: str) -> str | None:
        """The worker's name. None: it has no home yet."""
        home = self._homes.get(session)
        return home if home is not None else self._coming.get(session, (None, 0))[0]

    def chosen(self, session: str | None, worker: str) -> None:
        """A request of the session was given to the worker."""
        if session is None:
            self.strangers += 1
        elif session not in self._homes:
            home, count = self._coming.get(session, (worker, 0))
            self.opened += not count
            self._coming[session] = home, count + 1

    def bind(self, session: str, worker: str) -> None:
        """The session was answered there."""
        self._coming.pop(session, None)
        self._homes.pop(session, None)
        self._homes[session] = worker
        if len(self._homes) > self._limit:
            del self._homes[next(iter(self._homes))]

    def failed(self, session: str) -> None:
        """A request of the session ended without an answer."""
        home, count = self._coming.get(session, ("", 0))
        if count > 1:
            self._coming[session] = home, count - 1
        else:
            self._coming.pop(session, None)

    def leave(self, worker: str) -> None:
        """The worker is gone."""
        for session in [s for s, home in self._homes.items() if home == worker]:
            del self._homes[session]


def score(session: str, worker: str) -> int:
    """How well a worker suits a new session; the highest of all workers is its home."""
    framed = f"{len(session)}:{session}{worker}".encode()
    return int.from_bytes(blake2b(framed, digest_size=8).digest(), "little")
