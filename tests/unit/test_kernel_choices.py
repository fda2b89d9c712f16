"""Choices of the planner that change no output and so need tests of their own: which running request gives
way, and how far past a head that does not fit the queue is tried."""

from __future__ import annotations

import pytest

from hotprefix.kernel.config import Flight, Order, Publication
from tests.support.drive import Driver


def retracted_first(d: Driver) -> str:
    """The first request that any plan of a run retracts."""
    d.run().assert_cold_equal()
    return next(name for plan in d.plans for name in plan.retracted)


def test_the_request_with_least_to_compute_again_gives_way() -> None:
    """Three equal requests but for their length; the shortest is neither the oldest nor the latest."""
    d = Driver(16, 4, output_reserve=0.0, prefix_cache=False)
    for name, length in (("oldest", 16), ("short", 4), ("latest", 20)):
        d.submit(name, [len(name)] * length, 20)
    assert retracted_first(d) == "short"


def test_of_equal_ones_the_latest_gives_way() -> None:
    d = Driver(16, 4, output_reserve=0.0, prefix_cache=False)
    for n in range(3):
        d.submit(f"r{n}", [n] * 12, 20)
    assert retracted_first(d) == "r2"


def test_the_least_important_gives_way_whatever_it_has_computed() -> None:
    d = Driver(16, 4, output_reserve=0.0, prefix_cache=False, order=Order.PRIORITY)
    for name, length, priority in (("oldest", 12, 1), ("long", 20, 2), ("short", 4, 1)):
        d.submit(name, [len(name)] * length, 20, priority=priority)
    assert retracted_first(d) == "long"


def test_the_oldest_never_gives_way() -> None:
    """It has the least to compute again, and would be the cheapest."""
    d = Driver(16, 4, output_reserve=0.0, prefix_cache=False)
    for name, length in (("oldest", 4), ("second", 16), ("latest", 16)):
        d.submit(name, [len(name)] * length, 20)
    d.run().assert_cold_equal()
    gave_way = {name for plan in d.plans for name in plan.retracted}
    assert gave_way
    assert "oldest" not in gave_way


def test_one_that_gave_way_before_is_spared_while_another_was_not() -> None:
    """`short` has the least to compute again, and would be the cheapest if it had not given way before."""
    d = Driver(16, 4, output_reserve=0.0, prefix_cache=False)
    for name, length in (("oldest", 16), ("short", 4), ("latest", 20)):
        d.submit(name, [len(name)] * length, 20)
    d.step()
    d.kernel._s.sequences["short"].retractions = 1
    assert retracted_first(d) == "latest"


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("beyond", [0, 1])
def test_exactly_as_many_are_tried_behind_a_head_that_does_not_fit(lookahead: int, beyond: int) -> None:
    """The pool has 12 pages of which `runs` keeps 6. The head and those behind it
    need 8. The last needs 1: it is the `lookahead`th behind the head (tried), or one further (not tried)."""
    d = Driver(
        12, 4, lookahead=lookahead, prefix_cache=False, flight=Flight.NONE, publication=Publication.FINISH,
        output_reserve=1.0,
    )  # fmt: skip
    d.submit("runs", [1] * 16, 9)
    d.step()
    d.submit("head", [2] * 28, 4)
    large = max(0, lookahead - 1 + beyond)
    for n in range(large):
        d.submit(f"large{n}", [3 + n] * 28, 4)
    d.submit("small", [99] * 3, 2)
    started = [admission.request for admission in d.step().admissions]
    assert started == (["small"] if beyond == 0 and lookahead > 0 else [])
    d.run().assert_cold_equal()
