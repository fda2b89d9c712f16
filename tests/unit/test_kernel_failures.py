"""Failed steps, and what is aborted or ends around them: no page lost, no request forgotten or starved."""

from __future__ import annotations

import pytest

from hotprefix.errors import ProtocolError
from hotprefix.kernel.config import Capabilities, Flight, Order, Publication
from hotprefix.kernel.plan import Finish, StepOutcome
from tests.support.drive import Driver
from tests.support.fake import cold_run

A = list(range(40, 57))


def fail(d: Driver, times: int = 1) -> None:
    for _ in range(times):
        d.executor.fail_next = 1
        d.step()


@pytest.mark.parametrize("publication", Publication)
@pytest.mark.parametrize("flight", Flight)
@pytest.mark.parametrize("same_step", [True, False])
def test_pages_of_a_failed_step_are_never_hit(
    publication: Publication, flight: Flight, same_step: bool
) -> None:
    """What is visible from planning on is taken back when the step does not run."""
    d = Driver(64, 4, Capabilities(same_step), publication=publication, flight=flight, max_batched_tokens=16)
    for n in range(4):
        d.submit(f"r{n}", [*A, n], 4)
    fail(d)
    assert d.kernel.status().l1.free == 64
    d.submit("late", A, 4)
    d.run()
    d.assert_cold_equal()
    assert all(f is Finish.LENGTH for f in d.finish.values())


def test_an_abort_between_plan_and_commit_leaves_nothing_half_written() -> None:
    """The same if the request itself goes."""
    for ok in (True, False):
        d = Driver(64, 4)
        d.submit("a", A, 4)
        plan = d.plan()
        d.abort("a")
        assert "a" in d.kernel._s.sequences, "its step is still in flight"
        d.executor.fail_next = int(not ok)
        d.execute(plan)
        assert d.finish == {"a": Finish.ABORT}
        d.submit("b", A, 4)
        d.run()
        d.assert_cold_equal()
        assert d.cached["b"] == (16 if ok else 0)


def test_a_request_that_always_fails_ends_and_harms_nobody() -> None:
    d = Driver(64, 4, max_step_failures=2)
    for n in range(3):
        d.submit(f"r{n}", [*A, n], 3)
    while d.kernel.has_work:
        plan = d.plan()
        d.executor.fail_next = int(any(c.request == "r1" for c in plan.chunks))
        d.execute(plan)
    assert d.finish == {"r0": Finish.LENGTH, "r1": Finish.ERROR, "r2": Finish.LENGTH}
    d.assert_cold_equal()


@pytest.mark.parametrize("after", range(7))
def test_a_request_without_a_token_ends_and_the_step_is_good_for_the_others(after: int) -> None:
    """after: tokens it has said before; with pages of 4 that is its prefill, inside a page and at an edge."""
    d = Driver(64, 4, Capabilities(True))
    for n in range(3):
        d.submit(f"r{n}", [*A, n], 8)
    while len(d.outputs["r1"]) < after:
        d.step()
    said = {name: len(d.outputs[name]) for name in ("r0", "r2")}
    d.executor.unsampled = {"r1"}
    d.step()
    assert d.finish == {"r1": Finish.ERROR}
    assert {name: len(d.outputs[name]) for name in said} == {n: c + 1 for n, c in said.items()}
    steps = d.kernel.counters.steps
    d.run()
    assert d.finish == {"r0": Finish.LENGTH, "r1": Finish.ERROR, "r2": Finish.LENGTH}
    assert len(d.outputs["r1"]) == after
    d.assert_cold_equal()
    count = d.kernel.counters
    assert (count.failed_steps, count.retractions, count.recomputed_tokens) == (0, 0, 0)
    assert (count.failed, count.finished, count.steps - steps) == (1, 2, 7 - after)
    # What it has computed is as good as anybody's.
    d.submit("next", d.prompts["r1"] + d.outputs["r1"], 2)
    d.run()
    d.assert_cold_equal()
    assert d.cached["next"] == (17 + after) // 4 * 4


def test_a_request_without_a_token_that_was_aborted_is_aborted() -> None:
    d = Driver(64, 4)
    d.submit("a", A, 4)
    plan = d.plan()
    d.abort("a")
    d.executor.unsampled = {"a"}
    d.execute(plan)
    assert d.finish == {"a": Finish.ABORT}


def test_a_step_has_a_token_or_a_reason_for_each_request_that_samples() -> None:
    d = Driver(64, 4)
    d.submit("a", A, 4)
    plan = d.plan()
    with pytest.raises(ProtocolError, match="no sampled token for a"):
        d.kernel.commit(plan, StepOutcome(failed={"b": "what"}), 1.0)


def test_after_a_failure_its_requests_run_alone_until_past_it() -> None:
    d = Driver(64, 4)
    d.submit("a", A, 3)
    d.submit("b", [9, 8, 7], 3)
    fail(d)
    together = [{c.request for c in d.step().chunks} for _ in range(3)]
    assert together == [{"a"}, {"b"}, {"a", "b"}]
    d.run().assert_cold_equal()


def test_pages_of_an_aborted_bystander_survive_a_failed_step_that_computes_the_same() -> None:
    """While a suspect runs alone, a bystander that holds the same tokens unpublished is aborted. Its pages
    must neither hang below the planned ones nor be given up for them."""
    d = Driver(16, 4, publication=Publication.FINISH)
    prompt = list(range(10))
    d.submit("bystander", prompt, 40)
    d.submit("other", [90, 91, 92, 93], 16)
    for _ in range(2):
        d.step()
    d.submit("suspect", prompt + cold_run(prompt, 20), 12)
    fail(d)
    plan = d.plan()
    while {c.request for c in plan.chunks} != {"suspect"}:
        d.execute(plan)
        plan = d.plan()
    assert "bystander" not in d.finish
    assert len(d.outputs["bystander"]) > 10, "it holds pages of its own that the suspect plans now"
    d.abort("bystander")
    d.executor.fail_next = 1
    d.execute(plan)
    d.run().assert_cold_equal()
    assert d.kernel.status().l1.protected == 0


def test_one_that_took_over_planned_pages_but_got_no_chunk_loses_them_with_the_step() -> None:
    d = Driver(64, 4, order=Order.PRIORITY, preemption=True, max_batched_tokens=10, max_running=2)
    d.submit("overtaken", list(range(40)), 3, priority=5)
    d.step()
    d.submit("ahead", list(range(40)), 3, priority=0)
    plan = d.plan()
    assert [c.request for c in plan.chunks] == ["ahead"]
    assert d.kernel.status().running == 2
    d.executor.fail_next = 1
    d.execute(plan)
    assert d.kernel.status().running == 0
    d.run().assert_cold_equal()


def test_a_suspect_that_finds_no_room_is_not_overtaken_for_ever() -> None:
    """Small new arrivals must not keep a large suspect out."""
    d = Driver(16, 4, max_overtakes=3, prefix_cache=False)
    for n in range(2):
        d.submit(f"small{n}", [50 + n, 3, 4], 6)
    d.submit("large", list(range(44)), 8)
    fail(d)
    for n in range(2, 60):
        d.submit(f"small{n}", [50, n, 4], 6)
        d.step()
        if d.outputs["large"]:
            break
    assert n < 20, "admitted once three had overtaken it and those running had ended"
    d.run().assert_cold_equal()


def test_a_commit_without_a_sampled_token_changes_nothing() -> None:
    d = Driver(64, 4)
    d.submit("a", A, 2)
    plan = d.plan()
    before = d.kernel.status()
    with pytest.raises(ProtocolError, match="no sampled token for a"):
        d.kernel.commit(plan, StepOutcome(), d.now)
    assert d.kernel.status() == before
    d.execute(plan)
    d.run().assert_cold_equal()


def test_call_order_is_enforced() -> None:
    d = Driver(64, 4)
    d.submit("a", A, 2)
    plan = d.plan()
    with pytest.raises(ProtocolError, match="not committed yet"):
        d.kernel.plan(d.now)
    with pytest.raises(ProtocolError, match="back to"):
        d.kernel.plan(d.now - 1)
    d.execute(plan)
    with pytest.raises(ProtocolError, match="not the one in flight"):
        d.kernel.commit(plan, StepOutcome(), d.now)


def test_failed_steps_leave_nothing_behind_in_the_heap() -> None:
    d = Driver(64, 4, max_step_failures=10_000, max_batched_tokens=16)
    d.submit("a", A, 2)
    fail(d, 300)
    assert len(d.kernel._s.l1.tree._heap) <= 64 + 2
    assert d.kernel.counters.indexed_pages == 0
    d.run().assert_cold_equal()
