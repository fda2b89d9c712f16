"""Numbered events of one worker, put in order: what is done at each batch."""

from __future__ import annotations

from hotprefix.fleet.event_order import EventOrder, Todo
from hotprefix.fleet.records import Batch


def batch(number: int, made: float | None = None) -> Batch:
    return Batch(number, (), made)


def numbers(todo: Todo) -> list[int]:
    return [b.number for b in todo.apply]


def order(upto: int = 0, limit: int = 100) -> EventOrder:
    """One that has applied batches 0 to upto - 1; batch n is made at n seconds."""
    made = EventOrder(limit)
    for number in range(upto):
        assert made.live(batch(number, float(number))) == Todo((batch(number, float(number)),))
    return made


def test_what_was_missed_comes_first_then_what_was_held_and_each_once() -> None:
    """`llm-d-router#1737`: batches 4 to 6 are lost, and the replay overlaps the live ones."""
    events = order(4)
    assert events.live(batch(7, 7.0)) == Todo(ask=4)
    assert events.live(batch(8, 8.0)) == Todo()  # one question at a time
    todo = events.replayed(events.ticket, tuple(batch(n, float(n)) for n in range(4, 10)))
    assert numbers(todo) == [4, 5, 6, 7, 8, 9]
    assert (todo.drop, todo.ask, events.awaits) == (False, None, False)
    assert events.live(batch(9, 9.0)) == Todo()  # its live copy comes after the replay's
    assert numbers(events.live(batch(10, 10.0))) == [10]


def test_a_first_number_above_zero_is_a_gap() -> None:
    """`dynamo#7463`."""
    events = order()
    assert events.live(batch(42, 42.0)) == Todo(ask=0)
    assert numbers(events.replayed(events.ticket, tuple(batch(n, float(n)) for n in range(42)))) == [
        *range(43)
    ]


def test_a_gap_that_closes_by_itself_needs_no_replay() -> None:
    events = order(1)
    ticket = events.live(batch(2, 2.0)).ask and events.ticket
    assert numbers(events.live(batch(1, 1.0))) == [1, 2]
    assert ticket is not None
    assert events.replayed(ticket, (batch(1, 1.0), batch(2, 2.0))) == Todo()


def test_a_late_answer_is_ignored_and_drops_nothing() -> None:
    events = order(1)
    first = events.live(batch(2, 2.0)) and events.ticket
    events.live(batch(1, 1.0))
    assert events.live(batch(5, 5.0)) == Todo(ask=3)
    assert events.replayed(first, (batch(1, 1.0),)) == Todo()
    assert events.failed(first) == Todo()
    assert events.awaits
    assert numbers(events.replayed(events.ticket, (batch(3, 3.0), batch(4, 4.0)))) == [3, 4, 5]


def test_a_second_gap_behind_the_first_is_asked_for_next() -> None:
    events = order(1)
    assert events.live(batch(3, 3.0)).ask == 1
    assert events.live(batch(6, 6.0)) == Todo()
    todo = events.replayed(events.ticket, (batch(1, 1.0), batch(2, 2.0)))
    assert (numbers(todo), todo.ask, todo.drop) == ([1, 2, 3], 4, False)


def test_a_replay_that_lacks_what_is_missing_drops_the_entries_and_builds_on_its_oldest_batch() -> None:
    events = order(2)
    events.live(batch(9, 9.0))
    todo = events.replayed(events.ticket, (batch(6, 6.0), batch(7, 7.0), batch(8, 8.0)))
    assert (numbers(todo), todo.drop, todo.ask) == ([6, 7, 8, 9], True, None)


def test_a_failed_replay_goes_on_from_the_live_batches() -> None:
    events = order(2)
    events.live(batch(5, 5.0))
    events.live(batch(6, 6.0))
    todo = events.failed(events.ticket)
    assert (numbers(todo), todo.drop, todo.ask) == ([5, 6], True, None)
    assert numbers(events.live(batch(7, 7.0))) == [7]


def test_too_many_held_batches_count_as_a_failed_replay() -> None:
    events = order(1, limit=2)
    assert events.live(batch(5, 5.0)) == Todo(ask=1)
    assert events.live(batch(6, 6.0)) == Todo()
    todo = events.live(batch(7, 7.0))
    assert (numbers(todo), todo.drop) == ([5, 6, 7], True)


def test_a_number_from_a_later_time_is_of_a_new_life_and_one_from_no_later_time_came_twice() -> None:
    events = order(5)
    assert events.live(batch(2, 2.0)) == Todo()
    todo = events.live(batch(0, 50.0))
    assert (numbers(todo), todo.begin_again) == ([0], True)
    todo = events.live(batch(0, 60.0))  # and again, before anything else came
    assert (numbers(todo), todo.begin_again) == ([0], True)


def test_a_new_life_whose_first_batches_were_lost_is_a_gap_of_the_new_life() -> None:
    events = order(5)
    assert events.live(batch(3, 50.0)) == Todo(begin_again=True, ask=0)
    assert numbers(events.replayed(events.ticket, tuple(batch(n, 40.0 + n) for n in range(3)))) == [
        0,
        1,
        2,
        3,
    ]


def test_a_replay_may_be_the_first_to_tell_of_a_new_life() -> None:
    events = order(5)
    assert events.live(batch(9, 9.0)).ask == 5
    todo = events.replayed(events.ticket, (batch(5, 55.0), batch(6, 56.0)))
    assert todo == Todo(begin_again=True, ask=0)


def test_without_times_a_live_number_that_does_not_grow_is_of_a_new_life() -> None:
    events = EventOrder(100)
    events.live(batch(0))
    assert events.live(batch(4)).ask == 1
    assert numbers(events.replayed(events.ticket, tuple(batch(n) for n in range(1, 7)))) == [1, 2, 3, 4, 5, 6]
    assert events.live(batch(5)) == Todo()  # the replay was quicker than the live copy
    assert events.live(batch(6)) == Todo()
    assert events.live(batch(0)) == Todo((batch(0),), begin_again=True)


def test_a_snapshot_stands_for_all_batches_up_to_its_number() -> None:
    events = EventOrder(100)
    for number in (7, 8, 9, 11):
        events.live(batch(number, float(number)))
    todo = events.snapshot(batch(8, 8.5))
    assert (numbers(todo), todo.drop, todo.ask) == ([8, 9], True, None)
    assert events.awaits  # of 10
    assert numbers(events.live(batch(10, 10.0))) == [10, 11]
    assert not events.awaits


def test_a_snapshot_from_before_the_latest_batch_is_ignored_unless_it_is_of_a_new_life() -> None:
    events = order(6)
    assert events.snapshot(batch(3, 3.0)) == Todo()
    assert numbers(events.live(batch(6, 6.0))) == [6]
    again = events.snapshot(batch(6, 6.0))  # of just this moment: it repairs what was dropped
    assert (numbers(again), again.drop, again.begin_again) == ([6], True, False)
    anew = events.snapshot(batch(2, 9.0))
    assert (numbers(anew), anew.begin_again) == ([2], True)
