"""Order `priority` and preemption: who gives way, and that nobody does for nothing."""

from __future__ import annotations

import pytest

from hotprefix.kernel.config import Capabilities, Order
from tests.support.drive import Driver
from tests.support.watch import PlanWatch


def driver(total_pages: int = 64, **config: object) -> Driver:
    return Driver(total_pages, 4, order=Order.PRIORITY, **{"preemption": True, **config})


def first_token_step(d: Driver, name: str, limit: int = 200) -> int:
    for n in range(1, limit):
        d.step()
        if d.outputs[name]:
            return n
    raise AssertionError(f"{name} never started")


def test_an_important_request_starts_within_one_step_though_all_slots_are_taken() -> None:
    d = driver(max_running=2)
    for n in range(2):
        d.submit(f"low{n}", [n, 1, 2, 3, 4], 40, priority=5)
    for _ in range(3):
        d.step()
    d.submit("high", [9, 9, 9], 4, priority=0)
    assert first_token_step(d, "high") == 1
    assert d.kernel.counters.retractions == 1
    d.run().assert_cold_equal()


def test_without_preemption_it_waits_for_a_slot() -> None:
    d = driver(max_running=1, preemption=False)
    d.submit("low", [1, 2, 3, 4, 5], 10, priority=5)
    d.step()
    d.submit("high", [9, 9, 9], 4, priority=0)
    d.run().assert_cold_equal()
    assert d.kernel.counters.retractions == 0


def test_equal_priorities_never_swap() -> None:
    d = driver(12, max_running=2)
    for n in range(6):
        d.submit(f"r{n}", [n, 1, 2, 3, 4], 12, priority=3)
    d.run().assert_cold_equal()
    assert d.kernel.counters.retractions == 0
    assert list(d.finish) == sorted(d.finish)


def test_an_important_request_does_not_wait_for_the_budget_of_a_long_unimportant_prefill() -> None:
    d = driver(max_batched_tokens=16)
    d.submit("low", list(range(90)) * 2, 2, priority=5)
    d.step()
    d.submit("high", [9, 9, 9, 9, 9], 3, priority=0)
    assert first_token_step(d, "high") == 1
    assert d.kernel.counters.retractions == 0
    d.run().assert_cold_equal()


def test_running_prefills_go_on_in_order_of_importance() -> None:
    d = driver(max_batched_tokens=16, preemption=False)
    d.submit("low", list(range(40)), 1, priority=5)
    d.submit("tiny", [1], 8, priority=5)
    d.step()
    d.step()
    d.submit("high", list(range(50, 90)), 1, priority=0)
    d.run().assert_cold_equal()
    assert next(iter(d.finish)) == "low", "it was running; the important one waited for budget"


def test_nobody_is_preempted_for_a_request_that_would_not_fit_even_then() -> None:
    """Otherwise the victims are admitted again at once and preempted again in every step."""
    d = driver(16, max_running=4)
    d.submit("top", list(range(30)), 20, priority=0)
    for _ in range(2):
        d.step()
    d.submit("low", [50, 51, 52, 53, 54], 12, priority=9)
    d.step()
    d.submit("mid", list(range(60, 90)), 8, priority=1)
    for _ in range(5):
        d.step()
    assert d.kernel.counters.retractions == 0
    d.run().assert_cold_equal()


@pytest.mark.parametrize(("shared", "victims"), [(0, 2), (12, 1), (16, 0)])
def test_no_more_are_preempted_than_needed(shared: int, victims: int) -> None:
    """A prefix the important request shares with those that stay counts as there already."""
    d = driver(20, max_running=8, output_reserve=1.0)
    document = list(range(24))
    d.submit("stays", document, 9, priority=0)
    d.step()
    for n in range(3):
        d.submit(f"low{n}", [70 + n, 2, 3, 4], 9, priority=5)
    d.step()
    d.submit("high", document[:shared] + [95] * (25 - shared), 4, priority=0)
    assert first_token_step(d, "high") == 1
    assert d.kernel.counters.retractions == victims
    d.run().assert_cold_equal()


def test_preemption_does_not_cycle() -> None:
    """Every preempted request ends, and what is computed again stays below what had to be computed."""
    d = driver(24, max_running=4, max_batched_tokens=16)
    for n in range(24):
        d.submit(f"r{n}", [n, 5, 6, 7, 8, 9], 14, priority=n % 3)
        d.step()
    d.run().assert_cold_equal()
    c = d.kernel.counters
    assert c.recomputed_tokens < c.computed_prompt_tokens + c.computed_output_tokens - c.recomputed_tokens


@pytest.mark.parametrize("same_step", [True, False])
@pytest.mark.parametrize("budget", [3, 5, 10])
def test_a_request_that_is_overtaken_takes_over_the_pages_of_the_one_ahead(
    same_step: bool, budget: int
) -> None:
    """An important request with the same prompt goes ahead: what the other then finds is used, the page it
    had begun is replaced in its table, freed, and the executor is told."""
    d = driver(max_batched_tokens=budget, max_running=2, capabilities=Capabilities(same_step))
    watch = PlanWatch(d, Capabilities(same_step))
    prompt = list(range(40))
    d.submit("begun", prompt, 3, priority=5)
    while d.kernel.has_work:
        plan = d.plan()
        watch.planned(plan)
        d.execute(plan)
        watch.committed(plan, ok=True)
        if "ahead" not in d.prompts:
            d.submit("ahead", prompt, 3, priority=0)
    d.assert_cold_equal()
    assert d.cached["begun"] >= 36 - budget


@pytest.mark.parametrize("same_step", [True, False])
def test_a_running_prefill_pauses_where_it_may_not_read_what_this_step_computes(same_step: bool) -> None:
    d = driver(max_batched_tokens=24, capabilities=Capabilities(same_step))
    prompt = list(range(40))
    d.submit("overtaken", prompt, 3, priority=5)
    d.step()
    d.submit("ahead", prompt[:30], 3, priority=0)
    chunks = [(c.request, c.start, c.stop) for c in d.step().chunks]
    assert chunks == [("ahead", 24, 30), ("overtaken", 28, 40)][: 1 + same_step]
    d.run().assert_cold_equal()
    assert d.cached == {"overtaken": 4, "ahead": 24}
