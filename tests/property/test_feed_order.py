"""Messages of a worker through a bad network, by both ways to the fleet: whatever is lost, late, doubled or
out of order, restarts included, the fleet's index never holds a page that the worker did not have at that
point of its log, holds all of them as long as nothing had to be dropped, and ends as what the worker has."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hotprefix.fleet.records import Batch, Change, ReplayWanted, Shelf
from hotprefix.records import kvwire
from hotprefix.records.kvwire import Cleared, Form, PageEvent, Removed, Stored, to_wire
from hotprefix.router.foreign_keys import ForeignKeys
from hotprefix.router.kv_messages import Message, read_live
from hotprefix.router.kv_sinks import Foreign, Own, Way
from tests.support.feeds import MODEL, Desk, page_keys
from tests.support.foreign_engine import Blocks, Naive

PAGE = 2
A = tuple(range(1, 13))
PROMPTS = st.sampled_from([A, A[:6], (*A[:5], *A[:4]), (9, *A[:5])])
ARRIVES = st.sampled_from([True, True, True, False])
encode = msgspec.msgpack.encode


@dataclass
class Engine:
    """A worker. log: its batches. wire: messages on their way. questions: that it has not answered."""

    log: list[tuple[Message, tuple[PageEvent, ...]]] = field(default_factory=list)
    wire: list[Message] = field(default_factory=list)
    questions: list[ReplayWanted] = field(default_factory=list)


class FeedMachine(RuleBasedStateMachine):
    @initialize(
        own=st.booleans(),
        size=st.integers(1, 5),
        held=st.sampled_from([1, 3, 50]),
        form=st.sampled_from(Form),
    )
    def build(self, own: bool, size: int, held: int, form: Form) -> None:
        self.own, self.form, self.ts, self.lives = own, form, 0.0, 0
        self.blocks = Blocks(PAGE if own else size)
        self.desk = Desk(PAGE, held)
        self.way: Way = (
            Own("w", PAGE, self.desk) if own else Foreign("w", ForeignKeys(MODEL, PAGE), self.desk, held)
        )
        self.engine = Engine()
        self.dropped = 0
        self.emit((), True)

    @property
    def order(self):  # type: ignore[no-untyped-def]
        return self.desk.fleet._members.all["w"].order if self.own else self.way._order

    # -- the engine --------------------------------------------------------------------------------

    def emit(self, events: tuple[PageEvent, ...], arrives: bool) -> None:
        self.ts += 1.0
        batch = kvwire.Batch(self.ts, events)
        number = len(self.engine.log)
        message = read_live([b"", number.to_bytes(8, "big"), encode(to_wire(batch, self.form))])
        self.engine.log.append((message, events))
        if arrives:
            self.done(self.way.live(message))
        else:
            self.engine.wire.append(message)

    def as_ours(self, event: Stored, prompt: tuple[int, ...]) -> Stored:
        """The same blocks by our keys, as an engine of ours tells them."""
        keys = page_keys(prompt, PAGE)
        first = len(keys) - len(event.hashes)
        return Stored(tuple(keys[first:]), keys[first - 1] if first else None, (), PAGE)

    @rule(prompt=PROMPTS, skip=st.integers(0, 1), arrives=ARRIVES)
    def store(self, prompt: tuple[int, ...], skip: int, arrives: bool) -> None:
        if skip < len(self.blocks.names(prompt)):
            event = self.blocks.stored(prompt, first=skip)
            self.emit((self.as_ours(event, prompt) if self.own else event,), arrives)

    @rule(prompt=PROMPTS, first=st.integers(0, 3), arrives=ARRIVES)
    def remove(self, prompt: tuple[int, ...], first: int, arrives: bool) -> None:
        names = page_keys(prompt, PAGE) if self.own else self.blocks.names(prompt)
        self.emit((Removed(tuple(names[first:])),), arrives)

    @rule(really=st.integers(0, 5).map(lambda n: n == 0), arrives=ARRIVES)
    def clear(self, really: bool, arrives: bool) -> None:
        if really:
            self.emit((Cleared(),), arrives)

    @rule(really=st.sampled_from([True, False, False]), same=st.booleans())
    def begin_again(self, really: bool, same: bool) -> None:
        """What was on the wire is lost with the life. The first batch of the next one arrives. same: it
        names blocks as the life before did."""
        if really:
            self.lives += 1
            self.engine = Engine()
            self.dropped = self.desk.fleet.counters.dropped
            self.blocks = self.blocks if same else Blocks(self.blocks.size, seed=self.lives)
            self.emit((), True)

    # -- the network -------------------------------------------------------------------------------

    @rule(which=st.integers(0, 5), twice=st.booleans())
    def deliver(self, which: int, twice: bool) -> None:
        wire = self.engine.wire
        if wire:
            message = wire[which % len(wire)]
            if not twice:
                wire.remove(message)
            self.done(self.way.live(message))

    @rule(which=st.integers(0, 5))
    def lose(self, which: int) -> None:
        if self.engine.wire:
            del self.engine.wire[which % len(self.engine.wire)]

    @rule(which=st.integers(0, 5), kept=st.sampled_from([0, 1, 3, 99, 99]), again=st.booleans())
    def answer(self, which: int, kept: int, again: bool) -> None:
        """An answer, now or late, perhaps twice; the engine keeps its last batches only."""
        questions = self.engine.questions
        if questions:
            wanted = questions[which % len(questions)]
            if not again:
                questions.remove(wanted)
            found = [message for message, _ in self.engine.log[-kept - 1 :] if message.number >= wanted.first]
            self.done(self.way.replayed(wanted, found))

    @rule()
    def fail(self) -> None:
        if self.engine.questions:
            self.done(self.way.failed(self.engine.questions.pop()))

    @rule(late=st.booleans())
    def snapshot(self, late: bool) -> None:
        """Of an engine of ours: all that it has now, or had a batch ago."""
        if self.own:
            upto = len(self.engine.log) - late
            keys = tuple(key for _, key in self.truth(upto))
            batch = Batch(upto - 1, (Change(Shelf.L1, keys),))
            covers = upto >= self.order._next
            self.done(self.desk.snapshot("w", batch))
            if covers:
                self.dropped = self.desk.fleet.counters.dropped

    def done(self, wanted: ReplayWanted | None) -> None:
        if wanted is not None:
            self.engine.questions.append(wanted)

    @rule()
    def settle(self) -> None:
        """Everything arrives at last."""
        self.engine.wire = []
        self.emit((), True)
        for _ in range(100):
            if not self.order.awaits:
                break
            wanted = self.engine.questions.pop()
            self.done(self.way.replayed(wanted, [m for m, _ in self.engine.log[wanted.first :]]))
        assert self.order._next == len(self.engine.log)
        self.index_is_what_the_worker_had()
        # And without a drop it is all. So after a reset, which all engines tell, it always is.
        self.emit((Cleared(),), True)
        assert self.desk.pages() == set()
        self.dropped = self.desk.fleet.counters.dropped

    # -- the oracle --------------------------------------------------------------------------------

    def truth(self, upto: int) -> set[tuple[Shelf, int]]:
        """What the worker had after so many batches."""
        if not self.own:
            naive = Naive(PAGE, {0: self.blocks})
            for _, events in self.engine.log[:upto]:
                naive.apply(events)
            return naive.pages()
        pages: set[int] = set()
        for _, events in self.engine.log[:upto]:
            for event in events:
                match event:
                    case Stored():
                        pages |= set(event.hashes)  # type: ignore[arg-type]
                    case Removed():
                        pages -= set(event.hashes)  # type: ignore[arg-type]
                    case Cleared():
                        pages = set()
        return {(Shelf.L1, page) for page in pages}

    @invariant()
    def index_is_what_the_worker_had(self) -> None:
        pages, truth = self.desk.pages(), self.truth(self.order._next)
        assert pages <= truth
        if self.desk.fleet.counters.dropped == self.dropped:
            assert pages == truth

    @invariant()
    def no_life_is_invented(self) -> None:
        assert self.desk.fleet.counters.restarts == self.lives


TestFeedOrder = pytest.mark.timeout(200)(FeedMachine.TestCase)
TestFeedOrder.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
