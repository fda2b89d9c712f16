"""Workers' events through a bad network: whatever is lost, late, doubled or out of order, the index ends as
what the workers have, and never holds anything that a naive replay of the same batches would not."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hotprefix.fleet.config import FleetConfig, RoutingPolicy
from hotprefix.fleet.fleet import Fleet
from hotprefix.fleet.records import Batch, Change, Keys, Profile, ReplayWanted, Shelf
from tests.support.fleet import profile

NAMES = ("a", "b")
KEYS = st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True).map(tuple)
WHO = st.sampled_from(NAMES)
Pages = set[tuple[Shelf, int]]


def fold(batches: list[Batch]) -> Pages:
    """What is there after these batches, done naively."""
    pages: Pages = set()
    for batch in batches:
        for shelf, stored, removed, cleared in batch.changes:
            pages = {p for p in pages if not (cleared and p[0] == shelf)}
            pages -= {(shelf, key) for key in removed}
            pages |= {(shelf, key) for key in stored}
    return pages


@dataclass
class Worker:
    """What a worker really did. log: its batches of this life. wire: batches on their way, in any order.
    questions: that it has not answered. base: the first batch that the index builds on. rebuilt: its entries
    have been dropped since that was looked at."""

    here: bool = False
    log: list[Batch] = field(default_factory=list)
    wire: list[Batch] = field(default_factory=list)
    questions: list[ReplayWanted] = field(default_factory=list)
    base: int = 0
    rebuilt: bool = False


class EventMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now, self.restarts, self.dropped = 0.0, 0, 0
        self.workers = {name: Worker() for name in NAMES}

    @initialize(held=st.sampled_from([1, 2, 50]))
    def build(self, held: int) -> None:
        self.fleet = Fleet(FleetConfig(page_size=1, held=held, policy=RoutingPolicy.LEAST_LOAD))
        self.profile: Profile = profile(page_size=1)
        for name in NAMES:
            self.join(name)

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    # -- the workers -------------------------------------------------------------------------------

    @rule(name=WHO)
    def join(self, name: str) -> None:
        if not self.workers[name].here:
            self.fleet.join(name, self.profile, self.tick())
            self.workers[name] = Worker(here=True)

    @rule(name=WHO)
    def leave(self, name: str) -> None:
        worker = self.workers[name]
        if worker.here:
            self.fleet.leave(name, self.tick())
            worker.here, worker.log = False, []

    @rule(name=WHO)
    def begin_again(self, name: str) -> None:
        """The worker's process starts anew. What was on the wire is lost with it; its first batch arrives."""
        worker = self.workers[name]
        if worker.here:
            worker.log, worker.wire, worker.base, worker.rebuilt = [], [], 0, False
            self.restarts += 1
            self.emit(name, Shelf.L1, (), (), False, True)

    @rule(
        name=WHO, shelf=st.sampled_from([Shelf.L1, Shelf.L1, Shelf.L2, Shelf.L3]), stored=KEYS, removed=KEYS,
        cleared=st.integers(0, 5).map(lambda n: n == 0), arrives=st.booleans(),
    )  # fmt: skip
    def emit(
        self, name: str, shelf: Shelf, stored: Keys, removed: Keys, cleared: bool, arrives: bool
    ) -> None:
        worker = self.workers[name]
        if worker.here:
            change = Change(shelf, stored, () if cleared else removed, cleared)
            batch = Batch(len(worker.log), (change,), self.tick())
            worker.log.append(batch)
            if arrives:
                self.done(name, self.fleet.events(name, batch, self.tick()))
            else:
                worker.wire.append(batch)

    # -- the network -------------------------------------------------------------------------------

    @rule(name=WHO, which=st.integers(0, 5), twice=st.booleans())
    def deliver(self, name: str, which: int, twice: bool) -> None:
        worker = self.workers[name]
        if worker.here and worker.wire:
            batch = worker.wire[which % len(worker.wire)]
            if not twice:
                worker.wire.remove(batch)
            self.done(name, self.fleet.events(name, batch, self.tick()))

    @rule(name=WHO, which=st.integers(0, 5))
    def lose(self, name: str, which: int) -> None:
        wire = self.workers[name].wire
        if wire:
            del wire[which % len(wire)]

    @rule(name=WHO, which=st.integers(0, 5), kept=st.integers(0, 9), again=st.booleans())
    def answer(self, name: str, which: int, kept: int, again: bool) -> None:
        """An answer, now or late, perhaps twice; the worker keeps its last batches only."""
        worker = self.workers[name]
        if worker.questions:
            wanted = worker.questions[which % len(worker.questions)]
            if not again:
                worker.questions.remove(wanted)
            batches = tuple(b for b in worker.log[-kept - 1 :] if b.number >= wanted.first)
            self.done(name, self.fleet.replayed(wanted, batches, self.tick()))

    @rule(name=WHO)
    def fail(self, name: str) -> None:
        worker = self.workers[name]
        if worker.questions:
            self.done(name, self.fleet.replay_failed(worker.questions.pop(), self.tick()))

    @rule(name=WHO, later=st.integers(0, 2), removed=KEYS)
    def snapshot(self, name: str, later: int, removed: Keys) -> None:
        """All that the worker has now; `later` batches overtake it."""
        worker = self.workers[name]
        if worker.here and worker.log:
            pages, last = fold(worker.log), worker.log[-1]
            for _ in range(later):
                self.emit(name, Shelf.L1, (), removed, False, True)
            known = self.order(name)._next
            changes = [Change(shelf, tuple(k for s, k in pages if s == shelf)) for shelf in Shelf]
            self.done(
                name, self.fleet.snapshot(name, Batch(last.number, tuple(changes), last.made), self.tick())
            )
            assert self.order(name)._next >= known, "it never goes back"
            if last.number + 1 >= known:
                worker.base, worker.rebuilt = 0, False

    def done(self, name: str, wanted: ReplayWanted | None) -> None:
        if self.fleet.counters.dropped > self.dropped:
            self.dropped, self.workers[name].rebuilt = self.fleet.counters.dropped, True
        if wanted is not None:
            self.workers[name].questions.append(wanted)

    @rule(name=WHO)
    def settle(self, name: str) -> None:
        """Everything arrives at last: the index holds just what the worker has."""
        worker = self.workers[name]
        if not worker.here:
            return
        self.emit(name, Shelf.L1, (99,), (), False, True)
        worker.wire = []
        for _ in range(100):
            if not worker.questions:
                break
            wanted = worker.questions.pop()
            self.done(name, self.fleet.replayed(wanted, tuple(worker.log[wanted.first :]), self.tick()))
        assert self.order(name)._next == len(worker.log)
        assert not self.order(name).awaits
        self.index_is_the_naive_replay()

    # -- the oracle --------------------------------------------------------------------------------

    def order(self, name: str):  # type: ignore[no-untyped-def]
        return self.fleet._members.all[name].order

    def indexed(self, name: str) -> Pages:
        mask = self.fleet._members.all[name].mask
        index = self.fleet._index
        return {
            (shelf, key)
            for key in (*range(1, 13), 99)
            for shelf, held in zip(Shelf, index.holders(key), strict=True)
            if held & mask
        }

    @invariant()
    def index_is_the_naive_replay(self) -> None:
        for name, worker in self.workers.items():
            if not worker.here:
                continue
            upto = self.order(name)._next
            known = self.indexed(name)
            if known != fold(worker.log[worker.base : upto]):
                # Entries were dropped: they build on a later batch from now on.
                later = [b for b in range(worker.base, upto + 1) if known == fold(worker.log[b:upto])]
                assert worker.rebuilt, (name, known, worker)
                assert later, (name, known, worker)
                worker.base = later[0]
            worker.rebuilt = False

    @invariant()
    def only_what_is_to_come_is_held_and_no_life_is_invented(self) -> None:
        assert self.fleet.counters.restarts <= self.restarts
        for name, worker in self.workers.items():
            if worker.here:
                order = self.order(name)
                assert all(number > order._next for number in order._held)
                assert bool(order._held) == order.awaits

    @invariant()
    def nothing_is_left_of_those_that_left(self) -> None:
        mask = sum(m.mask for m in self.fleet._members.all.values())
        index = self.fleet._index
        for key in (*range(1, 13), 99):
            assert not any(held & ~mask for held in index.holders(key))
        if not mask:
            assert len(index._holders) == 0


TestEvents = pytest.mark.timeout(120)(EventMachine.TestCase)
TestEvents.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
