"""Virtual time. Owns: `Clock`, the heap of what will happen.

Rules:
1. Events happen in the order of (time, priority, sequence). Nothing else decides, so a seed gives one run.
2. Of one moment, what the fleet learns (NEWS) comes before what arrives, that before the steps that begin
   then, and reports are made last. So a request that arrives at a moment is there before a step that begins
   at that moment is planned.
3. Time ends when neither an arrival nor a step is left. News and reports do not keep it going.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[float], None]
NEWS, ARRIVAL, WAKE, REPORT = 0, 1, 2, 3


class Clock:
    """now: the time of the latest event."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Action]] = []
        self._sequence = 0
        self._work = 0
        self.now = 0.0

    def at(self, when: float, priority: int, action: Action) -> None:
        """Have `action(when)` called."""
        self._sequence += 1
        self._work += priority in (ARRIVAL, WAKE)
        heapq.heappush(self._heap, (when, priority, self._sequence, action))

    def run(self, until: float) -> None:
        """Let time pass up to `until`, or until no work is left."""
        heap = self._heap
        while self._work and heap[0][0] <= until:
            self.now, priority, _, action = heapq.heappop(heap)
            self._work -= priority in (ARRIVAL, WAKE)
            action(self.now)
        if self._work:
            self.now = until
