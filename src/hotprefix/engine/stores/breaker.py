"""When to stop asking a store that fails. Owns: `Breaker`, one link's circuit breaker.

Rules: time is an argument; not thread-safe (its owner holds a lock).
- Closed: every call goes through. `failures` failures in a row open the breaker.
- Open: no call goes through for `open_s` seconds; then the breaker lets exactly one through, the probe.
- Half-open: the probe is in progress. Its success closes the breaker, its failure opens it again. If it ends
  and proves neither (`nothing`), the breaker stays half-open, and the next call is the probe.
The right to probe is taken when a call is made, never by a request that may be cancelled before it calls. So
a breaker cannot stay half-open for ever (rule 38).
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
    """failures: how many in a row open the breaker.
    open_s: seconds until a probe is let through.
    """

    failures: int = 3
    open_s: float = 5.0


class Breaker:
    """See the module's rules. opened: how often the breaker went from closed or half-open to open."""

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._failures = 0
        self._opened_at = 0.0
        self._probing = False
        self.state = BreakerState.CLOSED
        self.opened = 0

    def refuses(self, now: float) -> bool:
        """True if a call made now would not go through. Changes nothing."""
        if self.state is BreakerState.OPEN:
            return now - self._opened_at < self._config.open_s
        return self._probing

    def enter(self, now: float) -> bool:
        """Ask to make one call. True: make it, then report `success`, `failure` or `nothing`. False: do
        not."""
        if self.refuses(now):
            return False
        if self.state is not BreakerState.CLOSED:
            self.state, self._probing = BreakerState.HALF_OPEN, True
        return True

    def success(self) -> None:
        """The store answered. Ignored while the breaker is open: a call that began before that proves nothing
        about the store now."""
        if self.state is not BreakerState.OPEN:
            self.state = BreakerState.CLOSED
            self._failures, self._probing = 0, False

    def nothing(self) -> None:
        """The call ended and says nothing of the store, for example because its caller gave it up."""
        self._probing = False

    def failure(self, now: float) -> None:
        """The store failed or did not answer in time."""
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN or (
            self.state is BreakerState.CLOSED and self._failures >= self._config.failures
        ):
            self.state = BreakerState.OPEN
            self._opened_at, self._probing = now, False
            self.opened += 1
