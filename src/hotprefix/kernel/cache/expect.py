"""When indexed pages are expected to be used again. Owns: `Expected`, and the moment it counts no more.

Rules (issue 4, reuse-aware key): an expectation belongs to the page where a request ended. Any use that ends
there answers it. When that page is evicted it passes to the page above: a shared prefix is due with the
earliest of its expectations, until the last of them has lapsed. Overdue by LAPSE times the wait that
was expected, it has lapsed: 8 medians are the p90 of published tool times (9 s, 72 s) and somewhat less than
that of user times (97 s, 1277 s), so about one return in ten comes later. Time comes in as an argument;
each expectation lapses once, so nothing is re-ranked while it waits.
"""

from __future__ import annotations

import heapq
from typing import Generic, NamedTuple, Protocol, TypeVar

LAPSE = 8.0


class Expected(NamedTuple):
    """Seconds on the driver's clock. due: when the next use is expected. lapses: when no longer."""

    due: float
    lapses: float

    @classmethod
    def after(cls, now: float, wait: float) -> Expected:
        """wait: predicted seconds from `now` to the next use, >= 0."""
        return cls(now + wait, now + LAPSE * wait)

    def joined(self, other: Expected | None) -> Expected:
        return self if other is None else Expected(min(self.due, other.due), max(self.lapses, other.lapses))


class Expecting(Protocol):
    """expected: its next use, None where nobody is known to come."""

    expected: Expected | None


N = TypeVar("N", bound=Expecting)


class Lapsing(Generic[N]):
    """Nodes with an expected use, by when it lapses."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, N]] = []
        self._sequence = 0

    def expect(self, node: N, expected: Expected) -> None:
        """One more use is expected where this node ends."""
        node.expected = expected.joined(node.expected)
        self._sequence += 1
        heapq.heappush(self._heap, (node.expected.lapses, self._sequence, node))

    def lapse(self, now: float) -> list[N]:
        """Forget what has lapsed by now; returns the nodes that expect nobody any more."""
        ended = []
        while self._heap and self._heap[0][0] <= now:
            lapses, _, node = heapq.heappop(self._heap)
            if node.expected is not None and node.expected.lapses <= lapses:
                node.expected = None
                ended.append(node)
        return ended
