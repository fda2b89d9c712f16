"""Pages that ended requests of a session keep: bound, time limit, owner, and who they give way to."""

from __future__ import annotations

import pytest

from hotprefix.kernel.config import TierConfig, Write
from hotprefix.kernel.plan import Finish
from tests.support.drive import Driver

TURN = list(range(20))  # 5 pages


def held(d: Driver) -> int:
    return d.kernel._s.sessions.pages


def turn(
    d: Driver, name: str, prompt: list[int], session: str = "s", hold_s: float = 100.0, **more: object
) -> None:
    d.submit(name, prompt, 1, session=session, hold_s=hold_s, **more)
    d.run()


def test_the_next_turn_takes_the_hold_over() -> None:
    d = Driver(64, 4, session_pages=20)
    turn(d, "one", TURN)
    assert held(d) == 5
    turn(d, "two", [*TURN, *TURN])
    assert held(d) == 10
    assert d.kernel.status().l1.protected == 10
    assert d.cached["two"] == 20


def test_sessions_of_different_tenants_are_different() -> None:
    d = Driver(64, 4, session_pages=20)
    turn(d, "one", TURN)
    turn(d, "two", TURN, salt="t")
    assert (held(d), len(d.kernel._s.sessions)) == (10, 2)


def test_what_exceeds_the_bound_is_not_held_and_the_older_hold_of_the_session_goes() -> None:
    d = Driver(64, 4, session_pages=7)
    turn(d, "one", TURN)
    turn(d, "other", TURN[::-1], session="t")
    assert held(d) == 5
    turn(d, "two", [*TURN, *TURN])
    assert (held(d), d.kernel.status().l1.protected) == (0, 0)
    turn(d, "other again", TURN[::-1], session="t")
    assert held(d) == 5


def test_without_a_bound_given_nothing_is_held() -> None:
    d = Driver(64, 4)
    turn(d, "one", TURN)
    assert d.kernel.status().l1.protected == 0


@pytest.mark.parametrize("cause", ["abort", "error", "no hold"])
def test_only_what_ended_well_and_asked_for_it_is_held(cause: str) -> None:
    d = Driver(64, 4, session_pages=20, max_step_failures=0)
    d.submit("one", TURN, 5, session="s", hold_s=0.0 if cause == "no hold" else 100.0)
    d.executor.fail_next = int(cause == "error")
    d.step()
    if cause == "abort":
        d.abort("one")
    d.run()
    assert d.finish["one"] is {"abort": Finish.ABORT, "error": Finish.ERROR, "no hold": Finish.LENGTH}[cause]
    assert held(d) == 0
    assert d.kernel.status().l1.protected == 0


def test_a_hold_ends_at_its_time_even_where_nothing_else_happens() -> None:
    d = Driver(64, 4, session_pages=20)
    turn(d, "one", TURN, hold_s=10.0)
    d.now += 9.0
    d.kernel.plan(d.now)
    assert held(d) == 5
    d.now += 1.0
    d.kernel.plan(d.now)
    assert held(d) == 0
    d.kernel.check()


def test_a_flush_ends_holds() -> None:
    d = Driver(64, 4, session_pages=20)
    turn(d, "one", TURN)
    report = d.kernel.flush(d.now)
    assert (report.freed, report.protected, held(d)) == (5, 0, 0)


def test_the_oldest_hold_gives_way_first_and_only_as_far_as_needed() -> None:
    d = Driver(16, 4, session_pages=100)
    turn(d, "one", TURN, session="s")
    turn(d, "two", TURN[::-1], session="t")
    d.submit("big", [70] * 36, 1)
    d.run().assert_cold_equal()
    assert [session for _, session in d.kernel._s.sessions._holds] == ["t"]


def test_sharing_a_prefix_returns_each_pin_once() -> None:
    d = Driver(64, 4, session_pages=100)
    for n in range(4):
        turn(d, f"r{n}", [*TURN, n], session=f"s{n}", hold_s=10.0 + n)
    assert d.kernel.status().l1.protected == 5
    for n in range(4):
        assert len(d.kernel._s.sessions) == 4 - n
        d.now = max(d.now, 1000.0) if n == 3 else d.now
        d.kernel._s.sessions.drop_oldest()
        d.kernel.check()
    assert d.kernel.status().l1.protected == 0


def test_a_held_prefix_is_not_evicted_though_a_copy_below_would_do() -> None:
    d = Driver(16, 4, session_pages=100, tiers=TierConfig(pages=64, write=Write.BACK, min_restore_pages=1))
    turn(d, "one", TURN)
    for n in range(3):
        turn(d, f"noise{n}", [40 + n] * 30, session="other", hold_s=0.0)
    turn(d, "two", [*TURN, 9])
    d.assert_cold_equal()
    assert d.sources["two"] == (20, 0, 0)
