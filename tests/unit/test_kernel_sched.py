"""Admission, eviction under load, over-commit, limits, cancellation, and what is left at the end.

Every output is compared with an uncached run.
"""

from __future__ import annotations

import gc
from collections import Counter

import pytest

from hotprefix.errors import ConfigError, ContextLengthExceeded, ProtocolError, QueueFull, RequestRejected
from hotprefix.kernel import events as ev
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.cache.node import Node
from hotprefix.kernel.cache.pages import PageState
from hotprefix.kernel.config import Flight, KernelConfig, Order, Publication
from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.plan import Finish, StepOutcome
from hotprefix.kernel.request import Request
from hotprefix.kernel.state.sequence import Sequence
from tests.support.drive import Driver
from tests.support.watch import PlanWatch

# -- what can run, and what never can -------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_request_that_needs_exactly_the_pool_runs_and_one_more_token_is_refused(max_tokens: int) -> None:
    """At the limit, below and above it, mixed with others; the queue stays alive."""
    d = Driver(8, 4)
    limit = 32 - max_tokens + 1
    for n, length in enumerate((limit - 1, limit, limit + 1, 3, limit)):
        if length <= limit:
            d.submit(f"r{n}", [n] * length, max_tokens)
            continue
        with pytest.raises(
            ContextLengthExceeded, match=f"{length} tokens and {max_tokens} .* 8 .*32"
        ) as error:
            d.submit(f"r{n}", [n] * length, max_tokens)
        assert error.value.code == "context_length_exceeded"
    d.run().assert_cold_equal()
    assert set(d.finish.values()) == {Finish.LENGTH}
    assert len(d.finish) == 4
    assert d.kernel.counters.rejected == 1


def test_bad_requests_are_refused_and_nothing_is_remembered() -> None:
    d = Driver(8, 4)
    kernel = d.kernel
    good = Request("good", tk.encode([1, 2]), 2)
    kernel.submit(good, 0.0)
    bad = [
        (Request("a", b"", 1), "empty"),
        (Request("b", b"\1\2\3", 1), "empty"),
        (Request("c", tk.encode([1]), -1), "max_tokens=-1"),
        (Request("d", tk.encode([1]), 1, cache_key=tk.encode([1, 2])), "differ in length"),
        (good, "in use"),
    ]
    for request, message in bad:
        with pytest.raises(RequestRejected, match=message):
            kernel.submit(request, 0.0)
    assert [r.id in kernel._s.sequences for r, _ in bad] == [False] * 4 + [True]
    assert kernel.status().waiting == 1
    assert kernel.counters.rejected == 5


def test_a_lone_request_that_fills_the_pool_ends_by_length_and_the_rest_go_on() -> None:
    """Nobody can be retracted for it."""
    d = Driver(8, 4, output_reserve=0.0)
    with pytest.raises(ContextLengthExceeded):
        d.submit("nine pages", [1] * 20, 14)
    d.submit("eight pages", [1] * 20, 13)
    d.run()
    d.submit("next", [2] * 5, 4)
    d.run().assert_cold_equal()
    assert d.kernel.counters.retractions == 0


def test_a_cache_that_no_request_leaves_anything_in_still_answers() -> None:
    """The pool is smaller than two requests; a page larger than any prompt."""
    d = Driver(5, 4)
    for n in range(6):
        d.submit(f"r{n}", [n] * 13, 6)
    d.run().assert_cold_equal()
    d = Driver(3, 64)
    for n in range(6):
        d.submit(f"r{n}", [7] * 20, 6)
    d.run().assert_cold_equal()


def test_a_full_queue_says_so_and_takes_requests_again_later() -> None:
    d = Driver(64, 4, max_waiting=2, max_running=1, flight=Flight.EXACT_FINISH)
    d.submit("a", [1, 2, 3], 4)
    d.submit("b", [1, 2, 3], 4)
    d.submit("c", [1], 1)
    with pytest.raises(QueueFull, match="2 requests wait, the limit is 2"):
        d.submit("d", [1], 1)
    d.run()
    d.submit("d", [1], 1)
    d.run().assert_cold_equal()


def test_who_will_find_a_free_slot_does_not_wait() -> None:
    d = Driver(64, 4, max_waiting=2, max_running=3, flight=Flight.NONE)
    for n in range(5):  # three will run, two wait
        d.submit(f"r{n}", [n, 2, 3], 4)
    with pytest.raises(QueueFull, match="2 requests wait, the limit is 2"):
        d.submit("more", [9], 1)
    d.step()
    assert d.kernel.load == (3, 2)
    with pytest.raises(QueueFull, match="2 requests wait, the limit is 2"):
        d.submit("more", [9], 1)
    d.run().assert_cold_equal()


def test_free_slots_do_not_count_while_somebody_waits_for_pages() -> None:
    d = Driver(4, 4, max_waiting=1, max_running=8, flight=Flight.NONE, output_reserve=1.0)
    d.submit("large", [1] * 8, 8)
    d.step()
    d.submit("waits", [2] * 8, 8)
    d.step()
    assert d.kernel.load == (1, 1)
    with pytest.raises(QueueFull, match="1 requests wait, the limit is 1"):
        d.submit("more", [3], 1)
    d.run().assert_cold_equal()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("total_pages", 0), ("page_size", 0), ("page_size", 1.5), ("max_batched_tokens", 0),
        ("max_running", True), ("output_reserve", 1.1), ("output_reserve", -0.1), ("max_waiting", -1),
        ("order", "fcfs"), ("publication", "now"), ("max_running", 5000),
    ],
)  # fmt: skip
def test_a_bad_configuration_names_the_field_the_value_and_the_fix(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        KernelConfig(**{"total_pages": 10, name: value})  # type: ignore[arg-type]
    assert error.value.param == name
    assert str(value) in str(error.value)


# -- who is admitted ------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [Order.FCFS, Order.PRIORITY])
@pytest.mark.parametrize("max_overtakes", [0, 3, 8])
def test_a_head_that_does_not_fit_is_passed_a_bounded_number_of_times(
    order: Order, max_overtakes: int
) -> None:
    """It needs ten pages and three are free; small ones may go ahead, not for ever."""
    d = Driver(16, 4, order=order, max_overtakes=max_overtakes)
    d.submit("running", [1] * 40, 12)
    d.step()
    d.submit("head", [2] * 37, 4)
    for n in range(30):
        d.submit(f"small{n}", [3, n], 2)
        d.step()
        if d.outputs["head"]:
            break
    admitted = [a.request for plan in d.plans for a in plan.admissions]
    assert admitted.index("head") == 1 + max_overtakes
    d.run().assert_cold_equal()


def test_a_blocked_head_strands_nobody() -> None:
    """What waits behind it holds what it needs; both go on."""
    for order in Order:
        d = Driver(16, 4, order=order, flight=Flight.EXACT_FINISH)
        d.submit("leader", [1] * 20, 8)
        d.submit("parked", [1] * 20, 8)
        d.step()
        d.submit("head", [2] * 50, 8)
        d.submit("behind", [3] * 5, 3)
        d.run().assert_cold_equal()
        assert len(d.finish) == 4


def test_a_whole_prompt_must_fit_before_its_first_chunk_runs() -> None:
    """Two prompts of 12 pages in a pool of 20, two pages a chunk, no cache."""
    d = Driver(20, 4, prefix_cache=False, max_batched_tokens=8, max_running=8)
    for n in range(2):
        d.submit(f"r{n}", [n] * 45, 4)
    d.run().assert_cold_equal()
    count = d.kernel.counters
    assert count.retractions == 0
    assert count.computed_prompt_tokens + count.computed_output_tokens == 2 * 48


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("reserve", [0.0, 0.25, 0.5, 1.0])
def test_over_commit_computes_less_than_twice_what_is_needed_and_nobody_cycles(
    prefix_cache: bool, page: int, reserve: float
) -> None:
    """No request is retracted twice before another has finished."""
    d = Driver(
        160 // page, page, prefix_cache=prefix_cache, output_reserve=reserve, max_batched_tokens=32,
        max_running=12,
    )  # fmt: skip
    for n in range(24):
        d.submit(f"r{n}", [n + 3 * k for k in range(8)], 30)
    since: Counter[str] = Counter()
    while d.kernel.has_work:
        ended = len(d.finish)
        since.update(d.step().retracted)
        assert not since or max(since.values()) < 2
        if len(d.finish) > ended:
            since.clear()
    d.assert_cold_equal()
    count = d.kernel.counters
    ideal = sum(len(d.prompts[n]) + len(d.outputs[n]) - 1 for n in d.finish)
    assert count.computed_prompt_tokens + count.computed_output_tokens < 2 * ideal
    if reserve == 1.0:
        assert count.retractions == 0


def test_the_oldest_is_never_retracted_though_it_would_be_the_cheapest() -> None:
    """Somebody always finishes."""
    d = Driver(16, 4, output_reserve=0.0)
    d.submit("oldest", [1, 2, 3], 40)
    d.submit("younger", list(range(40)), 20)
    d.run().assert_cold_equal()
    assert {name for plan in d.plans for name in plan.retracted} == {"younger"}


# -- who keeps its pages --------------------------------------------------------------------------


@pytest.mark.parametrize("publication", Publication)
@pytest.mark.parametrize("flight", [Flight.NONE, Flight.COALESCED])
def test_pages_of_a_running_request_are_never_evicted(publication: Publication, flight: Flight) -> None:
    """A prompt in eight chunks, four others pressing."""
    d = Driver(40, 4, publication=publication, flight=flight, max_batched_tokens=16, max_running=5)
    d.submit("long", list(range(90)), 4)
    for n in range(4):
        d.submit(f"r{n}", [n] * 9, 30)
    pool = d.kernel._s.l1.pool
    while d.kernel.has_work:
        plan = d.plan()
        held = list(d.kernel._s.running)
        pages = [p for seq in held for p in seq.table]
        assert PageState.FREE not in {pool.state(p) for p in pages}
        assert all(seq.handle is not None and seq.handle.pins for seq in held)
        if plan.chunks:
            d.execute(plan)
    d.assert_cold_equal()


def test_a_prefix_under_evaluation_is_not_what_is_evicted_for_it() -> None:
    """The temporary pin: without it the admission would free the very pages it counts on."""
    d = Driver(10, 4)
    d.submit("warm", list(range(21)), 1)
    d.run()
    d.submit("other", [50] * 13, 1)
    d.run()
    d.submit("again", [*range(21), *[60] * 16], 3)
    d.run().assert_cold_equal()
    assert d.cached["again"] == 20


def test_a_blocked_admission_leaves_no_pin() -> None:
    d = Driver(16, 4)
    d.submit("warm", list(range(17)), 1)
    d.run()
    d.submit("running", [5] * 30, 16)
    d.step()
    d.submit("blocked", [*range(17), *[60] * 16], 6)
    for _ in range(3):
        d.step()
        protected = {p for seq in d.kernel._s.running for p in seq.table[: seq.shared]}
        assert d.kernel.status().l1.protected == len(protected)
        assert d.kernel.status().waiting == 1
    d.run().assert_cold_equal()


# -- leaving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("flight", Flight)
@pytest.mark.parametrize("in_flight", [True, False])
def test_an_abort_at_any_step_returns_everything(flight: Flight, in_flight: bool) -> None:
    for at in range(12):
        d = Driver(64, 4, flight=flight, max_batched_tokens=8, max_running=4)
        d.submit("a", list(range(30)), 4)
        d.submit("b", list(range(30)), 4)
        for _ in range(at):
            d.step()
        plan = d.plan() if in_flight and d.kernel.has_work else None
        for name in ("a", "b"):
            if name in d.kernel._s.sequences:
                d.abort(name)
        if plan is not None and plan.chunks:
            d.execute(plan)
        assert not d.kernel.has_work
        d.kernel.check()
        l1 = d.kernel.status().l1
        assert l1.free + l1.evictable == l1.total
        d.assert_cold_equal()


def test_an_abort_during_the_last_step_wins() -> None:
    d = Driver(64, 4)
    d.submit("a", [1, 2, 3], 1)
    plan = d.plan()
    d.abort("a")
    d.execute(plan)
    assert d.finish == {"a": Finish.ABORT}
    assert d.outputs["a"] == []


def test_an_unknown_or_ended_id_cannot_be_aborted() -> None:
    d = Driver(64, 4)
    d.submit("a", [1, 2, 3], 1)
    d.run()
    for name in ("a", "never"):
        with pytest.raises(ProtocolError, match="unknown or has ended"):
            d.kernel.abort(name, d.now)
    d.outputs.clear()
    d.finish.clear()
    d.submit("a", [1, 2, 3], 1)
    d.run()


def test_fifty_thousand_tiny_requests_leave_no_trace() -> None:
    """Objects of every kind stay flat."""
    kernel = Kernel(KernelConfig(total_pages=64, page_size=4, max_running=32))
    gone = 0

    def burst(first: int, count: int) -> None:
        nonlocal gone
        for n in range(first, first + count):
            salted = Request(f"r{n}", tk.encode([n % 90_000, 1, 2, 3, 4]), 1 + n % 2)
            kernel.submit(salted, 0.0)
            if n % 10 == 9:
                kernel.abort(f"r{n}", 0.0)
                gone += 1
            if n % 16 == 15:
                while kernel.has_work:
                    plan = kernel.plan(0.0)
                    outcome = StepOutcome(sampled={c.request: 7 for c in plan.chunks if c.samples})
                    gone += sum(p.finish is not None for p in kernel.commit(plan, outcome, 0.0))

    def alive() -> Counter[str]:
        gc.collect()
        kinds = (Node, Sequence, Request)
        return Counter(type(o).__name__ for o in gc.get_objects() if isinstance(o, kinds))

    burst(0, 4800)
    before = alive()
    burst(4800, 45_200)
    assert gone == 50_000
    kernel.check()
    assert alive()["Sequence"] == alive()["Request"] == 0
    assert alive()["Node"] <= before["Node"] + 2
    assert len(kernel._s.l1.tree._heap) <= 3 * 64 + 64
    assert kernel.status().waiting == kernel.status().running == 0


# -- the plan itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [5, 7, 16, 17, 100])
def test_decodes_come_first_and_chunks_end_on_page_boundaries(budget: int) -> None:
    d = Driver(200, 4, max_batched_tokens=budget, max_running=5)
    watch = PlanWatch(d)
    for n in range(3):
        d.submit(f"short{n}", [n], 40)
    for n in range(3):
        d.submit(f"long{n}", [n + 10 * k for k in range(50)], 3)
    while d.kernel.has_work:
        plan = d.plan()
        watch.planned(plan)
        first = True
        for chunk in (c for c in plan.chunks if c.prefill and len(c.tokens) > 4):
            whole = chunk.stop % 4 == 0 or chunk.samples
            assert whole or (first and chunk.stop - chunk.start < 4)
            first = False
        d.execute(plan)
        watch.committed(plan, ok=True)
    d.assert_cold_equal()


def test_equal_inputs_give_equal_plans() -> None:
    """Parity: nothing but requests, outcomes and the order of calls decides."""

    def plans(listener: bool) -> list[object]:
        events: list[object] = []
        d = Driver(24, 4, sink=events.append if listener else None, max_batched_tokens=24, output_reserve=0.0)
        for n in range(12):
            d.submit(f"r{n}", [n % 3] * (5 + n), 9)
            d.step()
            if n == 7:
                d.abort("r6")
            d.executor.fail_next = int(n == 9)
        d.run()
        assert bool(events) is listener
        return [d.plans, d.finish, d.outputs]

    assert plans(False) == plans(False)
    assert plans(True) == plans(False), "watching changes no decision"


def test_a_sink_that_fails_is_switched_off_and_nothing_else_happens() -> None:
    def broken(event: object) -> None:
        raise OSError("disk full")

    d = Driver(24, 4, sink=broken)
    d.submit("a", [1, 2, 3, 4, 5], 3)
    d.run().assert_cold_equal()
    assert d.kernel.sink_failure == "OSError: disk full"


def test_a_sink_is_told_only_of_the_kinds_it_wants() -> None:
    told: list[ev.Event] = []
    everything: list[ev.Event] = []
    for sink, kinds in ((told, {ev.Admitted, ev.Stepped}), (everything, None)):
        d = Driver(24, 4, sink=sink.append, kinds=kinds)
        d.submit("a", [1, 2, 3, 4, 5], 3)
        d.run().assert_cold_equal()
    assert {type(event) for event in everything} > {ev.Admitted, ev.Stepped}
    assert told == [event for event in everything if type(event) in (ev.Admitted, ev.Stepped)]


def test_no_token_leaves_by_the_events() -> None:
    """Lengths only: neither ids nor text."""
    events: list[object] = []
    d = Driver(12, 4, sink=events.append, output_reserve=0.0)
    secret = 77_777_777
    for n in range(4):
        d.submit(f"r{n}", [secret] * 9, 9, salt="hidden-salt")
    d.step()
    d.run()
    text = repr(events)
    assert {"Enqueued", "Admitted", "PrefillStarted", "PrefillDone", "FirstToken", "Finished", "Stepped"} <= {
        type(e).__name__ for e in events
    }
    assert str(secret) not in text
    assert "hidden-salt" not in text
    assert tk.encode([secret]) not in [v for e in events for v in vars_of(e)]


def vars_of(event: object) -> list[object]:
    return [getattr(event, name) for name in event.__dataclass_fields__]  # type: ignore[attr-defined]


def test_events_tell_each_requests_story_in_order_and_once() -> None:
    events: list[object] = []
    d = Driver(64, 4, sink=events.append, max_batched_tokens=16)
    d.submit("a", list(range(30)), 3)
    d.run()
    d.submit("b", list(range(30)), 3)
    d.run()
    story = [type(e).__name__ for e in events if getattr(e, "request", None) == "b"]
    assert [s for s in story if s != "Published"] == [
        "Enqueued", "Admitted", "PrefillStarted", "Prefilled", "PrefillDone", "FirstToken", "Finished",
    ]  # fmt: skip
    done = next(e for e in events if type(e).__name__ == "Finished" and e.request == "b")
    assert (done.cached, done.computed, done.outputs, done.retractions) == (28, 4, 3, 0)


def test_a_prefill_starts_with_its_first_chunk_also_where_admission_found_no_page() -> None:
    events: list[object] = []
    d = Driver(64, 4, sink=events.append, max_batched_tokens=16)
    grow = d.kernel._s.tables.grow
    d.kernel._s.tables.grow = lambda *_: False  # type: ignore[method-assign]
    d.submit("a", list(range(10)), 2)
    d.step()
    names = [type(e).__name__ for e in events]
    assert "Admitted" in names
    assert "PrefillStarted" not in names
    d.kernel._s.tables.grow = grow  # type: ignore[method-assign]
    d.run().assert_cold_equal()
    story = [type(e).__name__ for e in events if getattr(e, "request", None) == "a"]
    assert [s for s in story if s != "Published"] == [
        "Enqueued", "Admitted", "PrefillStarted", "Prefilled", "PrefillDone", "FirstToken", "Finished",
    ]  # fmt: skip


# -- sessions -------------------------------------------------------------------------------------


def test_a_hold_keeps_a_sessions_pages_until_its_time_is_up() -> None:
    d = Driver(16, 4, session_pages=16)
    d.submit("turn1", list(range(20)), 1, session="s", hold_s=50.0)
    d.run()
    assert d.kernel.status().l1.protected == 5
    d.submit("other", [50] * 40, 1)
    d.run()
    d.submit("turn2", [*range(20), 9], 1, session="s")
    d.run().assert_cold_equal()
    assert d.cached["turn2"] == 20
    d.now += 100
    d.step()
    assert d.kernel.status().l1.protected == 0


def test_a_stall_is_counted_told_and_names_the_request_that_is_tried_first() -> None:
    """No request can cause a stall, so this test takes the pages away behind the kernel's back."""
    told: list[ev.Event] = []
    kernel = Kernel(KernelConfig(total_pages=8, page_size=4), sink=told.append)
    for name, prompt in (("first", [1] * 9), ("second", [2] * 5)):
        kernel.submit(Request(name, tk.encode(prompt), 3), 0.0)
    kernel._s.l1.allocate(8)
    stall = kernel.plan(1.0).stall
    assert stall is not None
    assert (stall.head, stall.need, stall.free, stall.owned, stall.capacity) == ("first", 3, 0, 8, 8)
    assert (stall.evictable, stall.protected, kernel.counters.stalls) == (0, 0, 1)
    assert [event.stall for event in told if isinstance(event, ev.Stalled)] == [stall]


def test_holds_give_way_to_what_runs_and_to_what_waits() -> None:
    """They are a preference: never a stall, never work thrown away."""
    d = Driver(12, 4, session_pages=100, output_reserve=0.0)
    d.submit("held", list(range(20)), 1, session="s", hold_s=1e9)
    d.run()
    for n in range(2):
        d.submit(f"r{n}", [n + 30] * 5, 18)
    d.run().assert_cold_equal()
    assert d.kernel.counters.retractions == 0
    d.submit("held again", list(range(20)), 1, session="s", hold_s=1e9)
    d.run()
    d.submit("whole pool", [1] * 40, 9)
    d.run().assert_cold_equal()
    assert d.kernel.status().l1.protected == 0
