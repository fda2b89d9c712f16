"""Exact-input single flight: the record's rules, and what the kernel does with them."""

from __future__ import annotations

import pytest

from hotprefix.errors import ProtocolError
from hotprefix.kernel.config import Flight, Order, Publication
from hotprefix.kernel.plan import Finish
from hotprefix.kernel.state.flight import ExactFlights
from tests.support.drive import Driver

PROMPT = list(range(30))
EXACT = [Flight.EXACT_FINISH, Flight.EXACT_PREFILL]


# -- the record -----------------------------------------------------------------------------------


def test_the_first_leads_and_equal_ones_wait() -> None:
    f = ExactFlights(3)
    assert [f.join(r, "k") for r in "abc"] == [False, True, True]
    assert f.join("x", "other") is False
    assert f.leads("a")
    assert not f.leads("b")
    assert not f.leads("nobody")


def test_release_ends_the_flight_and_remembers_ids_until_their_end() -> None:
    """The seed's review: a terminal notice of a released follower is valid, an unknown id still an error."""
    f = ExactFlights(3)
    for r in "abc":
        f.join(r, "k")
    assert f.release("a") == ["b", "c"]
    assert (len(f._flights), f.tracked) == (0, 3)
    assert f.join("d", "k") is False, "a new identical request opens a new flight"
    f.forget("c")
    f.forget("a")
    for unknown in ("a", "c", "nobody"):
        with pytest.raises(ProtocolError, match="in no flight"):
            f.forget(unknown)
    f.forget("b")
    assert f.tracked == 1


def test_release_keeps_the_order_of_arrival() -> None:
    f = ExactFlights(3)
    for n in range(20):
        f.join(f"r{n}", "k")
    f.forget("r7")
    assert f.release("r0") == [f"r{n}" for n in range(1, 20) if n != 7]


def test_only_a_leader_releases_or_hands_over_and_never_just_ends() -> None:
    f = ExactFlights(3)
    f.join("a", "k")
    f.join("b", "k")
    for act in (f.release, f.hand_over):
        with pytest.raises(ProtocolError, match="leads no flight"):
            act("b")
    with pytest.raises(ProtocolError, match="still leads"):
        f.forget("a")
    with pytest.raises(ProtocolError, match="in a flight already"):
        f.join("b", "other")


def test_handing_over_elects_the_first_follower_a_bounded_number_of_times() -> None:
    """Three leaders die in a row."""
    f = ExactFlights(2)
    for r in "abcde":
        f.join(r, "k")
    assert f.hand_over("a") == ["b"]
    assert f.leads("b")
    assert f.hand_over("b") == ["c"]
    assert f.hand_over("c") == ["d", "e"], "elections used up: all run on their own"
    assert not f._flights
    for r in "abcde":
        f.forget(r)
    assert f.tracked == 0


def test_a_lone_leader_that_leaves_closes_its_flight() -> None:
    f = ExactFlights(3)
    f.join("a", "k")
    assert f.hand_over("a") == []
    assert not f._flights


def test_a_follower_leaves_without_touching_anybody() -> None:
    f = ExactFlights(3)
    for r in "abc":
        f.join(r, "k")
    f.forget("b")
    assert f.release("a") == ["c"]


# -- in the kernel --------------------------------------------------------------------------------


def burst(flight: Flight, n: int = 4, **config: object) -> Driver:
    d = Driver(128, 4, flight=flight, publication=Publication.FINISH, **config)
    for k in range(n):
        d.submit(f"r{k}", PROMPT, 5 + k)
    return d


@pytest.mark.parametrize("flight", EXACT)
def test_followers_wait_hold_nothing_and_then_take_the_leaders_pages(flight: Flight) -> None:
    d = burst(flight)
    status = d.kernel.status()
    assert (status.waiting, status.parked) == (1, 3)
    d.step()
    if flight is Flight.EXACT_FINISH:
        assert d.kernel.status().parked == 3
        assert d.kernel.status().l1.protected + d.kernel.status().l1.owned == 8, "the leader's pages alone"
    else:
        assert d.kernel.status().parked == 0, "released as soon as its prefill is published"
    d.run().assert_cold_equal()
    assert d.cached == {"r0": 0, "r1": 28, "r2": 28, "r3": 28}
    leader_done = [n for n, p in enumerate(d.plans) if any(c.request == "r0" for c in p.chunks)][-1]
    follower_starts = next(n for n, p in enumerate(d.plans) if any(a.request == "r1" for a in p.admissions))
    assert (follower_starts > leader_done) is (flight is Flight.EXACT_FINISH)


@pytest.mark.parametrize("flight", EXACT)
def test_only_equal_inputs_meet(flight: Flight) -> None:
    d = burst(flight, 1)
    d.submit("longer", [*PROMPT, 1], 2)
    d.submit("salted", PROMPT, 2, salt="x")
    d.submit("limited", PROMPT, 2, reuse_limit=0)
    d.submit("private", PROMPT, 2, share_limit=8)
    assert d.kernel.status().parked == 0
    d.run().assert_cold_equal()


@pytest.mark.parametrize("flight", EXACT)
@pytest.mark.parametrize("when", ["waiting", "prefilling", "in flight"])
def test_when_the_leader_leaves_one_follower_goes_on_from_its_pages(flight: Flight, when: str) -> None:
    """Nobody else is cancelled, nothing that is done is done again."""
    d = burst(flight, 6, max_batched_tokens=16)
    if when == "prefilling":
        d.step()
    plan = d.plan() if when == "in flight" else None
    d.abort("r0")
    if plan is not None:
        d.execute(plan)
    assert d.finish == {"r0": Finish.ABORT}
    assert (d.kernel.status().waiting, d.kernel.status().parked) == (1, 4)
    plan = d.step()
    assert [a.request for a in plan.admissions] == ["r1"]
    assert plan.admissions[0].cached == (0 if when == "waiting" else 16)
    d.run().assert_cold_equal()
    assert set(d.finish.values()) == {Finish.ABORT, Finish.LENGTH}


@pytest.mark.parametrize("flight", EXACT)
def test_leaders_that_die_in_a_row_leave_nobody_hanging(flight: Flight) -> None:
    d = burst(flight, 8, max_batched_tokens=16, max_elections=3)
    for k in range(4):
        d.step()
        d.abort(f"r{k}")
    assert d.kernel.status().parked == 0, "elections used up"
    d.run().assert_cold_equal()
    assert list(d.finish.values()).count(Finish.ABORT) == 4


@pytest.mark.parametrize("flight", EXACT)
def test_pages_lost_before_the_followers_use_them_are_computed_again(flight: Flight) -> None:
    """Done is not the same as cached."""
    d = burst(flight)
    while d.kernel.status().parked:
        d.step()
    if "r0" not in d.finish:
        d.abort("r0")
    d.kernel.flush(d.now)
    d.run().assert_cold_equal()
    assert len(d.finish) == 4


@pytest.mark.parametrize("flight", EXACT)
def test_a_follower_may_leave_while_it_waits(flight: Flight) -> None:
    d = burst(flight)
    d.abort("r2")
    assert d.finish == {"r2": Finish.ABORT}
    with pytest.raises(ProtocolError, match="unknown or has ended"):
        d.kernel.abort("r2", d.now)
    d.run().assert_cold_equal()
    assert d.cached == {"r0": 0, "r1": 28, "r2": 0, "r3": 28}


@pytest.mark.parametrize("flight", EXACT)
def test_a_retracted_leader_hands_over(flight: Flight) -> None:
    """A follower must not wait for somebody who waits for room."""
    d = Driver(
        64, 4, flight=flight, order=Order.PRIORITY, preemption=True, max_running=1, max_batched_tokens=16
    )
    for k in range(3):
        d.submit(f"r{k}", PROMPT, 8, priority=5)
    d.step()
    d.submit("urgent", [5, 6, 7], 2, priority=0)
    assert d.step().retracted == ("r0",)
    assert (d.kernel.status().waiting, d.kernel.status().parked) == (2, 1)
    d.run().assert_cold_equal()
    assert len(d.finish) == 4


@pytest.mark.parametrize("flight", EXACT)
def test_a_failed_leader_hands_over_and_a_follower_of_it_still_gets_its_answer(flight: Flight) -> None:
    d = burst(flight, 3, max_step_failures=0)
    d.executor.fail_next = 1
    d.step()
    assert d.finish == {"r0": Finish.ERROR}
    d.run().assert_cold_equal()
    assert d.finish == {"r0": Finish.ERROR, "r1": Finish.LENGTH, "r2": Finish.LENGTH}


def test_a_new_identical_request_after_the_release_opens_a_new_flight() -> None:
    """The seed's late pair."""
    d = burst(Flight.EXACT_PREFILL, 1)
    d.step()
    d.submit("late", PROMPT, 4)
    d.submit("later", PROMPT, 4)
    assert (d.kernel.status().waiting, d.kernel.status().parked) == (1, 1)
    d.run().assert_cold_equal()
    assert d.cached == {"r0": 0, "late": 28, "later": 28}
    assert d.kernel._s.flights is not None
    assert d.kernel._s.flights.tracked == 0


def test_under_release_at_finish_the_late_one_joins_the_flight_that_still_flies() -> None:
    d = burst(Flight.EXACT_FINISH, 1)
    d.step()
    d.submit("late", PROMPT, 4)
    assert d.kernel.status().parked == 1
    d.run().assert_cold_equal()
    assert d.cached["late"] == 28
