"""The fetch book under random programs: each fetch ends once with the right pages, a page is read once for
all, and memory is given back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from hotprefix.engine.stores.errors import Reason
from hotprefix.engine.stores.fetches import FetchBook, Read
from tests.support.stores import key, keys, payload

ROOM = 6
PAGES = 8
NUMBER = {key(number): number for number in range(PAGES)}


class Programs(RuleBasedStateMachine):
    """Random adds, reads, failures, requeues, cancels, stops, expiries and takes. Pages 0 to 7 are one chain;
    each fetch is a stretch of it."""

    batches = Bundle("batches")

    def __init__(self) -> None:
        super().__init__()
        self.book = FetchBook(ROOM)
        self.now = 0.0
        self.asked: dict[int, list[bytes]] = {}
        self.seen: set[int] = set()
        self.reading: list[Read] = []
        self.serial = 0

    @rule(start=st.integers(0, PAGES - 1), length=st.integers(0, PAGES), limit=st.floats(0.5, 5.0))
    def add(self, start: int, length: int, limit: float) -> None:
        self.serial += 1
        self.asked[self.serial] = keys(*range(start, min(start + length, PAGES)))
        self.book.add(self.serial, self.asked[self.serial], self.now, limit, None)

    @rule(target=batches, limit=st.integers(1, 3))
    def read(self, limit: int) -> list[Read]:
        batch = self.book.next_batch(limit)
        self.reading += batch
        return batch

    @rule(batch=consumes(batches), good=st.integers(0, 3), reason=st.sampled_from(list(Reason)))
    def settle(self, batch: list[Read], good: int, reason: Reason) -> None:
        """`good` pages arrive, the next one fails, and the rest was not read."""
        for read in batch:
            self.reading.remove(read)
        for read in batch[:good]:
            self.book.settle(read, payload(NUMBER[read.key]), self.now)
        for read in batch[good : good + 1]:
            self.book.settle(read, reason, self.now)
        self.book.requeue(batch[good + 1 :])

    @precondition(lambda self: self.serial)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        fetch_id = data.draw(st.integers(1, self.serial))
        if self.book.cancel(fetch_id):
            del self.asked[fetch_id]

    @precondition(lambda self: self.serial)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        self.book.stop(data.draw(st.integers(1, self.serial)), self.now)

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.book.expire(self.now)

    @rule()
    def take(self) -> None:
        for fetched, fetched_keys in self.book.take():
            asked = self.asked.pop(int(fetched.id))
            count = len(fetched.payloads)
            assert list(fetched_keys) == asked[:count]
            assert list(fetched.payloads) == [payload(NUMBER[k]) for k in asked[:count]]
            assert (fetched.reason is None) == (count == len(asked))
            assert fetched.seconds >= 0.0

    @invariant()
    def every_page_is_read_once_at_a_time(self) -> None:
        flying = [read.key for read in self.reading]
        assert len(flying) == len(set(flying))

    @invariant()
    def memory_is_bounded_and_accounted_for(self) -> None:
        assert len(self.reading) + self.book.queued <= self.book.reserved <= ROOM

    def teardown(self) -> None:
        """When no fetch is active any more, the book keeps nothing."""
        for fetch_id in list(self.asked):
            assert self.book.cancel(fetch_id), "a fetch was lost"
        assert self.book.reserved == len(self.reading)
        for read in self.reading:
            self.book.settle(read, b"late", self.now)
        assert (self.book.reserved, self.book.queued, self.book.active) == (0, 0, 0)


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(max_examples=60, stateful_step_count=40)


@given(st.lists(st.integers(0, 7), max_size=8, unique=True))
@settings(max_examples=30)
def test_a_fetch_takes_no_more_than_there_is_room_for(numbers: list[int]) -> None:
    book = FetchBook(3)
    book.add("f", keys(*numbers), 0.0, 1.0, None)
    for read in book.next_batch(8):
        book.settle(read, b"", 0.0)
    [(fetched, _)] = book.take()
    assert len(fetched.payloads) == min(3, len(numbers))
    assert fetched.reason is (Reason.BUSY if len(numbers) > 3 else None)


def test_a_failed_read_is_not_joined() -> None:
    """Page 2 failed while its fetch still waits for page 1. A fetch that asks for page 2 now has it read
    again."""
    book = FetchBook(8)
    book.add("a", keys(1, 2), 0.0, 9.0, None)
    first, second = book.next_batch(2)
    book.settle(second, Reason.MISSING, 0.0)
    book.add("b", keys(2), 0.0, 9.0, None)
    [again] = book.next_batch(2)
    book.settle(again, b"came", 0.0)
    book.settle(first, b"first", 0.0)
    endings = {fetched.id: (fetched.payloads, fetched.reason) for fetched, _ in book.take()}
    assert endings == {"b": ((b"came",), None), "a": ((b"first",), Reason.MISSING)}
    assert book.reserved == 0


def test_a_batch_is_a_stretch_of_one_chain() -> None:
    """`Store.get` may rely on it: its keys are in chain order."""
    book = FetchBook(8)
    book.add("a", keys(1, 2, 3), 0.0, 9.0, None)
    book.add("b", keys(1, 7), 0.0, 9.0, None)
    assert [[read.key for read in book.next_batch(2)] for _ in range(3)] == [keys(1, 2), keys(3), keys(7)]
