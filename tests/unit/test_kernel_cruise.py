"""Decodes inside a page: who cruises when, and what ends it (`kernel/sched/cruise.py`). That nothing else
changes by it is for `tests/property/test_cruise.py`."""

from __future__ import annotations

import pytest

from hotprefix.errors import ProtocolError
from hotprefix.kernel import events as ev
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.plan import Chunk, Finish, StepOutcome, Transcript
from tests.support.drive import Driver


def decoding(**config: object) -> Driver:
    """a (prompt of 5, pages of 4) and b (prompt of 9) have each said their first token."""
    d = Driver(page_size=4, **config)
    d.submit("a", list(range(5)), 20)
    d.submit("b", list(range(50, 59)), 20)
    d.step()
    return d


def unchecked(d: Driver, steps: int) -> None:
    """Steps without `Kernel.check`, which brings all up to date."""
    for _ in range(steps):
        d.kernel.commit(d.kernel.plan(d.now), StepOutcome(sampled=dict.fromkeys("ab", 1)), d.now)


def test_only_the_ends_of_a_page_are_written_out() -> None:
    d = decoding()
    seen = [(d.step().chunks, d.now)[0] for _ in range(8)]
    # Both are at position 1 of a page: two positions inside, one that completes it, one that needs the next.
    assert [(c.inside, len(c.written)) for c in seen] == [(2, 0), (2, 0), (0, 2), (0, 2)] * 2
    assert [c.reach for c in seen[:2]] == [5 + 9, 6 + 10]
    d.run()
    d.assert_cold_equal()


def test_a_chunk_that_was_not_written_out_says_the_same_later() -> None:
    d = decoding()
    plan = d.plan()
    d.execute(plan)
    again = decoding()
    late = again.plan()
    told = {r: d.outputs[r][1] for r in "ab"}
    again.now += 1
    again.kernel.commit(late, StepOutcome(sampled=told), again.now)
    for _ in range(9):
        later = again.kernel.plan(again.now)
        again.kernel.commit(later, StepOutcome(sampled=dict.fromkeys("ab", 1)), again.now)
    first = {r: tk.word(d.outputs[r][0]) for r in "ab"}
    assert (
        late.chunks
        == plan.chunks
        == (
            Chunk("a", 0, 5, first["a"], 2, (), True, False),
            Chunk("b", 1, 9, first["b"], 3, (), True, False),
        )
    )


def test_an_abort_during_a_step_that_fails_ends_the_request_once() -> None:
    d = decoding()
    plan = d.plan()
    assert plan.chunks.inside == 2
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


def test_whoever_asks_for_the_running_batch_finds_it_up_to_date() -> None:
    d = decoding()
    unchecked(d, 1)
    assert [(q.computed, q.length, q.outputs) for q in d.kernel._s.running] == [(6, 7, 2), (10, 11, 2)]


def test_a_failed_step_loses_all_that_was_computed() -> None:
    events: list[ev.Event] = []
    d = decoding(sink=events.append)
    unchecked(d, 1)
    d.kernel.commit(d.kernel.plan(d.now), StepOutcome(ok=False), d.now)
    assert [(e.request, e.lost) for e in events if isinstance(e, ev.Retracted)] == [("a", 6), ("b", 10)]
