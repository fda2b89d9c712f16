"""N instances on one virtual clock. Owns: `Clock`, the event heap, and `Router`, where a request goes.

Rules: events in order of (time, priority, sequence), nothing else decides, so a seed
gives one run. What arrives at a moment is there before a step that begins at that moment is planned.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import StrEnum

from hotprefix.lab.sim.instance import Instance
from hotprefix.lab.sim.workload import Item

Action = Callable[[float], None]
ARRIVAL, WAKE = 0, 1


class Route(StrEnum):
    """Where a request goes: its session's instance (by turns), by turns, or the one with least requests (of
    equals the one that was chosen longest ago, so that sparse requests do not all go to the first)."""

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
        """Let time pass until nothing is left to happen, or to `until`."""
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
        """Where a request goes that arrives now."""
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
