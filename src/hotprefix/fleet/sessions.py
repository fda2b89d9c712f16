"""Where sessions are at home. Owns: `Homes`, bounded.

Rules:
1. A session is bound to its worker by its first answer, not by the choice: a turn that fails leaves nothing.
2. A home that may not be chosen is passed over. If the worker is gone, only its own sessions move.
3. A new session's home is decided by a hash of both names, so two routers agree without talking (rendezvous
   hashing): a worker that comes takes over a share of the new sessions and none of the old ones.
"""

from __future__ import annotations

from hashlib import blake2b


class SessionHomes:
    """The homes of at most `limit` sessions; those that were used longest ago are forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._homes: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._homes)

    def get(self, session: str) -> str | None:
        """The worker's name. None: it has no home yet."""
        return self._homes.get(session)

    def bind(self, session: str, worker: str) -> None:
        """The session was answered there."""
        self._homes.pop(session, None)
        self._homes[session] = worker
        if len(self._homes) > self._limit:
            del self._homes[next(iter(self._homes))]

    def leave(self, worker: str) -> None:
        """The worker is gone."""
        for session in [s for s, home in self._homes.items() if home == worker]:
            del self._homes[session]


def score(session: str, worker: str) -> int:
    """How well a worker suits a new session; the highest of all workers is its home."""
    framed = f"{len(session)}:{session}{worker}".encode()
    return int.from_bytes(blake2b(framed, digest_size=8).digest(), "little")
