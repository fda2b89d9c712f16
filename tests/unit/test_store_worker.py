"""The worker over a scripted store: whatever the store does, every fetch ends as it should and no caller
waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hotprefix.engine.stores.breaker import BreakerConfig, BreakerState
from hotprefix.engine.stores.envelope import pack
from hotprefix.engine.stores.errors import LinkError, Reason
from hotprefix.engine.stores.worker_config import WorkerConfig
from hotprefix.errors import ConfigError, ProtocolError
from tests.support.stores import PAGE, PATIENCE_S, Harness, ScriptedStore, key, keys, payload

BREAKER = BreakerConfig(failures=3, open_s=5.0)


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes harnesses, and checks at the end that all of their threads have ended."""
    made: list[Harness] = []

    def build(*numbers: int, **settings: Any) -> Harness:
        made.append(Harness(ScriptedStore(*numbers), breaker=BREAKER, **settings))
        return made[-1]

    yield build
    for harness in made:
        if harness.store.hang is not None:
            harness.store.hang.set()
        assert harness.worker.close() == 0


def fail(reason: Reason) -> Any:
    def raise_it(_: object) -> None:
        raise LinkError(reason, "scripted")

    return raise_it


# -- what comes ---------------------------------------------------------------------------------------


def test_a_whole_chain_comes_verified_in_order(make: Any) -> None:
    h = make(1, 2, 3)
    fetched = h.fetch("a", 1, 2, 3)
    assert fetched.payloads == (payload(1), payload(2), payload(3))
    assert fetched.reason is None
    assert fetched.bytes == 3 * PAGE


@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize("short", [None, 1])
def test_the_run_ends_before_the_first_absent_page(make: Any, batch: int, short: int | None) -> None:
    """The run is never rounded up and never goes past a hole (rules 11 and 33)."""
    h = make(1, 2, 4, 5, batch_bytes=batch * PAGE)
    h.store.short = short
    fetched = h.fetch("a", 1, 2, 3, 4, 5)
    assert fetched.payloads == (payload(1), payload(2))
    assert fetched.reason is Reason.MISSING


def damaged(number: int, reason: Reason) -> bytes:
    wrapped = pack(key(number), payload(number))
    if reason is Reason.WRONG_LENGTH:
        return pack(key(number), payload(number, PAGE - 1))
    return {
        Reason.TRUNCATED: wrapped[:-1],
        Reason.CORRUPTED: wrapped[:-1] + bytes([wrapped[-1] ^ 1]),
        Reason.WRONG_KEY: pack(key(99), payload(99)),
        Reason.FOREIGN_VERSION: wrapped[:4] + b"\x09" + wrapped[5:],
    }[reason]


@pytest.mark.parametrize(
    "reason",
    [Reason.TRUNCATED, Reason.CORRUPTED, Reason.WRONG_KEY, Reason.FOREIGN_VERSION, Reason.WRONG_LENGTH],
)
def test_a_bad_page_is_a_counted_miss_and_leaves_the_store(make: Any, reason: Reason) -> None:
    """A bad page is a miss (rule 33). Pages of other formats have places of their own, so a page here whose
    header gives another format is damaged."""
    h = make(1, 2, 3)
    h.store.pages[key(2)] = damaged(2, reason)
    fetched = h.fetch("a", 1, 2, 3)
    assert fetched.payloads == (payload(1),)
    assert fetched.reason is reason
    stats = h.worker.stats()
    assert stats.read.failures == {reason: 1}
    assert stats.endings == {reason: 1}
    assert stats.read.breaker is BreakerState.CLOSED
    assert h.worker.drain(PATIENCE_S)
    assert h.store.removed == [key(2)]


def test_a_failed_put_is_not_found_later(make: Any) -> None:
    """The third put of five fails: the run ends before its page (rules 33 and 34)."""
    h = make()
    h.store.before_put = lambda put: fail(Reason.FULL)(put) if put == key(3) else None
    h.put(1, 2, 3, 4, 5)
    assert h.fetch("a", 1, 2, 3, 4, 5).payloads == (payload(1), payload(2))
    assert h.worker.stats().write.failures == {Reason.FULL: 1}


def test_many_chains_never_mix(make: Any) -> None:
    """Fifty sessions use one store, eight at a time; each gets its own pages (rule 33)."""
    h = make(readers=4, batch_bytes=2 * PAGE)
    chains = {n: range(n * 10, n * 10 + 1 + n % 7) for n in range(50)}
    for numbers in chains.values():
        h.put(*numbers)
    for n, numbers in chains.items():
        h.worker.submit_fetch(n, keys(*numbers))
    for fetched in h.wait(50):
        assert fetched.payloads == tuple(map(payload, chains[fetched.id]))


def test_an_empty_fetch_is_complete_at_once(make: Any) -> None:
    h = make()
    h.worker.submit_fetch("a", [])
    [fetched] = h.worker.poll()
    assert (fetched.payloads, fetched.reason) == ((), None)


def test_fetched_runs_are_touched_head_first(make: Any) -> None:
    h = make(1, 2)
    h.fetch("a", 1, 2, 3)
    h.worker.submit_touch(keys(7, 8))
    assert h.worker.drain(PATIENCE_S)
    assert h.store.touched == [tuple(keys(1, 2)), tuple(keys(7, 8))]


# -- what goes wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyError("gone"), RuntimeError("boom"), OSError(5, "EIO")])
def test_any_exception_of_a_store_is_a_miss(make: Any, error: Exception) -> None:
    """Both a read and a write that raise are counted, and the worker goes on (rule 37)."""
    h = make(1)

    def explode(_: object) -> None:
        raise error

    h.store.before_get = h.store.before_put = explode
    assert h.fetch("a", 1).reason is Reason.FAILED
    h.put(2)
    h.store.before_get = h.store.before_put = lambda _: None
    assert h.fetch("b", 1).reason is None
    h.put(3)
    stats = h.worker.stats()
    assert stats.read.failures == {Reason.FAILED: 1}
    assert stats.write.failures == {Reason.FAILED: 1}
    assert str(error) in (stats.read.last_error or "")
    assert stats.threads == 2


def test_a_store_that_answers_nothing_does_not_spin(make: Any) -> None:
    h = make(1)
    h.store.short = 0
    assert h.fetch("a", 1, 2).reason is Reason.FAILED
    assert len(h.store.gets) == 1


def test_a_failure_in_mid_chain_keeps_what_came(make: Any) -> None:
    h = make(1, 2, 3, batch_bytes=PAGE)
    h.store.before_get = lambda asked: fail(Reason.DOWN)(asked) if key(3) in asked else None
    fetched = h.fetch("a", 1, 2, 3)
    assert fetched.payloads == (payload(1), payload(2))
    assert fetched.reason is Reason.DOWN


def test_a_hung_read_times_out_and_its_late_result_is_dropped(make: Any) -> None:
    """The answer comes after the time limit (rules 35 and 37). No fetch gets it, its memory stays reserved
    until it is there, and the next fetch asks the store again."""
    h = make(1, 2, timeout_s=2.0, readers=2)
    release = h.store.hang = threading.Event()
    h.worker.submit_fetch("a", keys(1, 2))
    h.store.wait_entered()
    assert h.worker.next_deadline() == 102.0
    h.clock.now += 1.9
    assert h.worker.poll() == []
    h.clock.now += 0.1
    [fetched] = h.worker.poll()
    assert (fetched.payloads, fetched.reason, fetched.seconds) == ((), Reason.TIMEOUT, 2.0)
    stats = h.worker.stats()
    assert stats.read.failures == {Reason.TIMEOUT: 1}
    assert stats.reserved_bytes == 2 * PAGE
    h.store.hang = None
    assert h.fetch("b", 1, 2).payloads == (payload(1), payload(2))
    release.set()
    assert h.worker.close() == 0
    stats = h.worker.stats()
    assert (stats.late_pages, stats.reserved_bytes) == (2, 0)
    assert stats.read.failures == {Reason.TIMEOUT: 1}
    assert h.worker.poll() == []


def test_what_came_before_the_time_limit_counts(make: Any) -> None:
    h = make(1, 2, timeout_s=2.0, batch_bytes=PAGE)
    gate = threading.Event()
    h.store.before_get = lambda asked: gate.wait(PATIENCE_S) if key(2) in asked else None
    h.worker.submit_fetch("a", keys(1, 2))
    h.store.wait_entered()
    h.store.wait_entered()
    h.clock.now += 2.0
    [fetched] = h.worker.poll()
    gate.set()
    assert (fetched.payloads, fetched.reason) == ((payload(1),), Reason.TIMEOUT)


def test_when_every_thread_is_stuck_nobody_waits_in_vain(make: Any) -> None:
    h = make(1, timeout_s=2.0, readers=1)
    h.store.hang = threading.Event()
    h.worker.submit_fetch("a", keys(1))
    h.store.wait_entered()
    h.clock.now += 2.0
    h.worker.submit_fetch("b", keys(1))
    endings = {fetched.id: fetched.reason for fetched in h.worker.poll()}
    assert endings == {"a": Reason.TIMEOUT, "b": Reason.BUSY}


def test_stop_takes_what_has_come(make: Any) -> None:
    """A prefetch policy may take, at admission, what has arrived by then."""
    h = make(1, 2, batch_bytes=PAGE)
    gate = threading.Event()
    h.store.before_get = lambda asked: gate.wait(PATIENCE_S) if key(2) in asked else None
    h.worker.submit_fetch("a", keys(1, 2))
    h.store.wait_entered()
    h.store.wait_entered()
    h.worker.stop("a")
    [fetched] = h.worker.poll()
    gate.set()
    assert (fetched.payloads, fetched.reason) == ((payload(1),), Reason.STOPPED)
    h.worker.stop("a")
    h.worker.stop("never")
    assert h.worker.poll() == []


# -- cancelling and sharing ---------------------------------------------------------------------------


def test_a_cancelled_fetch_never_ends_and_gives_its_memory_back(make: Any) -> None:
    """The fetch is cancelled while its first page is being read. The rest is not read at all (rule 36)."""
    h = make(1, 2, 3, batch_bytes=PAGE)
    release = h.store.hang = threading.Event()
    h.worker.submit_fetch("a", keys(1, 2, 3))
    h.store.wait_entered()
    h.worker.cancel("a")
    h.worker.cancel("a")
    assert h.worker.stats().reserved_bytes == PAGE
    h.store.hang = None
    release.set()
    assert h.fetch("b", 9).reason is Reason.MISSING
    stats = h.worker.stats()
    assert (stats.reserved_bytes, stats.active_fetches, stats.late_pages) == (0, 0, 1)
    assert stats.endings == {Reason.CANCELLED: 1, Reason.MISSING: 1}
    assert [asked for call in h.store.gets for asked in call] == keys(1, 9)


def test_an_ended_fetch_can_be_cancelled_before_it_is_polled(make: Any) -> None:
    h = make()
    h.worker.submit_fetch("a", [])
    h.worker.cancel("a")
    assert h.worker.poll() == []


def test_pages_that_two_fetches_share_are_read_once(make: Any) -> None:
    """This holds for a fetch that starts in the middle of a chain too (rule 36)."""
    h = make(1, 2, 3, 4)
    release = h.store.hang = threading.Event()
    h.worker.submit_fetch("a", keys(1, 2, 3))
    h.store.wait_entered()
    h.worker.submit_fetch("b", keys(1, 2, 4))
    h.worker.submit_fetch("c", keys(3, 4))
    release.set()
    by_id = {fetched.id: fetched.payloads for fetched in h.wait(3)}
    assert by_id == {
        "a": (payload(1), payload(2), payload(3)),
        "b": (payload(1), payload(2), payload(4)),
        "c": (payload(3), payload(4)),
    }
    assert sorted(asked for call in h.store.gets for asked in call) == sorted(keys(1, 2, 3, 4))
    assert h.worker.stats().shared_pages == 4


def test_the_first_ones_cancel_takes_nothing_from_the_second(make: Any) -> None:
    h = make(1, 2, 3, batch_bytes=PAGE)
    release = h.store.hang = threading.Event()
    h.worker.submit_fetch("a", keys(1, 2, 3))
    h.store.wait_entered()
    h.worker.submit_fetch("b", keys(1, 2, 3))
    h.worker.cancel("a")
    release.set()
    assert h.wait()[0].payloads == (payload(1), payload(2), payload(3))
    assert len(h.store.gets) == 3


def test_one_bad_page_spares_fetches_that_do_not_want_it(make: Any) -> None:
    """The batch fails at page 1. The fetch that begins at page 2 still gets its pages."""
    h = make(1, 2, 3)
    release = h.store.hang = threading.Event()
    h.store.before_get = lambda asked: fail(Reason.DOWN)(asked) if key(1) in asked else None
    h.worker.submit_fetch("a", keys(1, 2, 3))
    h.store.wait_entered()
    h.worker.submit_fetch("b", keys(2, 3))
    release.set()
    by_id = {fetched.id: fetched for fetched in h.wait(2)}
    assert by_id["a"].reason is Reason.DOWN
    assert by_id["b"].payloads == (payload(2), payload(3))


def test_an_id_in_use_is_refused(make: Any) -> None:
    h = make()
    h.worker.submit_fetch("a", [])
    with pytest.raises(ProtocolError, match="'a' is in use"):
        h.worker.submit_fetch("a", [])


# -- bounds -------------------------------------------------------------------------------------------


def test_later_fetches_take_no_memory_from_earlier_ones(make: Any) -> None:
    """There are 20 fetches of 10 pages and room for 40 pages: the first four get all their pages, in order
    (rule 36)."""
    h = make(*range(200), max_inflight_bytes=40 * PAGE)
    release = h.store.hang = threading.Event()
    for n in range(20):
        h.worker.submit_fetch(n, keys(*range(n * 10, n * 10 + 10)))
    assert h.worker.stats().reserved_bytes == 40 * PAGE
    assert [(q.id, q.reason, q.payloads) for q in h.worker.poll()] == [
        (n, Reason.BUSY, ()) for n in range(4, 20)
    ]
    release.set()
    assert [(q.id, len(q.payloads), q.reason) for q in h.wait(4)] == [(n, 10, None) for n in range(4)]
    assert h.worker.stats().reserved_bytes == 0


def test_a_fetch_over_the_bound_takes_what_fits(make: Any) -> None:
    h = make(*range(8), max_inflight_bytes=5 * PAGE)
    fetched = h.fetch("a", *range(8))
    assert (len(fetched.payloads), fetched.reason) == (5, Reason.BUSY)


def test_puts_are_dropped_when_the_queue_is_full_and_never_wait(make: Any) -> None:
    h = make(max_inflight_bytes=3 * PAGE)
    entered, gate = threading.Semaphore(0), threading.Event()

    def block(_: bytes) -> None:
        entered.release()
        gate.wait(PATIENCE_S)

    h.store.before_put = block
    assert h.worker.submit_put(key(1), payload(1))
    assert entered.acquire(timeout=PATIENCE_S)
    accepted = [h.worker.submit_put(key(n), payload(n)) for n in (2, 3, 4, 5)]
    assert accepted == [True, True, False, False]
    assert h.worker.submit_put(key(2), payload(2))
    stats = h.worker.stats()
    assert (stats.queued_puts, stats.queued_put_bytes) == (3, 3 * PAGE)
    assert stats.write.failures == {Reason.BUSY: 2}
    gate.set()
    assert h.worker.drain(PATIENCE_S)
    assert h.store.puts == keys(1, 2, 3)
    assert h.worker.submit_put(key(4), payload(4))


def test_what_is_written_is_what_was_given(make: Any) -> None:
    """The caller uses its buffer for something else right after the put (rule 35)."""
    h = make()
    buffer = bytearray(payload(1))
    h.worker.submit_put(key(1), buffer)
    buffer[:] = payload(2)
    assert h.worker.drain(PATIENCE_S)
    assert h.fetch("a", 1).payloads == (payload(1),)


def test_a_payload_of_another_size_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="has 64 bytes, got 3"):
        make().worker.submit_put(key(1), b"abc")


def test_a_page_the_store_has_is_not_written_again(make: Any) -> None:
    h = make(1)
    h.put(1, 2)
    assert h.store.puts == [key(2)]
    stats = h.worker.stats()
    assert (stats.known_pages, stats.write.pages) == (1, 1)


# -- the breaker --------------------------------------------------------------------------------------


def test_the_breaker_spares_a_store_that_is_down_and_finds_it_again(make: Any) -> None:
    h = make(1)
    h.store.before_get = fail(Reason.DOWN)
    assert [h.fetch(n, 1).reason for n in range(5)] == [Reason.DOWN] * 3 + [Reason.CIRCUIT_OPEN] * 2
    assert len(h.store.gets) == 3
    h.clock.now += 5.0
    assert h.fetch("probe", 1).reason is Reason.DOWN
    assert h.fetch("after", 1).reason is Reason.CIRCUIT_OPEN
    h.store.before_get = lambda _: None
    h.clock.now += 5.0
    assert h.fetch("back", 1).payloads == (payload(1),)
    stats = h.worker.stats()
    assert (stats.read.breaker, stats.read.opened) == (BreakerState.CLOSED, 2)
    assert stats.read.failures == {Reason.DOWN: 4}
    assert stats.endings == {Reason.DOWN: 4, Reason.CIRCUIT_OPEN: 3, "complete": 1}


def test_a_cancelled_probe_does_not_hold_the_breaker(make: Any) -> None:
    """The cancelled fetch will report no outcome, and yet the next call may probe (rule 38)."""
    h = make(1, timeout_s=2.0, readers=2)
    h.store.before_get = fail(Reason.DOWN)
    for n in range(3):
        h.fetch(n, 1)
    h.store.before_get = lambda _: None
    release = h.store.hang = threading.Event()
    h.clock.now += 5.0
    for _ in range(3):
        h.store.wait_entered()
    h.worker.submit_fetch("probe", keys(1))
    h.store.wait_entered()
    h.worker.cancel("probe")
    h.clock.now += 2.0
    assert h.worker.poll() == []
    assert h.worker.stats().read.breaker is BreakerState.OPEN
    h.store.hang = None
    h.clock.now += 5.0
    assert h.fetch("next", 1).payloads == (payload(1),)
    release.set()


def test_answers_that_come_too_late_are_failures(make: Any) -> None:
    h = make(1, timeout_s=2.0)

    def slow(_: Sequence[bytes]) -> None:
        h.clock.now += 2.0

    h.store.before_get = slow
    for n in range(3):
        h.fetch(n, 1)
    stats = h.worker.stats()
    assert (stats.read.breaker, stats.read.failures) == (BreakerState.OPEN, {Reason.TIMEOUT: 3})


def test_absent_and_bad_pages_do_not_open_the_breaker(make: Any) -> None:
    h = make()
    for n in range(5):
        h.store.pages[key(n)] = b"rubbish"
        h.fetch(n, n, 50)
        h.fetch(f"{n}", 60)
    assert h.worker.stats().read.breaker is BreakerState.CLOSED


def test_a_full_store_still_gives_pages_and_takes_them_again_later(make: Any) -> None:
    """Puts succeed again when there is room (rule 37)."""
    h = make(1)
    h.store.before_put = fail(Reason.FULL)
    h.put(2, 3, 4)
    assert not h.worker.submit_put(key(5), payload(5))
    assert h.fetch("a", 1).payloads == (payload(1),)
    h.store.before_put = lambda _: None
    h.clock.now += 5.0
    h.put(5, 6)
    stats = h.worker.stats()
    assert stats.write.failures == {Reason.FULL: 3, Reason.CIRCUIT_OPEN: 1}
    assert (stats.write.pages, stats.write.breaker) == (2, BreakerState.CLOSED)


# -- ending -------------------------------------------------------------------------------------------


def test_close_ends_every_thread_fetch_and_put(make: Any) -> None:
    h = make(1, readers=3)
    h.worker.submit_fetch("a", keys(1))
    h.wait()
    before = {thread.name for thread in threading.enumerate()}
    assert sum(name.startswith("hotprefix-store") for name in before) >= 4
    assert h.worker.close() == 0
    assert h.worker.stats().threads == 0
    assert h.store.closed == 1
    h.worker.submit_fetch("b", keys(1))
    assert [fetched.reason for fetched in h.worker.poll()] == [Reason.CLOSED]
    assert not h.worker.submit_put(key(2), payload(2))


def test_close_cuts_off_a_hung_read(make: Any) -> None:
    h = make(1)
    h.store.hang = threading.Event()
    h.worker.submit_fetch("a", keys(1))
    h.store.wait_entered()
    assert h.worker.close(timeout_s=0.2) == 0
    assert [fetched.reason for fetched in h.worker.poll()] == [Reason.CLOSED]


def test_close_leaves_a_read_that_nothing_can_end(make: Any) -> None:
    h = make(1)
    h.store.hang = threading.Event()
    h.store.frees_on_close = False
    h.worker.submit_fetch("a", keys(1))
    h.store.wait_entered()
    assert h.worker.close(timeout_s=0.1) == 1


def test_queued_puts_are_counted_when_the_worker_closes(make: Any) -> None:
    h = make()
    entered, gate = threading.Semaphore(0), threading.Event()

    def block(_: bytes) -> None:
        entered.release()
        gate.wait(PATIENCE_S)

    h.store.before_put = block
    h.worker.submit_put(key(1), payload(1))
    assert entered.acquire(timeout=PATIENCE_S)
    h.worker.submit_put(key(2), payload(2))
    assert not h.worker.drain(0.01)
    h.store.close = gate.set
    assert h.worker.close(timeout_s=0.2) == 0
    stats = h.worker.stats()
    assert (stats.write.pages, stats.write.failures) == (1, {Reason.CLOSED: 1})


# -- figures ------------------------------------------------------------------------------------------


def test_link_bytes_are_bytes_moved(make: Any) -> None:
    h = make()
    h.put(1, 2, 3)
    h.fetch("a", 1, 2, 3)
    h.store.pages[key(2)] = b"rubbish"
    h.fetch("b", 1, 2, 3)
    wrapped = len(pack(key(1), payload(1)))
    stats = h.worker.stats()
    assert (stats.write.pages, stats.write.bytes) == (3, 3 * wrapped)
    assert (stats.read.pages, stats.read.bytes) == (5, 5 * wrapped + len(b"rubbish"))


def test_seconds_are_the_stores(make: Any) -> None:
    h = make(1)

    def slow(_: Sequence[bytes]) -> None:
        h.clock.now += 0.25

    h.store.before_get = slow
    assert h.fetch("a", 1).seconds == 0.25
    assert (h.worker.stats().read.seconds, h.worker.stats().read.calls) == (0.25, 1)


def test_a_snapshot_does_not_change(make: Any) -> None:
    h = make(1)
    before = h.worker.stats()
    h.fetch("a", 1)
    h.fetch("b", 2)
    assert (before.read.calls, dict(before.endings)) == (0, {})
    with pytest.raises(AttributeError):
        before.late_pages = 1


@pytest.mark.parametrize(
    "bad", [{"page_bytes": 0}, {"readers": 0}, {"timeout_s": 0.0}, {"max_inflight_bytes": PAGE - 1}]
)
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        WorkerConfig(**({"page_bytes": PAGE} | bad))
