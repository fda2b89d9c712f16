"""From batches of events to the fleet. Owns: `Sink`, what a feed needs of the fleet, and the two ways to it.

Rules:
1. Our own engines tell our keys, so `Own` only changes the form of a batch. The fleet puts the batches in
   order.
2. Other engines' blocks can be named only in order, since a block's parent must be known. So `Foreign` puts
   the batches in order itself, with the fleet's own `EventOrder`. What it passes on is numbered anew, without
   a gap, and says when all is lost and when a life begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hotprefix.fleet.event_order import EventOrder, Todo
from hotprefix.fleet.records import Batch, Change, ReplayWanted, Shelf
from hotprefix.records.kvwire import BlockHash, Cleared, PageEvent, Stored
from hotprefix.router.foreign_keys import ForeignKeys
from hotprefix.router.kv_messages import BadMessage, Message

HELD, HELD_WEIGHT = 4096, 1 << 22


class Sink(Protocol):
    """The fleet, as far as a feed needs it. Each method says what is to be asked for next, if anything."""

    def events(self, worker: str, batch: Batch) -> ReplayWanted | None: ...
    def replayed(self, wanted: ReplayWanted, batches: tuple[Batch, ...]) -> ReplayWanted | None: ...
    def replay_failed(self, wanted: ReplayWanted) -> ReplayWanted | None: ...
    def snapshot(self, worker: str, batch: Batch) -> ReplayWanted | None: ...


class Way(Protocol):
    """How one worker's messages reach the sink."""

    def check(self, message: Message) -> None:
        """Raises BadMessage for one that this way cannot take."""
        ...

    def live(self, message: Message) -> ReplayWanted | None:
        """A message that came by itself."""
        ...

    def replayed(self, wanted: ReplayWanted, messages: Sequence[Message]) -> ReplayWanted | None:
        """Messages that were asked for."""
        ...

    def failed(self, wanted: ReplayWanted) -> ReplayWanted | None:
        """They do not come."""
        ...

    def restarted(self) -> None:
        """The worker has begun again."""
        ...


class Own:
    """The way of one of our engines. page_size: of the fleet."""

    def __init__(self, worker: str, page_size: int, sink: Sink) -> None:
        self._worker, self._page_size, self._sink = worker, page_size, sink

    def check(self, message: Message) -> None:
        for event in message.batch.events:
            if isinstance(event, Stored) and event.page_size != self._page_size:
                told = f"pages of {event.page_size} tokens, and the fleet's have {self._page_size}"
                raise BadMessage("page size", f"{told}: give all workers of a model the same")
            if not isinstance(event, Cleared) and not all(map(_is_ours, event.hashes)):
                raise BadMessage("hashes", "block hashes that no engine of ours tells: give kind=vllm")

    def live(self, message: Message) -> ReplayWanted | None:
        return self._sink.events(self._worker, self._batch(message))

    def replayed(self, wanted: ReplayWanted, messages: Sequence[Message]) -> ReplayWanted | None:
        return self._sink.replayed(wanted, tuple(map(self._batch, messages)))

    def failed(self, wanted: ReplayWanted) -> ReplayWanted | None:
        return self._sink.replay_failed(wanted)

    def restarted(self) -> None:
        """Its report tells the fleet, by its incarnation."""

    def _batch(self, message: Message) -> Batch:
        return Batch(message.number, tuple(map(_change, message.batch.events)), message.batch.ts)


def _change(event: PageEvent) -> Change:
    if isinstance(event, Cleared):
        return Change(Shelf.L1, cleared=True)
    keys = tuple(each for each in event.hashes if isinstance(each, int))
    return Change(Shelf.L1, keys) if isinstance(event, Stored) else Change(Shelf.L1, (), keys)


def _is_ours(block: BlockHash) -> bool:
    return isinstance(block, int) and 0 <= block < 1 << 63


class _Numbered(Batch):
    """A batch that waits for its turn, with the message it came in."""

    message: Message


class Foreign:
    """The way of another engine. held: batches that are held back at most while a replay is awaited; they
    may weigh `HELD_WEIGHT` together."""

    def __init__(self, worker: str, keys: ForeignKeys, sink: Sink, held: int = HELD) -> None:
        self._worker, self._keys, self._sink = worker, keys, sink
        self._order = EventOrder(held)
        self._number, self._made = 0, 0.0
        self._weight = 0

    def check(self, message: Message) -> None:
        pass

    def live(self, message: Message) -> ReplayWanted | None:
        wanted = self._do(self._order.live(_numbered(message)))
        self._weight = self._weight + message.weight if self._order.awaits else 0
        if self._weight > HELD_WEIGHT:
            self._weight = 0
            return self._do(self._order.failed(self._order.ticket))
        return wanted

    def replayed(self, wanted: ReplayWanted, messages: Sequence[Message]) -> ReplayWanted | None:
        batches = tuple(map(_numbered, messages))
        return self._do(self._order.replayed(wanted.ticket, batches))

    def failed(self, wanted: ReplayWanted) -> ReplayWanted | None:
        return self._do(self._order.failed(wanted.ticket))

    def restarted(self) -> None:
        self._order.restart()
        self._begin_again()

    def _do(self, todo: Todo) -> ReplayWanted | None:
        if todo.begin_again:
            self._begin_again()
        elif todo.drop:
            self._keys.lose()
            self._snapshot(())
        for batch in todo.apply:
            assert isinstance(batch, _Numbered)
            self._pass_on(self._keys.apply(batch.message.batch.events))
        if todo.ask is None:
            return None
        return ReplayWanted(self._worker, todo.ask, 0, self._order.ticket)

    def _begin_again(self) -> None:
        self._keys.clear()
        self._number = 0
        self._pass_on(())  # an earlier number from a later time: so a life begins

    def _pass_on(self, changes: tuple[Change, ...]) -> None:
        if self._sink.events(self._worker, self._next(changes)) is not None:
            self._snapshot(self._keys.everything())  # the fleet has lost the thread; all that it asks for

    def _snapshot(self, changes: tuple[Change, ...]) -> None:
        self._sink.snapshot(self._worker, self._next(changes))

    def _next(self, changes: tuple[Change, ...]) -> Batch:
        batch = Batch(self._number, changes, self._made)
        self._number, self._made = self._number + 1, self._made + 1.0
        return batch


def _numbered(message: Message) -> _Numbered:
    batch = _Numbered(message.number, (), message.batch.ts)
    batch.message = message
    return batch
