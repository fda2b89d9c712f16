"""The breaker: opens after failures in a row, lets exactly one probe through, closes on its success."""

from __future__ import annotations

from hotprefix.engine.stores.breaker import Breaker, BreakerConfig, BreakerState


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker(BreakerConfig(failures=3, open_s=5.0))
    for _ in range(3):
        assert breaker.enter(at)
        breaker.failure(at)
    return breaker


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(BreakerConfig(failures=3, open_s=5.0))
    for _ in range(5):
        breaker.failure(0.0)
        breaker.failure(0.0)
        breaker.success()
    assert breaker.state is BreakerState.CLOSED
    assert opened().state is BreakerState.OPEN


def test_refuses_until_the_time_is_over_then_lets_one_probe_through() -> None:
    breaker = opened(at=10.0)
    assert not breaker.enter(14.9)
    assert not breaker.refuses(15.0)
    assert breaker.enter(15.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.refuses(15.0)
    assert not breaker.enter(99.0)


def test_the_probes_outcome_decides() -> None:
    breaker = opened(at=0.0)
    assert breaker.enter(5.0)
    breaker.failure(6.0)
    assert breaker.state is BreakerState.OPEN
    assert breaker.opened == 2
    assert not breaker.enter(10.9)
    assert breaker.enter(11.0)
    breaker.success()
    assert breaker.state is BreakerState.CLOSED


def test_one_failure_after_closing_does_not_open_again() -> None:
    breaker = opened()
    assert breaker.enter(5.0)
    breaker.success()
    breaker.failure(5.0)
    assert breaker.state is BreakerState.CLOSED


def test_success_of_a_call_begun_before_opening_does_not_close() -> None:
    breaker = opened()
    breaker.success()
    assert breaker.state is BreakerState.OPEN


def test_looking_changes_nothing() -> None:
    breaker = opened()
    for now in (1.0, 5.0, 50.0):
        breaker.refuses(now)
    assert breaker.state is BreakerState.OPEN


def test_a_probe_that_proves_nothing_leaves_the_way_to_the_next() -> None:
    breaker = opened(at=0.0)
    assert breaker.enter(5.0)
    assert not breaker.enter(5.0)
    breaker.nothing()
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.enter(5.0)
    assert not breaker.enter(5.0)
    breaker.success()
    assert breaker.state is BreakerState.CLOSED
