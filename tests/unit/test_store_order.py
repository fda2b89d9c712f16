"""The writing side of the worker: the order in which changes reach the store, what a hung store costs, and
that no page stays a miss for ever."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hotprefix.engine.stores.breaker import BreakerConfig, BreakerState
from hotprefix.engine.stores.envelope import HEADER_BYTES, VERSION, pack
from hotprefix.engine.stores.errors import LinkError, PageError, Reason
from hotprefix.engine.stores.file import MIN_QUOTA, FileStore
from hotprefix.engine.stores.jobs import MAX_CHORES
from tests.support.stores import PAGE, PATIENCE_S, Harness, ScriptedStore, key, keys, payload

BREAKER = BreakerConfig(failures=3, open_s=5.0)


class Told(ScriptedStore):
    """Notes every change in the order in which it arrives. gate: while it is closed, puts wait."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(*numbers)
        self.told: list[tuple[str, bytes]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Semaphore(0)

    def put(self, key: bytes, wrapped: bytes) -> None:
        self.inside.release()
        self.gate.wait(PATIENCE_S)
        super().put(key, wrapped)
        self.told.append(("put", key))

    def touch(self, keys: Sequence[bytes]) -> None:
        super().touch(keys)
        self.told.append(("touch", keys[0]))

    def remove(self, key: bytes) -> None:
        super().remove(key)
        self.told.append(("remove", key))

    def close(self) -> None:
        self.gate.set()
        super().close()


class LruServer(Told):
    """Behaves like a server that evicts by itself: the page that was written or touched longest ago goes
    first."""

    def __init__(self, pages: int) -> None:
        super().__init__()
        self.limit = pages
        self.pages: OrderedDict[bytes, bytes] = OrderedDict()

    def put(self, key: bytes, wrapped: bytes) -> None:
        super().put(key, wrapped)
        self.pages.move_to_end(key)
        if len(self.pages) > self.limit:
            self.pages.popitem(last=False)

    def touch(self, keys: Sequence[bytes]) -> None:
        super().touch(keys)
        for each in reversed(keys):
            if each in self.pages:
                self.pages.move_to_end(each)


@pytest.fixture
def make() -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def build(store: Any, **settings: Any) -> Harness:
        made.append(Harness(store, breaker=BREAKER, **settings))
        return made[-1]

    yield build
    for harness in made:
        assert harness.worker.close() == 0


def submit_chain(h: Harness, *numbers: int, size: int = PAGE) -> None:
    for at, number in enumerate(numbers):
        parent = key(numbers[at - 1]) if at else None
        h.worker.submit_put(key(number), payload(number, size), parent)


def settle(h: Harness) -> None:
    assert h.worker.drain(PATIENCE_S)


# -- order --------------------------------------------------------------------------------------------


def test_what_was_submitted_first_is_done_first(make: Any) -> None:
    store = Told()
    h = make(store)
    store.gate.clear()
    submit_chain(h, 1, 2, 3)
    h.worker.submit_touch(keys(1, 2, 3))
    submit_chain(h, 4)
    h.worker.submit_touch(keys(4))
    store.gate.set()
    settle(h)
    expected = [("put", 1), ("put", 2), ("put", 3), ("touch", 1), ("put", 4), ("touch", 4)]
    assert store.told == [(what, key(number)) for what, number in expected]


def test_a_server_that_evicts_by_itself_loses_a_touched_chains_tail_first(make: Any) -> None:
    """If the touch came before the puts, the server would lose the root first, and with it the use of all the
    rest."""
    store = LruServer(pages=10)
    h = make(store)
    store.gate.clear()
    submit_chain(h, *range(10))
    h.worker.submit_touch(keys(*range(10)))
    store.gate.set()
    settle(h)
    for number in range(20, 24):
        submit_chain(h, number)
    settle(h)
    assert store.present(keys(*range(10))) == 6


@pytest.mark.parametrize("touched", [False, True])
def test_a_chain_longer_than_the_folder_can_be_reused_as_far_as_it_fits(
    make: Any, tmp_path: Path, touched: bool
) -> None:
    size = 30_000
    h = make(FileStore(tmp_path / "l3", MIN_QUOTA), page_bytes=size)
    submit_chain(h, *range(100), size=size)
    if touched:
        h.worker.submit_touch(keys(*range(100)))
    settle(h)
    fits = h.store.present(keys(*range(100)))
    assert 28 <= fits <= 34
    held = [number for number in range(100) if h.store.present(keys(number))]
    assert held == list(range(fits)), "whatever is held can be reused"
    stats = h.worker.stats()
    assert stats.write.failures == {Reason.FULL: 1, Reason.MISSING: 99 - fits}
    assert stats.write.breaker is BreakerState.CLOSED, "a prefix that is too long is no fault of the store"
    submit_chain(h, *range(200, 210), size=size)
    settle(h)
    assert h.store.present(keys(*range(200, 210))) == 10
    assert fits - 11 <= h.store.present(keys(*range(100))) <= fits - 10


def test_pages_behind_one_that_was_not_stored_are_not_stored_either(make: Any) -> None:
    """They could not be reached, and other pages would be evicted for them."""
    store = ScriptedStore()

    def fail_second(put: bytes) -> None:
        if put == key(2):
            raise PageError(Reason.FULL, "scripted")

    store.before_put = fail_second
    h = make(store)
    submit_chain(h, 1, 2, 3, 4)
    submit_chain(h, 5, 6)
    settle(h)
    assert store.puts == keys(1, 2, 5, 6)
    stats = h.worker.stats()
    assert stats.write.failures == {Reason.FULL: 1, Reason.MISSING: 2}
    assert (stats.write.pages, stats.write.breaker) == (3, BreakerState.CLOSED)


def test_a_page_whose_parent_another_had_stored_is_stored(make: Any) -> None:
    h = make(ScriptedStore(1))
    h.worker.submit_put(key(2), payload(2), key(1))
    h.worker.submit_put(key(9), payload(9), key(8))
    settle(h)
    assert h.store.puts == keys(2)


def test_a_removal_spares_a_page_that_was_put_anew(make: Any) -> None:
    """The page was damaged when it was read. By the time of its removal, another writer has replaced it."""
    store = Told(1)
    h = make(store)
    store.pages[key(1)] = b"rubbish"
    store.gate.clear()
    submit_chain(h, 7)  # the writing thread is busy while the damaged page is read
    assert store.inside.acquire(timeout=PATIENCE_S)
    assert h.fetch("a", 1).reason is Reason.TRUNCATED
    store.pages[key(1)] = pack(key(1), payload(1))
    store.gate.set()
    settle(h)
    assert store.removed == []
    assert h.fetch("b", 1).payloads == (payload(1),)


# -- damage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [*range(0, HEADER_BYTES, 5), 4, 5, HEADER_BYTES])
def test_a_page_with_a_wrong_byte_is_replaced_by_the_next_put(
    make: Any, tmp_path: Path, position: int
) -> None:
    """The page is read and missed once, and then stored anew, whichever byte is wrong (bytes 4 and 5 are the
    version)."""
    h = make(FileStore(tmp_path / "l3", MIN_QUOTA))
    submit_chain(h, 1, 2, 3)
    settle(h)
    [path] = (tmp_path / "l3").rglob(key(2).hex())
    damaged = bytearray(path.read_bytes())
    damaged[position] ^= 0x10
    path.write_bytes(damaged)
    assert h.fetch("a", 1, 2, 3).payloads == (payload(1),)
    submit_chain(h, 1, 2, 3)
    settle(h)
    assert h.fetch("b", 1, 2, 3).payloads == (payload(1), payload(2), payload(3))


def test_pages_of_an_older_format_leave_with_their_folder(tmp_path: Path) -> None:
    """Otherwise they would take room beside the quota for ever. Files of other programs stay."""
    older = tmp_path / "l3" / f"v{VERSION - 1}"
    (older / "ab").mkdir(parents=True)
    (older / "cd").mkdir()
    for path in (older / "ab" / ("ab" * 32), older / "cd" / ("cd" * 32), older / "index.db", older / "lock"):
        path.write_bytes(b"page")
    (older / "ab" / "notes.txt").write_text("mine")
    FileStore(tmp_path / "l3", MIN_QUOTA).put(key(1), b"page")
    assert [path.name for path in older.rglob("*") if path.is_file()] == ["notes.txt"]
    assert not (older / "cd").exists()


# -- a store that hangs -------------------------------------------------------------------------------


def hang(h: Harness) -> None:
    """Make the first put hang, with five more waiting behind it."""
    h.store.gate.clear()
    submit_chain(h, *range(6))
    assert h.store.inside.acquire(timeout=PATIENCE_S)


def test_a_hung_put_opens_the_breaker_and_nothing_piles_up(make: Any) -> None:
    h = make(Told(), timeout_s=2.0)
    hang(h)
    h.clock.now += 1.9
    assert h.worker.stats().write.failures == {}
    h.clock.now += 0.1
    assert not h.worker.submit_put(key(50), payload(50))
    stats = h.worker.stats()
    assert stats.write.failures == {Reason.TIMEOUT: 1, Reason.BUSY: 1}
    assert (stats.write.breaker, stats.queued_puts) == (BreakerState.CLOSED, 6)
    h.clock.now += 4.0
    h.worker.poll()
    stats = h.worker.stats()
    assert (stats.write.breaker, stats.write.opened) == (BreakerState.OPEN, 1)
    assert stats.write.failures == {Reason.TIMEOUT: 1, Reason.BUSY: 1, Reason.CIRCUIT_OPEN: 5}
    assert (stats.queued_puts, stats.queued_put_bytes) == (1, PAGE), "only the page in the store's hands"
    for number in range(100, 6_400):
        assert not h.worker.submit_put(key(number), payload(number))
        h.clock.now += 0.01
    stats = h.worker.stats()
    assert (stats.queued_puts, stats.queued_put_bytes) == (1, PAGE)
    assert sum(stats.write.failures.values()) == 1 + 1 + 5 + 6_300


def test_a_store_that_hung_is_found_again(make: Any) -> None:
    h = make(Told(), timeout_s=2.0)
    hang(h)
    h.clock.now += 60.0
    h.worker.poll()
    h.store.gate.set()
    settle(h)
    assert h.store.present(keys(0)) == 1, "the late page is there"
    h.clock.now += 5.0
    submit_chain(h, 20, 21)
    settle(h)
    stats = h.worker.stats()
    assert (stats.write.breaker, stats.write.pages) == (BreakerState.CLOSED, 3)
    assert stats.write.failures == {Reason.TIMEOUT: 1, Reason.CIRCUIT_OPEN: 5}


def test_a_hung_touch_opens_the_breaker_too(make: Any) -> None:
    h = make(Told(), timeout_s=2.0)
    entered, gate = threading.Event(), threading.Event()

    def wait(_: Sequence[bytes]) -> None:
        entered.set()
        gate.wait(PATIENCE_S)

    h.store.touch = wait
    h.worker.submit_touch(keys(1))
    assert entered.wait(PATIENCE_S)
    h.worker.submit_touch(keys(2))
    h.clock.now += 6.0
    stats = h.worker.stats()
    assert stats.write.breaker is BreakerState.OPEN
    assert stats.chores_lost == {Reason.CIRCUIT_OPEN: 1}
    gate.set()


def test_touches_are_bounded_and_counted(make: Any) -> None:
    h = make(Told())
    hang(h)
    for number in range(MAX_CHORES + 10):
        h.worker.submit_touch(keys(number))
    assert h.worker.stats().chores_lost == {Reason.BUSY: 10}
    h.store.gate.set()


def test_a_touch_that_fails_is_counted(make: Any) -> None:
    h = make(Told())

    def refuse(_: Sequence[bytes]) -> None:
        raise LinkError(Reason.DOWN, "scripted")

    h.store.touch = refuse
    h.worker.submit_touch(keys(1))
    settle(h)
    stats = h.worker.stats()
    assert (stats.chores_lost, stats.write.failures) == ({Reason.DOWN: 1}, {})
