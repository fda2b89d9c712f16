"""Decodes: what a step in flight counts and loses if it is aborted or fails, and what a driver is told."""

from __future__ import annotations

import pytest

from hotprefix.errors import ProtocolError
from hotprefix.kernel import events as ev
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.plan import Finish, StepOutcome, Transcript
from tests.support.drive import Driver


def decoding(**config: object) -> Driver:
    """a (prompt of 5, pages of 4) and b (prompt of 9) have each said their first token."""
    d = Driver(page_size=4, **config)
    d.submit("a", list(range(5)), 20)
    d.submit("b", list(range(50, 59)), 20)
    d.step()
    return d


def unchecked(d: Driver, steps: int) -> None:
    """Steps that are given tokens instead of computing them."""
    for _ in range(steps):
        d.kernel.commit(d.kernel.plan(d.now), StepOutcome(sampled=dict.fromkeys("ab", 1)), d.now)


def test_an_abort_during_a_step_that_fails_ends_the_request_once() -> None:
    d = decoding()
    plan = d.plan()
    assert len(plan.chunks) == 2
    d.abort("a")
    d.executor.fail_next = 1
    d.execute(plan)
    assert d.finish == {"a": Finish.ABORT}
    assert d.computed["a"] == 5
    d.run()
    assert d.finish == {"a": Finish.ABORT, "b": Finish.LENGTH}
    d.assert_cold_equal()


def test_an_abort_during_a_step_counts_its_position_and_no_token() -> None:
    d = decoding()
    plan = d.plan()
    d.abort("a")
    d.execute(plan)
    assert (d.finish, d.computed["a"], len(d.outputs["a"])) == ({"a": Finish.ABORT}, 6, 1)


def test_progress_of_plain_tokens_can_be_left_out() -> None:
    d = decoding()
    d.submit("c", [7, 8, 9], 3)
    told = []
    while d.kernel.has_work:
        plan = d.plan()
        outcome = d.executor.run(plan)
        d.now += 1
        told += [(d.now, p.request, p.finish) for p in d.kernel.commit(plan, outcome, d.now, every=False)]
    # First tokens and ends; a and b cross pages in between.
    assert told == [
        (2, "c", None), (4, "c", Finish.LENGTH), (20, "a", Finish.LENGTH), (20, "b", Finish.LENGTH),
    ]  # fmt: skip


def test_progress_of_a_running_request_is_up_to_date() -> None:
    d = decoding()
    unchecked(d, 1)
    now = d.kernel.progress("a")
    assert (now.computed, now.outputs) == (6, 2)


def test_a_transcript_gives_what_it_is_asked_for() -> None:
    d = Driver(page_size=4)
    d.submit("a", [1], 2)
    plan = d.plan()
    with pytest.raises(ProtocolError, match="1 tokens from 0 on, not 2"):
        d.kernel.commit(plan, StepOutcome(sampled=Transcript(lambda *_: tk.encode([1, 2]))), 0.0)


def test_a_failed_step_loses_all_that_was_computed() -> None:
    events: list[ev.Event] = []
    d = decoding(sink=events.append)
    unchecked(d, 1)
    d.kernel.commit(d.kernel.plan(d.now), StepOutcome(ok=False), d.now)
    assert [(e.request, e.lost) for e in events if isinstance(e, ev.Retracted)] == [("a", 6), ("b", 10)]


@pytest.mark.parametrize("failed", [False, True])
def test_an_abort_during_repeats_publishes_no_position_whose_token_is_unknown(failed: bool) -> None:
    """The step could complete a page, but only the first of its positions has a known token."""
    d = Driver(page_size=4)
    d.submit("a", [1, 2, 3, 4], 20)
    d.step()
    plan = d.plan()
    assert plan.repeat == 4
    if not failed:
        d.kernel.abort("a", d.now)
    outcome = StepOutcome(
        sampled={"a": tk.encode([9] * 4)}, repeats=4, failed={"a": "no token"} if failed else {}
    )
    [progress] = d.kernel.commit(plan, outcome, d.now)
    assert (progress.finish, progress.computed) == (Finish.ERROR if failed else Finish.ABORT, 8)
    d.kernel.check()
    assert [(tk.count(n.key), n.pages) for n in d.kernel._s.l1.tree.walk_nodes()] == [(4, [0])]


def test_a_plan_may_be_repeated_to_the_end_of_a_page() -> None:
    d = decoding()
    assert [d.step().repeat for _ in range(6)] == [3, 2, 1, 4, 3, 2]
