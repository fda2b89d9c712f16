"""One worker's numbered events, put in order. Owns: `EventOrder`, which says what to do with each batch.

Rules:
1. Batches are applied in the order of their numbers, from 0 on, each once. A first number above 0 is a gap.
2. On a gap, live batches are held back and a replay is asked for: first what it brings, then what was held.
3. A replay that comes when it is not awaited any more is ignored, and so is a snapshot from before the
   latest batch: neither brings a removed page back.
4. If a replay lacks what is missing, the worker's entries are dropped, and events build them up again from
   the oldest batch that is there.
5. A number that was seen before, from a later time than any seen, is of a new life: the worker has begun
   again. From no later time, it has come twice. If the worker tells no times, its live batches are taken to
   come in order, so a number that does not grow is of a new life.
"""

from __future__ import annotations

from typing import NamedTuple

from hotprefix.fleet.records import Batch


class Todo(NamedTuple):
    """What to do, in this order: begin a new life; drop the worker's entries; apply batches; ask for a replay
    from number `ask` on."""

    apply: tuple[Batch, ...] = ()
    drop: bool = False
    begin_again: bool = False
    ask: int | None = None


class EventOrder:
    """See the module's rules. ticket: names the replay that is awaited; only its answer counts. limit: how
    many batches are held back at most."""

    __slots__ = ("_awaits", "_held", "_highest", "_limit", "_newest", "_next", "ticket")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.ticket = 0
        self.restart()

    def restart(self) -> None:
        """The worker has begun again: nothing has come from this life yet."""
        self._next, self._highest = 0, -1
        self._newest: float | None = None
        self._held: dict[int, Batch] = {}
        self._awaits = False

    @property
    def awaits(self) -> bool:
        """Whether a replay is awaited."""
        return self._awaits

    def live(self, batch: Batch) -> Todo:
        """A batch came by itself."""
        again = self._take(batch, True)
        ready = self._ready()
        if len(self._held) > self._limit:
            return self._give_up()
        return Todo(ready, begin_again=again, ask=self._question())

    def replayed(self, ticket: int, batches: tuple[Batch, ...]) -> Todo:
        """The worker's answer: its batches from the number on that was asked for, as far as it has them."""
        if not self._awaits or ticket != self.ticket:
            return Todo()
        self._awaits = False
        again = False
        for batch in batches:
            again = self._take(batch, False) or again
        if not again and self._next not in self._held:
            return self._give_up()
        return Todo(self._ready(), begin_again=again, ask=self._question())

    def failed(self, ticket: int) -> Todo:
        """The worker does not answer."""
        return self._give_up() if self._awaits and ticket == self.ticket else Todo()

    def snapshot(self, batch: Batch) -> Todo:
        """All that the worker has after its batch of this number. It is ignored if a later batch has been
        applied."""
        if batch.number < self._next - 1 and not self._begins_again(batch, False):
            return Todo()
        again = self._take(batch, False)
        self._held = {number: held for number, held in self._held.items() if number > batch.number}
        self._next = batch.number + 1
        return Todo((batch, *self._ready()), drop=True, begin_again=again, ask=self._question())

    def _take(self, batch: Batch, live: bool) -> bool:
        """Hold a batch until it is its turn. Returns whether it is the first seen of a new life."""
        number, made = batch.number, batch.made
        again = self._begins_again(batch, live)
        if again:
            self.restart()
        if live or made is not None:
            self._highest = max(self._highest, number)
        if made is not None:
            self._newest = made if self._newest is None else max(self._newest, made)
        if number >= self._next:
            self._held.setdefault(number, batch)
        return again

    def _begins_again(self, batch: Batch, live: bool) -> bool:
        """Whether a batch is of a new life (rule 5)."""
        if batch.made is not None and self._newest is not None:
            return batch.number <= self._highest and batch.made > self._newest
        return live and batch.number <= self._highest

    def _give_up(self) -> Todo:
        """Go on without what is missing."""
        self._awaits = False
        if self._held:
            self._next = min(self._held)
        return Todo(self._ready(), drop=True, ask=self._question())

    def _ready(self) -> tuple[Batch, ...]:
        """The held batches whose turn it is."""
        ready = []
        while (batch := self._held.pop(self._next, None)) is not None:
            ready.append(batch)
            self._next += 1
        return tuple(ready)

    def _question(self) -> int | None:
        """From which number on a replay is to be asked for, unless one is awaited or nothing is missing."""
        if not self._held:
            self._awaits = False
            return None
        if self._awaits:
            return None
        self._awaits = True
        self.ticket += 1
        return self._next
