"""Whether a process that died is started again. Owns: `Lives`.

Rules:
1. The first death in a row is followed by a new life at once, further ones after growing pauses, at most
   `restarts` in all.
2. A life of LONG_S ends the row.

Units: seconds of one monotonic clock.
"""

from __future__ import annotations

from typing import Final

LONG_S: Final = 60.0
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0


class Lives:
    """One process, again and again. restarts: deaths in a row that are followed by a new life."""

    def __init__(self, restarts: int) -> None:
        self._restarts = restarts
        self._row = 0
        self._began = 0.0

    def begins(self, now: float) -> None:
        """A life begins."""
        self._began = now

    def forget(self) -> None:
        """The row begins anew: what ends this life is no fault of its own."""
        self._row = 0

    def ended(self, now: float) -> float | None:
        """It has ended. Returns the pause before the next one; None = there is none."""
        if now - self._began >= LONG_S:
            self._row = 0
        self._row += 1
        if self._row > self._restarts:
            return None
        return 0.0 if self._row == 1 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self._row - 2))
