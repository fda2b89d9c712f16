"""When indexed pages are expected to be used again. Owns: `Expected`, and when an expectation lapses.

Rules (docs/decisions/0013):
1. An expectation belongs to the page at which a request ended. Any use that ends at that page answers it.
2. When that page is evicted, its expectation passes to the page above. A page with several expectations is
   due when the earliest of them is, and counts as expected until the last of them has lapsed.
3. An expectation lapses LAPSE times the expected wait after it was made. Example: a request ends at 100 s and
   its session's next one is expected after 9 s. The page is due at 109 s, and lapses at 100 + 8 * 9 = 172 s.
   LAPSE is 8 because the p90 of published tool times is 8 medians (72 s to 9 s); that of user times is 13
   (1277 s to 97 s). So about one return in ten comes after its expectation has lapsed.
4. Time is an argument. An expectation changes an eviction key only when it is made, answered or lapses, so
   the heap is not sorted again while time passes.
"""

from __future__ import annotations

import heapq
from typing import Generic, NamedTuple, Protocol, TypeVar

LAPSE = 8.0


class Expected(NamedTuple):
    """A use that is expected; seconds on the driver's clock.

    due: when it is expected.
    lapses: when it is no longer expected.
    """

    due: float
    lapses: float

    @classmethod
    def after(cls, now: float, wait: float) -> Expected:
        """wait: predicted seconds from `now` to the next use, >= 0."""
        return cls(now + wait, now + LAPSE * wait)

    def joined(self, other: Expected | None) -> Expected:
        return self if other is None else Expected(min(self.due, other.due), max(self.lapses, other.lapses))


class Expecting(Protocol):
    """expected: the node's next use; None if none is expected."""

    expected: Expected | None


N = TypeVar("N", bound=Expecting)


class Lapsing(Generic[N]):
    """Nodes with an expected use, in the order in which their expectations lapse."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, N]] = []
        self._sequence = 0

    def expect(self, node: N, expected: Expected) -> None:
        """Note that one more use is expected at this node's end."""
        node.expected = expected.joined(node.expected)
        self._sequence += 1
        heapq.heappush(self._heap, (node.expected.lapses, self._sequence, node))

    def lapse(self, now: float) -> list[N]:
        """Forget the expectations that have lapsed by `now`; returns the nodes that have none left."""
        ended = []
        while self._heap and self._heap[0][0] <= now:
            lapses, _, node = heapq.heappop(self._heap)
            if node.expected is not None and node.expected.lapses <= lapses:
                node.expected = None
                ended.append(node)
        return ended
