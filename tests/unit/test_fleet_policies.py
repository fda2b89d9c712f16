"""Each arm's rule, and CacheRoute's plan."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hotprefix.fleet.config import FleetConfig, Homes, PlanConfig, RoutingPolicy
from hotprefix.fleet.fleet import Fleet
from hotprefix.fleet.plan import Plan
from hotprefix.fleet.records import RunnerUp, Shelf, Stage
from tests.support.fleet import finish, profile, prompt, report, request, routed

HOT = prompt("hot", 20)


def fleet(arm: RoutingPolicy, workers: int = 4, seed: int = 0, **config: object) -> Fleet:
    made = Fleet(FleetConfig(policy=arm, **config), random.Random(seed).randrange)  # type: ignore[arg-type]
    for number in range(workers):
        made.join(f"w{number}", profile(), 0.0)
    return made


def choices(made: Fleet, count: int, tail: int = 10, now: float = 0.0) -> list[str]:
    """Where so many equal requests without pages go, none of which ends."""
    return [routed(made, request(f"{now} {n}", (), tail=tail), now).worker for n in range(count)]


@pytest.mark.parametrize(
    "arm",
    [a for a in RoutingPolicy if a not in (RoutingPolicy.RANDOM, RoutingPolicy.SESSION, RoutingPolicy.PLAN)],
)
def test_equal_workers_take_turns(arm: RoutingPolicy) -> None:
    """`infera#73`: prompts shorter than a page, all at once, do not all go to the first."""
    assert Counter(choices(fleet(arm), 12)) == {f"w{n}": 3 for n in range(4)}


def test_random_draws_from_what_is_passed_in() -> None:
    drawn = random.Random(7)
    expected = [f"w{drawn.randrange(4)}" for _ in range(20)]
    assert choices(fleet(RoutingPolicy.RANDOM, seed=7), 20) == expected


def test_least_requests_counts_what_least_load_weighs() -> None:
    """w0 has one long request, w1 two short ones."""
    for arm, worker in ((RoutingPolicy.LEAST_REQUESTS, "w0"), (RoutingPolicy.LEAST_LOAD, "w1")):
        made = fleet(arm, workers=2)
        routed(made, request("long", (), tail=3000, avoid=frozenset({"w1"})), 0.0)
        for name in "ab":
            routed(made, request(name, (), tail=10, avoid=frozenset({"w0"})), 0.0)
        assert choices(made, 1) == [worker]


def test_loads_are_normalised_so_that_the_quicker_worker_gets_more() -> None:
    made = Fleet(FleetConfig(policy=RoutingPolicy.LEAST_LOAD))
    made.join("slow", profile(token_s=0.003), 0.0)
    made.join("quick", profile(token_s=0.001), 0.0)
    assert Counter(choices(made, 40, tail=100)) == {"quick": 30, "slow": 10}


def test_affinity_knows_no_load_and_bounded_does() -> None:
    """The holder has 0.5 s of work, the others none: within (1 + 0.25) x 0.125 s it is not."""
    for arm, worker, rule in (
        (RoutingPolicy.AFFINITY, "w0", "most_matched"),
        (RoutingPolicy.BOUNDED, "w1", "least_load"),
    ):
        made = fleet(arm)
        made.cached("w0", Shelf.L1, 0.0, HOT)
        routed(made, request("work", (), tail=500, avoid=frozenset({"w1", "w2", "w3"})), 0.0)
        decision = routed(made, request("a", HOT), 0.0)
        assert (decision.worker, decision.rule) == (worker, rule)
        assert decision.copying == (None if arm is RoutingPolicy.AFFINITY else "by_rule")


def test_below_the_floor_no_worker_counts_as_overloaded() -> None:
    """The holder has 50 ms of work and the others none, so it is four times as loaded as the mean."""
    made = fleet(RoutingPolicy.BOUNDED)
    made.cached("w0", Shelf.L1, 0.0, HOT)
    routed(made, request("work", (), tail=50, avoid=frozenset({"w1", "w2", "w3"})), 0.0)
    assert routed(made, request("a", HOT), 0.0).worker == "w0"


def test_a_worker_without_a_report_is_not_the_least_loaded() -> None:
    made = fleet(RoutingPolicy.LEAST_LOAD, workers=3)
    made.report("w0", report(0.0, tokens=400), 0.0)
    made.report("w1", report(0.0, tokens=300), 0.0)
    assert choices(made, 1) == ["w1"]


def test_one_hot_worker_does_not_switch_affinity_off_for_the_others() -> None:
    """`vllm-project/router#238`."""
    made = fleet(RoutingPolicy.BOUNDED)
    made.cached("w2", Shelf.L1, 0.0, HOT)
    for n in range(50):
        routed(made, request(f"x{n}", (), tail=100, avoid=frozenset({"w1", "w2", "w3"})), 0.0)
    decision = routed(made, request("a", HOT), 0.0)
    assert (decision.worker, decision.rule) == ("w2", "most_matched_within_bound")


def test_predicted_takes_the_earliest_first_token_and_names_the_runners_up_in_order() -> None:
    """w0 has the prefix and 0.4 s of work; w1 none of both; w2 half of the prefix."""
    made = fleet(RoutingPolicy.PREDICTED)
    made.cached("w0", Shelf.L1, 0.0, HOT)
    made.cached("w2", Shelf.L1, 0.0, HOT[:10])
    routed(made, request("work", (), tail=400, avoid=frozenset({"w1", "w2", "w3"})), 0.0)
    decision = routed(made, request("a", HOT), 0.0)
    assert (decision.worker, decision.found.l1, decision.rule) == ("w2", 160, "least_predicted")
    assert (decision.copying, decision.copied) == ("earlier_here", 160)
    firsts = [(up.worker, round(up.parts.first, 3)) for up in decision.runners_up]
    assert firsts == [("w1", 0.321), ("w3", 0.321), ("w0", 0.401)]
    assert all(isinstance(up, RunnerUp) for up in decision.runners_up)


def test_of_predictions_within_the_slack_the_one_with_the_least_to_compute_is_taken() -> None:
    """Waiting 0.32 s for the pages and computing one token, or computing all 321 elsewhere. Here work costs
    others nothing."""
    made = fleet(RoutingPolicy.PREDICTED, behind_weight=0.0)
    assert routed(made, request("a", HOT), 0.0).worker == "w0"
    decision = routed(made, request("b", HOT), 0.0)
    assert (decision.worker, decision.found.flight, decision.rule) == ("w0", 320, "equal_within_slack")
    exact = fleet(RoutingPolicy.PREDICTED, behind_weight=0.0, slack=0.0)
    routed(exact, request("a", HOT), 0.0)
    assert routed(exact, request("b", HOT), 0.0).copying == "earlier_here"


def test_what_the_choice_costs_others_can_turn_it() -> None:
    """At the holder 9 requests decode, so each second of computing there counts 9 x 0.5 s more."""
    made = fleet(RoutingPolicy.PREDICTED, workers=2, delay_weight=0.5)
    made.cached("w0", Shelf.L1, 0.0, HOT[:10])
    for n in range(9):
        routed(made, request(f"d{n}", (), tail=1, avoid=frozenset({"w1"})), 0.0)
        made.progress(f"d{n}", Stage.FIRST_TOKEN, 0.0)
    decision = routed(made, request("a", HOT), 0.0)
    assert (decision.worker, decision.copying) == ("w1", "costs_others_less")
    assert decision.runners_up[0].parts.delay == pytest.approx(0.161 * 9)


def test_the_longer_the_queues_the_dearer_is_a_copy() -> None:
    """The holder's queue is 1.2 s longer than the other's. That is worth a copy of 320 tokens if one request
    waits at the other worker, and not if ten do: each of them, and of those that come, would wait for it."""
    for waiting, chosen in ((1, "w1"), (10, "w0")):
        made = fleet(RoutingPolicy.PREDICTED, workers=2)
        made.cached("w0", Shelf.L1, 0.0, HOT)
        for n in range(waiting):
            for name, tokens in (("w0", 100 + 1200 // waiting), ("w1", 100)):
                other = frozenset({"w0", "w1"} - {name})
                routed(made, request(f"{name}-{n}", (), tail=tokens, avoid=other), 0.0)
        assert routed(made, request("a", HOT), 0.0).worker == chosen


def test_equal_tps_gives_to_the_worker_that_reuses_least() -> None:
    made = fleet(RoutingPolicy.EQUAL_TPS, workers=2)
    made.cached("w0", Shelf.L1, 0.0, HOT)
    made.cached("w1", Shelf.L1, 0.0, HOT[:5])
    workers = []
    for n in range(6):
        workers.append(routed(made, request(f"r{n}", HOT), float(n)).worker)
        finish(made, f"r{n}", n + 0.5)
    # 320 | 80 + 320 | + 320: then w1 has all of it, too, and what was reused lately counts more.
    assert workers == ["w0", "w1", "w1", "w0", "w1", "w1"]


# -- sessions --------------------------------------------------------------------------------------


def turn(made: Fleet, session: str, number: int, now: float, fails: bool = False) -> str:
    worker = routed(made, request(f"{session} {number}", (), session=session), now).worker
    if fails:
        made.progress(f"{session} {number}", Stage.FAILED, now)
    else:
        finish(made, f"{session} {number}", now)
    return worker


def test_only_the_sessions_of_a_worker_that_left_move_and_none_when_one_comes() -> None:
    """`production-stack#15`, `ingress-nginx#4475`."""
    made = fleet(RoutingPolicy.SESSION)
    names = [f"s{n}" for n in range(100)]
    homes = {name: turn(made, name, 0, 0.0) for name in names}
    assert min(Counter(homes.values()).values()) >= 10
    made.leave("w3", 1.0)
    after = {name: turn(made, name, 1, 1.0) for name in names}
    assert {n for n in names if after[n] != homes[n]} == {n for n in names if homes[n] == "w3"}
    made.join("w9", profile(), 2.0)
    assert {name: turn(made, name, 2, 2.0) for name in names} == after
    made.drain(after["s0"], 3.0)
    assert turn(made, "s0", 3, 3.0) != after["s0"]


def test_two_fleets_agree_on_a_new_session_s_home() -> None:
    """`aibrix#1751`."""
    one, two = fleet(RoutingPolicy.SESSION), fleet(RoutingPolicy.SESSION)
    choices(two, 3)
    assert [turn(one, f"s{n}", 0, 0.0) for n in range(50)] == [turn(two, f"s{n}", 0, 0.0) for n in range(50)]


def test_a_first_turn_that_fails_leaves_no_home() -> None:
    """`dynamo#9920`."""
    made = fleet(RoutingPolicy.SESSION)
    turn(made, "s", 0, 0.0, fails=True)
    assert len(made._homes) == 0
    under_way = routed(made, request("s 1", (), session="s"), 1.0).worker
    assert routed(made, request("s 2", (), session="s"), 1.0).worker == under_way
    made.progress("s 1", Stage.FAILED, 1.0)
    assert len(made._homes) == 1
    finish(made, "s 2", 1.0)
    assert made._homes.get("s") == under_way


def test_homes_by_turns_count_new_sessions_only() -> None:
    made = fleet(RoutingPolicy.SESSION, homes=Homes.TURNS)
    workers = [turn(made, name, n, 0.0) for n, name in enumerate("abacbdaef")]
    assert workers == ["w0", "w1", "w0", "w2", "w1", "w3", "w0", "w0", "w1"]
    assert choices(made, 5) == ["w0", "w1", "w2", "w3", "w0"]
    both = [routed(made, request(id, (), session="h"), 0.0).worker for id in ("h 1", "h 2")]
    assert [*both, turn(made, "g", 9, 0.0)] == ["w2", "w2", "w3"]


def test_the_homes_are_bounded() -> None:
    made = fleet(RoutingPolicy.SESSION, sessions=10)
    for n in range(50):
        turn(made, f"s{n}", 0, 0.0)
    assert len(made._homes) == 10


# -- the plan --------------------------------------------------------------------------------------


def planned(rates: dict[str, int], capacity: float = 1.0, workers: int = 4, **config: object) -> Plan:
    """A plan after 10 s in which each prompt came so many times a second."""
    plan = Plan(PlanConfig(period_s=10.0, anchor_pages=4, capacity=capacity, **config))  # type: ignore[arg-type]
    made = fleet(RoutingPolicy.LEAST_LOAD, workers)
    members = list(made._members.all.values())
    for name, rate in rates.items():
        for _ in range(rate * 10):
            plan.count(prompt(name, 20), members, 0.0)
    plan.count((), members, 10.0)
    return plan


def replicas(plan: Plan, name: str) -> tuple[str, ...]:
    return plan.members.get(plan.anchor(prompt(name, 20)) or 0, ())


def test_a_key_gets_as_many_workers_as_its_rate_needs() -> None:
    plan = planned({"aaaa": 3, "bbbb": 1, "cccc": 9})
    assert [len(replicas(plan, name)) for name in ("aaaa", "bbbb", "cccc")] == [
        3,
        1,
        4,
    ]  # 9 need 9, there are 4
    assert len(set(replicas(plan, "aaaa"))) == 3


def test_keys_are_admitted_by_rate_until_the_slots_are_full() -> None:
    plan = planned({"aaaa": 4, "bbbb": 3, "cccc": 2, "dddd": 1}, capacity=9.0, workers=3, slots=1)
    assert [len(replicas(plan, name)) for name in ("aaaa", "bbbb", "cccc", "dddd")] == [1, 1, 1, 0]


def test_the_heaviest_are_placed_first_each_on_the_least_loaded() -> None:
    """Longest processing time first: 5 | 4 | 3, then 3 and 2 onto the lightest: 5 | 4 + 2 | 3 + 3."""
    plan = planned({"aaaa": 5, "bbbb": 4, "cccc": 3, "dddd": 3, "eeee": 2}, capacity=9.0, workers=3)
    at = {name: replicas(plan, name)[0] for name in ("aaaa", "bbbb", "cccc", "dddd", "eeee")}
    assert sorted(Counter(at.values()).values()) == [1, 2, 2]
    assert len({at["aaaa"], at["bbbb"], at["cccc"]}) == 3
    assert {at["dddd"], at["eeee"]} == {at["cccc"], at["bbbb"]}


def test_little_moves_when_rates_hardly_change() -> None:
    plan = planned({"aaaa": 5, "bbbb": 4, "cccc": 3, "dddd": 3, "eeee": 2}, capacity=9.0, workers=3, keep=0.5)
    before = dict(plan.members)
    members = list(fleet(RoutingPolicy.LEAST_LOAD, 3)._members.all.values())
    for name, rate in (("aaaa", 5), ("bbbb", 4), ("cccc", 4), ("dddd", 3), ("eeee", 2)):
        for _ in range(rate * 10):
            plan.count(prompt(name, 20), members, 15.0)
    plan.count((), members, 20.0)
    assert (plan.rebuilt, plan.members, plan.moved_share) == (2, before, 0.0)
    assert planned({"aaaa": 1}).moved_share is None


def test_a_hot_request_goes_to_its_workers_and_a_cold_one_to_the_better_of_two() -> None:
    made = fleet(RoutingPolicy.PLAN, plan=PlanConfig(period_s=10.0, anchor_pages=4))
    for n in range(30):  # 3 a second: three workers of one request a second
        routed(made, request(f"a{n}", HOT), 0.0)
        finish(made, f"a{n}", 0.0)
    hot = [routed(made, request(f"b{n}", HOT), 10.0) for n in range(6)]
    assert {d.rule for d in hot} == {"planned"}
    assert sorted(Counter(d.worker for d in hot).values()) == [2, 2, 2]
    cold = routed(made, request("c", prompt("cold", 5)), 10.0)
    assert cold.rule == "cold"


def test_a_worker_with_more_capacity_is_planned_more() -> None:
    plan = Plan(PlanConfig(period_s=10.0, anchor_pages=4))
    made = Fleet(FleetConfig(policy=RoutingPolicy.LEAST_LOAD))
    for name, capacity in (("big", 30.0), ("small", 10.0)):
        made.join(name, profile(capacity=capacity), 0.0)
    members = list(made._members.all.values())
    for n in range(8):
        for _ in range(10):
            plan.count(prompt(f"k{n}", 9), members, 0.0)
    plan.count((), members, 10.0)
    assert Counter(names[0] for names in plan.members.values()) == {"big": 6, "small": 2}


def test_if_a_key_s_workers_are_gone_it_is_cold() -> None:
    made = fleet(RoutingPolicy.PLAN, plan=PlanConfig(period_s=10.0, anchor_pages=4), workers=2)
    routed(made, request("a", HOT), 0.0)
    finish(made, "a", 0.0)
    home = routed(made, request("b", HOT), 10.0)
    assert home.rule == "planned"
    made.leave(home.worker, 11.0)
    assert routed(made, request("c", HOT), 11.0).rule == "cold"


def test_rates_of_a_bounded_number_of_keys_are_remembered() -> None:
    plan = planned({f"k{n:03}": 1 for n in range(50)}, keys=10)
    assert len(plan._rates) == 10


def test_reports_count_in_the_load() -> None:
    """Owned and protected pages of the total; w1 is almost full."""
    made = fleet(RoutingPolicy.LEAST_LOAD, workers=2)
    made.report("w0", report(0.0, owned=2000, protected=1000), 0.0)
    made.report("w1", report(0.0, owned=5000, protected=4000), 0.0)
    assert [made.loads(0.0)[name].largest for name in ("w0", "w1")] == [0.3, 0.9]
    assert choices(made, 3, tail=1) == ["w0", "w0", "w0"]


def test_the_example_of_the_docs() -> None:
    for before, worker, first in ((0, "w0", 0.322), (100, "w1", 0.321)):
        made = fleet(RoutingPolicy.PREDICTED, workers=2)
        others = frozenset({"w1"})
        if before:
            routed(made, request("work", (), tail=before, avoid=others), 0.0)
        routed(made, request("a", HOT, avoid=others), 0.0)
        decision = routed(made, request("b", HOT), 0.0)
        assert (decision.worker, decision.copied) == (worker, 320 if before else 0)
        assert decision.parts.first == pytest.approx(first)
        assert decision.runners_up[0].parts.first == pytest.approx(0.422 if before else 0.321)
