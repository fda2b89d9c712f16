"""When a step that is only pretended ends. Owns: `Pace`, and how far it is behind.

Rules:
1. A step begins when the one before has ended by its price, or when its oldest request came, if that was
   later. So the time that the loop itself takes, and a sleep that was a little too long, come off the next
   step's wait, and the pace is kept on average.
2. At most MOST_BEHIND_S are made up for in this way. What is later than that is given up and counted: the
   machine is too slow for this pace, or the process was stopped.

Units: seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOST_BEHIND_S: Final = 0.1


@dataclass(slots=True)
class PaceTotals:
    """How the pace was kept since the engine's start.

    priced_s: what all steps should have taken.
    lost_s: by how much they took longer, as far as that was given up. lost_s / priced_s is the share by which
    this engine is slower than it pretends to be.
    behind_s: by how much the last step ended too late, as far as that will be made up for.
    """

    priced_s: float = 0.0
    lost_s: float = 0.0
    behind_s: float = 0.0


class Pace:
    """See the module's rules. Times are those of one monotonic clock."""

    def __init__(self) -> None:
        self.totals = PaceTotals()
        self._due = float("-inf")

    def step(self, since: float, seconds: float) -> float:
        """When a step of this price is to end. since: when the oldest request came that has not ended."""
        self._due = max(self._due, since) + seconds
        self.totals.priced_s += seconds
        return self._due

    def ended(self, now: float) -> None:
        """The step has ended."""
        late = max(0.0, now - self._due)
        self.totals.behind_s = min(late, MOST_BEHIND_S)
        if late > MOST_BEHIND_S:
            self.totals.lost_s += late - MOST_BEHIND_S
            self._due = now - MOST_BEHIND_S
