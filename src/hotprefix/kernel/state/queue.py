"""The waiting queue. Owns: which sequences wait for admission, in arrival order, and their count of
overtakes.

Rules:
1. The queue is sorted by arrival. A retracted request returns to its own place, not to the end.
2. The order of admission (order.py) is computed from it when needed, and nothing of it is stored here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from hotprefix.kernel.state.sequence import Sequence


class WaitingQueue:
    """Sequences waiting for admission."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def add(self, seq: Sequence) -> None:
        if self._items and self._items[-1].serial > seq.serial:
            insort(self._items, seq, key=_serial)
        else:
            self._items.append(seq)

    def remove(self, seq: Sequence) -> None:
        at = bisect_left(self._items, seq.serial, key=_serial)
        if at == len(self._items) or self._items[at] is not seq:
            raise KeyError(seq.request.id)
        del self._items[at]

    def since(self, serial: int) -> int:
        """How many waiting requests came after the one with that serial."""
        return len(self._items) - bisect_right(self._items, serial, key=_serial)

    def take_admitted(self, seq: Sequence) -> None:
        """Remove an admitted sequence. Every request that came before it and still waits was overtaken."""
        at = bisect_left(self._items, seq.serial, key=_serial)
        self.remove(seq)
        for earlier in self._items[:at]:
            earlier.overtaken += 1

    def walk(self) -> Iterator[Sequence]:
        """All sequences in order. The one given last may be removed meanwhile."""
        at = 0
        while at < len(self._items):
            seq = self._items[at]
            yield seq
            at += at < len(self._items) and self._items[at] is seq


def _serial(seq: Sequence) -> int:
    return seq.serial
