"""When to stop asking a store that fails. Owns: `Breaker`, one link's circuit breaker.

Rules: time comes in as an argument; not thread-safe (its owner holds a lock). Closed: calls go through;
`failures` failures in a row open it. Open: nothing goes through for `open_s` seconds, then exactly one
call does, the probe (half-open): its success closes the breaker, its failure opens it again. The right
to probe is taken by the call itself, never by a request that may be cancelled before it calls, so a
breaker cannot stay half-open for ever (handed case 132).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """failures: how many in a row open the breaker. open_s: seconds until a probe may go."""

    failures: int = 3
    open_s: float = 5.0


class Breaker:
    """See the module's rules. opened: how often it went from closed or half-open to open."""

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._failures = 0
        self._opened_at = 0.0
        self.state = BreakerState.CLOSED
        self.opened = 0

    def refuses(self, now: float) -> bool:
        """True where a call made now would not go through. Changes nothing."""
        if self.state is BreakerState.OPEN:
            return now - self._opened_at < self._config.open_s
        return self.state is BreakerState.HALF_OPEN

    def enter(self, now: float) -> bool:
        """Ask for one call; True = make it and report `success` or `failure`."""
        if self.refuses(now):
            return False
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN
        return True

    def success(self) -> None:
        """The store answered. A call that began before the breaker opened proves nothing now."""
        if self.state is not BreakerState.OPEN:
            self.state = BreakerState.CLOSED
            self._failures = 0

    def failure(self, now: float) -> None:
        """The store failed or did not answer in time."""
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN or (
            self.state is BreakerState.CLOSED and self._failures >= self._config.failures
        ):
            self.state = BreakerState.OPEN
            self._opened_at = now
            self.opened += 1
