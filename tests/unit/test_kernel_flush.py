"""After a flush nobody finds what was computed before it, also by requests that were running."""

from __future__ import annotations

import pytest

from hotprefix.kernel.config import Flight, Publication, TierConfig, Write
from hotprefix.kernel.plan import Finish
from tests.support.drive import Driver
from tests.support.watch import FlushWatch

PROMPT = list(range(1, 41))


@pytest.mark.parametrize("publication", list(Publication))
@pytest.mark.parametrize("flight", list(Flight))
@pytest.mark.parametrize("steps", [0, 1, 2, 5, 20])
def test_what_a_running_request_had_computed_is_not_found_later(
    publication: Publication, flight: Flight, steps: int
) -> None:
    d = Driver(64, 4, publication=publication, flight=flight, max_batched_tokens=16)
    watch = FlushWatch(d)
    d.submit("runs", PROMPT, 12)
    for _ in range(steps):
        watch.planned(d.step())
    d.kernel.flush(d.now)
    watch.flushed()
    while "runs" not in d.finish:
        watch.planned(d.step())
    assert (d.kernel.status().l1.owned, d.kernel.status().l1.protected) == (0, 0)
    d.submit("later", PROMPT, 4)
    d.run().assert_cold_equal()
    assert d.cached["later"] == (0 if steps else 36)
    d.submit("again", PROMPT, 4)
    d.run().assert_cold_equal()
    assert d.cached["again"] == 36


@pytest.mark.parametrize("write", list(Write))
@pytest.mark.parametrize("in_flight", [False, True])
def test_nor_in_l2(write: Write, in_flight: bool) -> None:
    tiers = TierConfig(pages=64, write=write, min_restore_pages=1)
    d = Driver(64, 4, tiers=tiers, max_batched_tokens=16)
    d.submit("runs", PROMPT, 12)
    for _ in range(3):
        d.step()
    plan = d.plan() if in_flight else None
    d.kernel.flush(d.now)
    if plan is not None:
        d.execute(plan)
    d.run()
    d.submit("evictor", [95] * 200, 1, salt="other")
    d.run()
    d.submit("later", PROMPT, 4)
    d.run().assert_cold_equal()
    assert (d.cached["later"], d.sources["later"]) == (0, (0, 0, 0))


def test_a_flush_while_its_step_is_in_flight_or_fails() -> None:
    for fails in (False, True):
        d = Driver(64, 4, max_batched_tokens=16)
        d.submit("runs", PROMPT, 6)
        d.step()
        plan = d.plan()
        d.kernel.flush(d.now)
        d.executor.fail_next = int(fails)
        d.execute(plan)
        if not fails:
            assert d.kernel.status().l1.evictable == 0
        d.submit("later", PROMPT, 6)
        d.run().assert_cold_equal()
        assert d.cached["later"] == (0 if not fails else d.cached["later"])


def test_what_is_retracted_after_a_flush_is_shared_again() -> None:
    d = Driver(16, 4, max_batched_tokens=64, output_reserve=0.0)
    d.submit("old", PROMPT[:12], 30)
    d.step()
    d.kernel.flush(d.now)
    d.submit("new", [77] * 12, 30)
    d.run().assert_cold_equal()
    assert d.kernel.counters.retractions
    assert set(d.finish.values()) == {Finish.LENGTH}


def test_pages_that_nobody_finds_go_first() -> None:
    """They are the most recent ones, and of no use to anybody."""
    d = Driver(24, 4, max_batched_tokens=64)
    d.submit("old", PROMPT, 3)
    d.step()
    d.kernel.flush(d.now)
    d.submit("wanted", [60 + n for n in range(40)], 2)
    d.run()
    d.submit("evictor", [95] * 40, 2)
    d.run()
    d.submit("again", [60 + n for n in range(40)], 2)
    d.run().assert_cold_equal()
    assert d.cached["again"] == 36
