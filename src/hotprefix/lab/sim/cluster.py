"""N instances on one virtual clock. Owns: `Clock`, the event heap, and `Router`, which chooses a request's
instance.

Rules:
1. Events happen in the order of (time, priority, sequence). Nothing else decides, so a seed gives one run.
2. A request that arrives at a moment is there before a step that begins at that moment is planned.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import StrEnum

from hotprefix.lab.sim.arrivals import Item
from hotprefix.lab.sim.instance import Instance

Action = Callable[[float], None]
ARRIVAL, WAKE = 0, 1


class Route(StrEnum):
    """Which instance a request goes to.

    SESSION: the instance of its session; new sessions, and requests without one, go to the instances by
    turns.
    ROUND_ROBIN: the instances by turns.
    LEAST_LOADED: the instance with the fewest requests. Of equals it is the one that was chosen longest ago,
    so that sparse requests do not all go to the first.
    """

    SESSION = "session"
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"


class Clock:
    """The heap of what will happen."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Action]] = []
        self._sequence = 0
        self.now = 0.0

    def at(self, when: float, priority: int, action: Action) -> None:
        """Have `action(when)` called."""
        self._sequence += 1
        heapq.heappush(self._heap, (when, priority, self._sequence, action))

    def run(self, until: float) -> None:
        """Let time pass up to `until`, or until nothing is left to happen."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, _, action = heapq.heappop(heap)
            action(self.now)
        if heap:
            self.now = until


class Router:
    """Chooses instances by a fixed rule."""

    def __init__(self, route: Route, instances: int) -> None:
        self._route, self._count = route, instances
        self._homes: dict[str, int] = {}
        self._turn = 0
        self._chosen = [0] * instances

    def choose(self, item: Item, instances: list[Instance]) -> Instance:
        """The instance for a request that arrives now."""
        session = item.request.session
        if self._route is Route.LEAST_LOADED:
            self._turn += 1
            least = min(instances, key=lambda i: (i.load, self._chosen[i.index], i.index))
            self._chosen[least.index] = self._turn
            return least
        if self._route is Route.SESSION and session is not None:
            return instances[self._homes.setdefault(session, len(self._homes) % self._count)]
        self._turn += 1
        return instances[(self._turn - 1) % self._count]
