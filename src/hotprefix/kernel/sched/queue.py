"""The waiting queue. Owns: which sequences wait for admission, in arrival order, and their count of
overtakes.

Rules: kept sorted by arrival serial (a retracted request returns to its own place, not to the end);
ordering for admission is a view computed when needed and stores nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from hotprefix.kernel.sequence import Sequence


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
        """How many came after the one with that serial."""
        return len(self._items) - bisect_right(self._items, serial, key=_serial)

    def admitted(self, seq: Sequence) -> None:
        """Remove an admitted sequence; everybody who came before it and still waits was overtaken."""
        at = bisect_left(self._items, seq.serial, key=_serial)
        self.remove(seq)
        for earlier in self._items[:at]:
            earlier.overtaken += 1

    def walk(self) -> Iterator[Sequence]:
        """All in order; the one given last may be taken out meanwhile."""
        at = 0
        while at < len(self._items):
            seq = self._items[at]
            yield seq
            at += at < len(self._items) and self._items[at] is seq


def _serial(seq: Sequence) -> int:
    return seq.serial
