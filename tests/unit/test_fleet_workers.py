"""Who belongs to the fleet, and what is known of each: lives, reports, shared stores, presumed pages."""

from __future__ import annotations

import pytest

from hotprefix.errors import ConfigError, ProtocolError
from hotprefix.fleet.config import FleetConfig, PlanConfig, RoutingPolicy
from hotprefix.fleet.fleet import Fleet
from hotprefix.fleet.records import (
    Batch,
    Change,
    LinkSpeed,
    Profile,
    Role,
    RouteRequest,
    Seen,
    Shelf,
    Stage,
)
from tests.support.fleet import finish, profile, prompt, report, request, routed, token_prices

FAST = LinkSpeed(0.0, 1e12)
HOT = prompt("hot", 10)


def fleet(workers: int = 2, *, config: FleetConfig | None = None, **more: object) -> Fleet:
    made = Fleet(config or FleetConfig())
    for number in range(workers):
        made.join(f"w{number}", profile(**more), 0.0)  # type: ignore[arg-type]
    return made


def test_a_worker_with_other_pages_than_the_fleet_is_refused() -> None:
    """`llm-d-router#2889`: else it would silently match nothing."""
    with pytest.raises(ConfigError, match="pages of 64 tokens, the fleet's keys are for pages of 16"):
        Fleet(FleetConfig()).join("w", profile(page_size=64), 0.0)


def test_keys_of_other_pages_than_the_fleet_s_are_refused_if_they_are_too_many() -> None:
    made = fleet(1)
    with pytest.raises(ConfigError, match=r"'a' has 3 keys, and its prompt=47 has 2 complete pages of 16"):
        made.route(RouteRequest("a", HOT[:3], 47), 0.0)
    assert routed(made, RouteRequest("a", HOT[:3], 48), 0.0).available == 0


def test_sums_of_outstanding_seconds_never_fall_below_zero() -> None:
    """0.1 + 0.2 - 0.1 - 0.2 is less than nothing."""
    made = Fleet(FleetConfig())
    made.join("p", profile(role=Role.PREFILL, restore=LinkSpeed(0.0, 1e3)), 0.0)
    made.join("d", profile(role=Role.DECODE, hand_off=LinkSpeed(0.0, 1e3)), 0.0)
    for n, tokens in enumerate((100, 200, 700)):
        routed(made, request(str(n), (), tail=tokens), 0.0)
    for id in "012":
        made.progress(id, Stage.FIRST_TOKEN, 1.0)
        load = made.loads(1.0)["d"]
        assert min(load.prefill, load.hand_off, load.restore) >= 0.0
    queue = fleet(1)
    for n, tokens in enumerate((100, 200, 700)):
        routed(queue, request(str(n), (), tail=tokens), 0.0)
    queue.report("w0", report(1.0, tokens=1001), 1.0)
    for id in "01":
        queue.progress(id, Stage.FIRST_TOKEN, 1.0)
    assert queue.loads(9.0)["w0"].prefill >= 0.0


def test_a_broken_call_order_is_an_error() -> None:
    made = fleet(1)
    with pytest.raises(ProtocolError, match="'w0' is a member already"):
        made.join("w0", profile(), 0.0)
    with pytest.raises(ProtocolError, match="'w9' is not a member"):
        made.drain("w9", 0.0)
    routed(made, request("a", HOT), 1.0)
    with pytest.raises(ProtocolError, match="'a' has a worker"):
        made.route(request("a", HOT), 1.0)
    with pytest.raises(ProtocolError, match=r"time went from 1\.0 back to 0\.5"):
        made.report("w0", report(0.5), 0.5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FleetConfig(page_size=0), "page_size=0: give a whole number >= 1"),
        (lambda: FleetConfig(spread=-0.1), "spread=-0.1: give a number >= 0"),
        (lambda: FleetConfig(horizon_s=0.0), "horizon_s=0.0: give a number > 0"),
        (lambda: FleetConfig(policy="predicted"), "policy='predicted': give one of round_robin"),  # type: ignore[arg-type]
        (lambda: FleetConfig(terms=frozenset({"queue"})), "give some of queue"),  # type: ignore[arg-type]
        (lambda: PlanConfig(slots=0), "plan.slots=0: give a whole number >= 1"),
        (lambda: Fleet(FleetConfig(policy=RoutingPolicy.RANDOM)), "policy=random draws: give draw"),
        (lambda: profile(capacity=0.0), r"capacity=0.0: give requests a second > 0"),
        (lambda: profile(pull=LinkSpeed(-1.0, 1.0)), r"pull=LinkSpeed\(latency_s=-1.0"),
        (lambda: Profile(token_prices(), 0, 16, 1, 1), "total_pages=0: give a whole number >= 1"),
        (lambda: RouteRequest("a", (), 0), "prompt=0: give at least one token"),
        (lambda: RouteRequest("a", (), 1, 0), "outputs=0: give at least one token"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_fix(build: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()  # type: ignore[operator]


def test_a_report_of_a_new_life_ends_what_belonged_to_the_old_one() -> None:
    made = fleet(1)
    made.report("w0", report(0.0, incarnation=7), 0.0)
    made.cached("w0", Shelf.L1, 0.0, HOT)
    first = routed(made, request("a", prompt("own", 5)), 1.0)
    made.report("w0", report(2.0, incarnation=8), 2.0)
    second = routed(made, request("b", HOT), 3.0)
    assert (second.incarnation > first.incarnation, second.found.total, second.parts.queue) == (True, 0, 0.0)
    made.progress("a", Stage.FAILED, 3.0)
    assert (made.counters.restarts, made.counters.late) == (1, 1)
    made.report("w0", report(4.0, tokens=99_000, incarnation=7), 4.0)  # of the old life, late
    assert made.loads(4.0)["w0"].prefill < 10


def test_a_worker_that_left_and_came_back_is_cold_and_its_old_questions_count_no_more() -> None:
    made = fleet(1)
    made.cached("w0", Shelf.L1, 0.0, HOT)
    wanted = made.events("w0", Batch(3, ()), 0.0)
    assert wanted is not None
    made.leave("w0", 1.0)
    made.join("w0", profile(), 1.0)
    assert made.events("w0", Batch(2, ()), 1.0) is not None
    assert made.replayed(wanted, (Batch(0, (Change(Shelf.L1, HOT),)),), 1.0) is None
    assert routed(made, request("a", HOT), 2.0).found.total == 0
    assert made._members.bits == 1  # its bit was used again


def test_what_a_worker_said_before_it_left_and_came_back_is_ignored() -> None:
    """Else its old pages would come back, and its first words of the new life would look like a restart."""
    made = Fleet(FleetConfig())
    made.join("w0", profile(), 0.0, incarnation=1)
    made.leave("w0", 1.0)
    made.join("w0", profile(), 1.0, incarnation=2)
    stored = (Change(Shelf.L1, HOT),)
    assert made.events("w0", Batch(0, stored, 0.5, 1), 1.5) is None
    assert made.snapshot("w0", Batch(0, stored, 0.5, 1), 1.5) is None
    assert routed(made, request("a", HOT), 2.0).found.total == 0
    made.events("w0", Batch(0, (), 1.5, 2), 2.5)
    made.report("w0", report(2.5, incarnation=2), 2.5)
    assert made.counters.restarts == 0
    finish(made, "a", 3.0)
    assert made.counters.late == 0


def test_a_late_report_of_a_life_that_events_have_ended_does_not_end_the_next_one() -> None:
    """Its events tell no incarnation, its reports do."""
    made = fleet(1)
    made.report("w0", report(1.0, incarnation=1), 1.0)
    made.events("w0", Batch(0, ()), 2.0)
    made.events("w0", Batch(0, ()), 3.0)  # begins again
    routed(made, request("a", HOT), 3.0)
    made.report("w0", report(2.5, incarnation=1), 3.5)
    made.report("w0", report(4.0, incarnation=2), 4.0)
    assert made.counters.restarts == 1
    finish(made, "a", 5.0)
    assert made.counters.late == 0


def test_reports_correct_the_queue_both_ways_and_fade() -> None:
    """A report tells of 500 tokens that nothing here has booked; later that of 300 booked ones 100 are
    left."""
    made = fleet(1)
    made.report("w0", report(0.0, tokens=500), 0.0)
    assert made.loads(0.0)["w0"].prefill == 0.5
    assert made.loads(0.2)["w0"].prefill == pytest.approx(0.3)
    routed(made, request("a", (), tail=300), 1.0)
    assert made.loads(1.0)["w0"].prefill == pytest.approx(0.3)
    made.report("w0", report(1.1, tokens=100), 1.1)
    assert made.loads(1.1)["w0"].prefill == pytest.approx(
        0.0
    )  # 200 less than booked, of which 0.1 s has passed
    routed(made, request("b", (), tail=50), 1.1)  # sent after the report: it takes nothing off that
    made.report("w0", report(0.9, tokens=9000), 1.1)  # older than the last one
    assert made.loads(1.1)["w0"].prefill == pytest.approx(0.05)
    finish(made, "a", 1.2)
    assert made.loads(1.2)["w0"].prefill == pytest.approx(0.05)
    finish(made, "b", 1.3)
    assert made.loads(1.3)["w0"].prefill == 0.0


def test_a_report_takes_nothing_off_what_was_sent_after_it_was_made() -> None:
    made = fleet(1)
    routed(made, request("a", HOT), 1.0)
    made.report("w0", report(0.9), 1.1)
    assert made.loads(1.1)["w0"].prefill == pytest.approx(0.161 - 0.1)
    assert made.loads(1.1)["w0"].pages == 11 / 10_000
    made.report("w0", report(1.1, owned=11), 1.1)
    assert made.loads(1.1)["w0"][:3] == pytest.approx((0.0, 0.001, 11 / 10_000))


def test_with_a_calibrated_capacity_requests_count_as_the_seconds_in_which_they_are_served() -> None:
    made = fleet(1, capacity=4.0)
    for name in "abc":
        routed(made, request(name, (), tail=10), 0.0)
    assert made.loads(0.0)["w0"].prefill == 0.75
    routed(made, request("d", (), tail=2000), 0.0)
    assert made.loads(0.0)["w0"].prefill == pytest.approx(2.03)


def test_a_new_life_by_its_events_has_no_queue_and_takes_no_report_of_the_old_one() -> None:
    made = fleet(1)
    made.events("w0", Batch(0, (), 0.5), 0.0)
    made.report("w0", report(0.0, tokens=5000), 0.0)
    made.events("w0", Batch(0, (), 9.0), 1.0)
    assert (made.counters.restarts, made.loads(1.0)["w0"].prefill) == (1, 0.0)
    made.report("w0", report(0.5, tokens=5000), 1.5)
    assert made.loads(1.5)["w0"].prefill == 0.0


def test_a_report_that_is_too_old_is_not_known_any_more() -> None:
    made = fleet(1)
    made.report("w0", report(0.0, owned=5000), 0.0)
    assert made.loads(10.0)["w0"].pages == 0.5
    assert made.loads(10.1)["w0"].pages is None
    assert routed(made, request("a", HOT), 10.1).unknown == ("report",)


def test_what_one_worker_put_into_a_shared_store_each_can_fetch() -> None:
    links = {"restore": FAST, "fetch": FAST, "shared_l3": True}
    made = fleet(2, **links)
    made.join("apart", profile(restore=FAST, fetch=FAST), 0.0)
    made.cached("w0", Shelf.L3, 0.0, HOT)
    only = {"w1": frozenset({"w0", "apart"}), "apart": frozenset({"w0", "w1"})}
    found = {name: routed(made, request(name, HOT, avoid=avoid), 1.0).found for name, avoid in only.items()}
    assert (found["w1"].l3, found["apart"].l3) == (160, 0)
    made.leave("w0", 2.0)
    assert routed(made, request("x", HOT, avoid=frozenset({"apart"})), 2.0).found.total == 160


def test_pages_are_there_from_the_first_token_until_events_confirm_them_or_time_is_up() -> None:
    made = fleet(1)
    routed(made, request("a", HOT), 0.0)
    finish(made, "a", 1.0)
    assert routed(made, request("b", HOT), 1.5).found.l1 == 160
    made.progress("b", Stage.CANCELLED, 1.5)
    assert routed(made, request("c", HOT), 2.5).found.total == 0
    made.progress("c", Stage.CANCELLED, 2.5)
    assert len(made._flights) == 0


def test_made_pages_of_each_worker_have_a_time_of_their_own() -> None:
    made = fleet(3)
    for name, worker, now in (("one", "w0", 0.0), ("two", "w1", 0.25), ("tre", "w2", 0.5)):
        routed(made, request(name, prompt(name, 10), avoid=frozenset({"w0", "w1", "w2"} - {worker})), now)
        finish(made, name, now)
    for now, left in ((0.9, 3), (1.0, 2), (1.2, 2), (1.25, 1), (1.5, 0)):
        made.loads(now)
        assert len(made._flights) == left


def test_what_a_worker_without_events_has_is_presumed_within_its_size() -> None:
    made = fleet(1, events=False, pages=25)
    for number, name in enumerate(("one", "two", "tre")):
        routed(made, request(name, prompt(name, 10)), float(number))
        finish(made, name, number + 0.5)
    found = []
    for name in ("one", "two", "tre"):
        found.append(routed(made, request(f"again {name}", prompt(name, 10)), 100.0).found.l1)
        made.progress(f"again {name}", Stage.FAILED, 100.0)
    assert found == [0, 160, 160]
    assert routed(made, request("late", prompt("tre", 10)), 400.0).found.total == 0


def test_a_prompt_beyond_a_worker_s_size_is_presumed_until_the_next() -> None:
    made = fleet(1, events=False, pages=5)
    for name in ("one", "two"):
        routed(made, request(name, prompt(name, 10)), 0.5)
        finish(made, name, 0.5)
        assert len(made._flights) == 1
    assert routed(made, request("a", prompt("two", 10)), 1.0).found.l1 == 160


def test_where_hits_go_in_tokens_of_one_denominator() -> None:
    """The holder drains: 160 tokens are there, none is captured. Then 160 are captured and 96 delivered."""
    made = fleet(2)
    made.cached("w0", Shelf.L1, 0.0, HOT)
    made.drain("w0", 0.0)
    decision = routed(made, request("a", HOT), 0.0)
    assert (decision.available, decision.found.total, decision.copied) == (160, 0, 160)
    assert decision.copying == "not_allowed"
    finish(made, "a", 0.5, Seen(cached=0))
    made.cached("w1", Shelf.L1, 0.5, HOT)
    assert routed(made, request("b", HOT), 1.0).found.total == 160
    finish(made, "b", 1.5, Seen(cached=96))
    routed(made, request("c", HOT), 2.0)
    finish(made, "c", 2.5)
    hits = made.hits
    assert (hits.requests, hits.prompt, hits.available, hits.captured, hits.delivered) == (
        2,
        322,
        320,
        160,
        96,
    )
    assert hits.unknown == 1
    assert made.copies["not_allowed"] == 160


def test_an_answer_in_one_piece_confirms_pages_and_teaches_no_time() -> None:
    made = fleet(1, events=False)
    routed(made, request("a", HOT), 0.0)
    finish(made, "a", 50.0, Seen(cached=7, whole=True))
    assert (made.error.count, made.hits.delivered) == (0, 7)
    assert routed(made, request("b", HOT), 50.0).found.l1 == 160


def test_a_flush_takes_away_what_was_presumed_and_no_work() -> None:
    made = fleet(1, events=False)
    routed(made, request("a", HOT), 0.0)
    finish(made, "a", 1.0)
    routed(made, request("b", prompt("b", 5)), 1.0)
    made.flushed("w0", 2.0)
    assert routed(made, request("c", HOT), 2.0).found.total == 0
    assert made.outstanding("w0") == 81 + 161
    with pytest.raises(ProtocolError):
        made.flushed("w9", 2.0)
