"""What is said of the waiting queue: the oldest waiter's age, and why its head does not start while others
run."""

from __future__ import annotations

from math import ceil

import pytest

from hotprefix.errors import ProtocolError
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import Flight, Order, Prefetch, Publication
from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.plan import Hindrance, Queue
from hotprefix.kernel.request import Request
from hotprefix.kernel.state.queue import WaitingQueue
from hotprefix.kernel.state.sequence import Phase, Sequence
from tests.support.drive import Driver
from tests.support.observed import program, run
from tests.unit.test_tiers import in_storage, tiered

PAGE = 4


def test_a_head_that_does_not_fit_is_told_in_pages() -> None:
    """10 pages, of which `old` left 3 in the cache. `runs` shares 2 of them, has 3 more and is to get 3
    more; `head` needs 7, of which it shares 2 with `runs`: 7 - 2 + 3 are more than the 4 free and 1
    evictable."""
    d = Driver(10, PAGE, output_reserve=1.0)
    d.submit("old", [*range(12), 50], 1)
    d.run()
    d.submit("runs", [*range(8), *range(60, 68)], 17)
    d.step()
    d.now = 5.0
    d.submit("head", [*range(8), *range(70, 86)], 5)
    d.step()
    found = d.kernel.waiting(9.0)
    head = found.head
    assert head is not None
    assert (head.request, head.hindrance, head.waited) == ("head", Hindrance.PAGES, 4.0)
    assert (head.need, head.shared, head.owed) == (7, 2, 3)
    assert (head.free, head.evictable, head.protected, head.owned, head.capacity) == (4, 1, 4, 1, 10)
    assert found.oldest == 4.0
    assert not d.plans[-1].admissions
    assert d.plans[-1].chunks, "others run"


def test_only_what_waits_can_be_taken_out_of_the_queue() -> None:
    """Neither a request behind the last, nor one in the place of another."""
    first, second, third = (
        Sequence(Request(name, tk.encode([1]), 1), n, 0.0) for n, name in enumerate("abc")
    )
    queue = WaitingQueue()
    queue.add(first)
    queue.add(third)
    for absent in (second, Sequence(Request("d", tk.encode([1]), 1), 9, 0.0)):
        with pytest.raises(KeyError):
            queue.remove(absent)
    assert list(queue) == [first, third]


def test_rows_storage_retry_and_an_empty_queue() -> None:
    d = Driver(64, PAGE, max_running=1)
    assert d.kernel.waiting(7.0) == Queue(None, None)
    d.submit("runs", [1] * 8, 8)
    d.step()
    assert d.kernel.waiting(d.now) == Queue(None, None)
    d.submit("waits", [2] * 8, 1)
    assert d.kernel.waiting(d.now).head.hindrance is Hindrance.ROWS  # type: ignore[union-attr]
    d = in_storage(tiered(prefetch=Prefetch.WAIT_COMPLETE), list(range(41)))
    d.storage_delay = 3
    d.submit("waits", list(range(41)), 1)
    d.step()
    assert d.kernel.waiting(d.now).head.hindrance is Hindrance.STORAGE  # type: ignore[union-attr]
    d = Driver(64, PAGE)
    d.submit("a", [1] * 8, 8)
    d.submit("b", [2] * 8, 8)
    d.executor.fail_next = 1
    d.step()
    assert d.kernel.waiting(d.now).head.hindrance is Hindrance.BUDGET  # type: ignore[union-attr]
    d.submit("c", [3] * 8, 8)
    assert d.kernel.waiting(d.now).head.request == "c"  # type: ignore[union-attr]
    assert d.kernel.waiting(d.now).head.hindrance is Hindrance.RETRY  # type: ignore[union-attr]


def test_the_oldest_waiter_may_be_parked_and_none_is_one_that_ran() -> None:
    d = Driver(64, PAGE, flight=Flight.EXACT_FINISH)
    d.submit("leader", [1] * 8, 8)
    d.step()
    d.submit("follower", [1] * 8, 8)
    found = d.kernel.waiting(d.now + 2.0)
    assert found == Queue(2.0, None)
    d.executor.fail_next = 1
    d.step()  # the leader waits again, as one that has been admitted before
    found = d.kernel.waiting(20.0)
    assert found.oldest == 20.0 - 1.0
    assert found.head is not None


def memory(kernel: Kernel) -> list[object]:
    """What a look-up, an evaluation or a counter would leave behind."""
    s = kernel._s
    left: list[object] = [
        (q.memo, q.usable, q.shut, q.held, q.fetch, q.fetch_decided, q.overtaken)
        for q in s.sequences.values()
    ]
    return [*left, repr(kernel.counters), kernel.status(), s.given_back, s.reserve.share]


def naive(kernel: Kernel, head: Sequence) -> tuple[int, int]:
    """(pages that it will hold, pages that running ones lack) by the meaning of the words."""
    s, page = kernel._s, kernel.config.page_size

    def holds(q: Sequence) -> int:
        share = 1.0 if q is head and q.retractions else s.reserve.share
        left = ceil((q.request.max_tokens - q.outputs) * share)
        return -(-(q.request.prompt_len + q.outputs + max(0, left - 1)) // page)

    return holds(head), sum(max(0, holds(q) - len(q.table)) for q in s.running)


class Asking:
    """An observer that asks after each step, and recounts."""

    wants_events = False

    def __init__(self) -> None:
        self.seen: set[Hindrance] = set()

    def opened(self, kernel: Kernel, *args: object) -> None:
        self.kernel = kernel

    def changed(self, now: float) -> None:
        kernel, s, before = self.kernel, self.kernel._s, memory(self.kernel)
        found = kernel.waiting(now)
        assert memory(kernel) == before
        waiting = [q for q in s.sequences.values() if q.phase in (Phase.WAITING, Phase.PARKED)]
        never = [q.arrival for q in waiting if not q.retractions]
        assert found.oldest == (now - min(never) if never else None)
        head = found.head
        assert (head is None) == (not len(s.queue))
        if head is None:
            return
        self.seen.add(head.hindrance)
        l1 = kernel.status().l1
        pages = (head.free, head.evictable, head.protected, head.owned)
        assert pages == (l1.free, l1.evictable, l1.protected, l1.owned)
        assert (head.need, head.owed) == naive(kernel, s.sequences[head.request])
        if kernel.config.order is Order.FCFS and not s.suspects:
            assert head.request == min(s.queue, key=lambda q: q.serial).request.id
        short = head.need - head.shared + head.owed > head.free + head.evictable
        if head.hindrance in (Hindrance.PAGES, Hindrance.BUDGET):
            assert short == (head.hindrance is Hindrance.PAGES)

    def __getattr__(self, name: str) -> object:
        return lambda *args: None


def test_what_is_said_agrees_with_a_recount_and_moves_nothing() -> None:
    seen: set[Hindrance] = set()
    for seed in range(30):
        asking = Asking()
        run(program(seed, 60), asking)  # type: ignore[arg-type]
        seen |= asking.seen
    assert seen >= {Hindrance.PAGES, Hindrance.ROWS, Hindrance.BUDGET, Hindrance.RETRY, Hindrance.STORAGE}


def test_refresh_may_be_timed_apart_from_the_plan_it_belongs_to() -> None:
    """The same plans, whether the driver asks for the first part by itself or not; a pass counts once."""

    def plans(*, apart: bool) -> tuple[list[str], int]:
        d = Driver(24, PAGE, max_running=2, publication=Publication.STEP)
        for n in range(6):
            d.submit(f"r{n}", [*range(8 + n), n], 6)
        for _ in range(60):
            if apart:
                assert d.kernel.refresh(d.now)
            d.step()
        return [repr(plan) for plan in d.plans], d.kernel.counters.refresh_passes

    assert plans(apart=True) == plans(apart=False)
    d = Driver(24, PAGE)
    d.submit("a", [1] * 8, 4)
    d.kernel.refresh(0.0)
    with pytest.raises(ProtocolError, match="once"):
        d.kernel.refresh(0.0)
    d.plan()
    with pytest.raises(ProtocolError, match="in flight"):
        d.kernel.refresh(0.0)
