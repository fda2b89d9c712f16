"""What was predicted of restores, prefills and fetches, beside what happened."""

from __future__ import annotations

import dataclasses

import pytest

from hotprefix.kernel.config import Prefetch
from hotprefix.kernel.plan import StepOutcome, StepPlan
from hotprefix.kernel.sched.commit import MIN_PREFILL
from hotprefix.kernel.state.estimates import WEIGHT, Estimates
from tests.support.drive import Driver
from tests.unit.test_tiers import LONG, evict_all, tiered


def measured(d: Driver, seconds: float) -> list[int]:
    """Restores take so many seconds each page from now on; returns how many pages each step's restores
    had."""
    run, restored = d.executor.run, []

    def run_and_measure(plan: StepPlan, *args: object) -> StepOutcome:
        outcome = run(plan, *args)  # type: ignore[arg-type]
        if plan.restores:
            restored.append(len(plan.restores))
        return outcome._replace(restore_s=seconds * len(plan.restores))

    d.executor.run = run_and_measure  # type: ignore[method-assign]
    return restored


def test_a_restore_is_compared_with_its_prediction_and_the_prefill_it_avoided_is_named() -> None:
    d = tiered(host=400, storage=False, restore_s_per_page=0.25, compute_s_per_token=0.5)
    seen = d.kernel.predictions
    assert seen is not None
    restored = measured(d, 0.75)
    d.submit("warm", LONG, 1)
    d.run()
    avoided, rate, predicted = 0.0, 0.25, 0.0
    for turn in range(3):
        d.submit(f"evictor{turn}", [95] * (40 * 4 - 1), 1, salt=f"{turn}")
        d.run()
        price = d.kernel._s.tiers.estimates.compute.seconds  # type: ignore[union-attr]
        d.submit(f"again{turn}", LONG, 1)
        d.run()
        assert restored[turn] == 10
        avoided += price * 40  # type: ignore[operator]
        predicted += rate * 10
        rate += WEIGHT * (0.75 - rate)
    assert (seen.restore.times, seen.restored, seen.refused) == (3, 3, 0)
    assert seen.restore.observed_s == pytest.approx(3 * 7.5)
    assert seen.restore.predicted_s == pytest.approx(predicted)
    assert seen.restore.error_s == pytest.approx(3 * 7.5 - predicted), "each was predicted too short"
    assert seen.restored_s == pytest.approx(avoided)


def test_a_restore_that_is_refused_is_counted_and_never_observed() -> None:
    d = tiered(storage=False, host=400, restore_s_per_page=9.0, compute_s_per_token=0.5)
    restored = measured(d, 1.0)
    d.submit("warm", LONG, 1)
    d.run()
    evict_all(d)
    d.submit("again", LONG, 1)
    d.run()
    seen = d.kernel.predictions
    assert seen is not None
    assert not restored
    assert (seen.refused, seen.restored, seen.restore.times) == (1, 0, 0)


def test_prefill_is_compared_where_a_step_tells_its_price() -> None:
    d = tiered(pages=80, storage=False, compute_s_per_token=0.5)
    seen = d.kernel.predictions
    assert seen is not None
    d.submit("short", list(range(MIN_PREFILL - 1)), 1)
    d.run()
    assert seen.prefill.times == 0
    d.submit("long", list(range(200, 200 + MIN_PREFILL)), 1, salt="x")
    d.run()
    assert seen.prefill == dataclasses.replace(
        seen.prefill, times=1, observed_s=1.0, predicted_s=0.5 * MIN_PREFILL,
        error_s=abs(0.5 * MIN_PREFILL - 1.0),
    )  # fmt: skip


def test_what_was_unknown_or_not_measured_is_in_no_sum() -> None:
    estimates = Estimates(None, None, None)
    estimates.restored(2.0, 4)  # nothing was predicted yet
    estimates.restored(0.0, 4)  # nobody measured
    estimates.fetched(3.0, 0)  # nothing came
    estimates.begun(4, 4)  # what computing costs is not known
    assert estimates.seen == Estimates(None, None, None).seen
    estimates.fetched(3.0, 3)
    estimates.fetched(3.0, 2)
    assert (estimates.seen.fetch.times, estimates.seen.fetch.predicted_s) == (1, 2.0)
    assert estimates.seen.fetch.error_s == 1.0


def test_without_an_l2_there_is_nothing_to_predict() -> None:
    assert Driver(16, 4).kernel.predictions is None
    assert tiered(prefetch=Prefetch.BEST_EFFORT).kernel.predictions is not None
