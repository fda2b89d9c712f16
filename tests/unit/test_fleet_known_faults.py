"""Faults that other routers had, one test for each kind: what a choice must not do, and what must not be
left."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hotprefix.fleet.config import FleetConfig, RoutingPolicy
from hotprefix.fleet.fleet import Fleet
from hotprefix.fleet.records import Batch, Change, Decision, LinkSpeed, Role, Seen, Shelf, Stage
from tests.support.fleet import OneByOne, finish, profile, prompt, report, request, routed

HOT = prompt("hot", 20)


def fleet(workers: int = 4, arm: RoutingPolicy = RoutingPolicy.PREDICTED, **config: object) -> Fleet:
    made = Fleet(FleetConfig(policy=arm, **config), random.Random(0).randrange)  # type: ignore[arg-type]
    for number in range(workers):
        made.join(f"w{number}", profile(), 0.0)
    return made


def names(workers: int = 4) -> list[str]:
    return [f"w{number}" for number in range(workers)]


def nothing_left(made: Fleet) -> None:
    """Whatever a fleet keeps for requests is empty, and no work is outstanding."""
    made.check()
    assert not made._bookings.all
    assert not made._waiting
    assert not made._looked
    assert not made._homes._coming
    assert (len(made._flights), len(made._flights._positions), len(made._flights._made)) == (0, 0, 0)
    for name, work in made._bookings.work.items():
        assert (work.wait(1e9), len(work.all), work.decoding, work.pages) == (0.0, 0, 0, 0), name


@pytest.mark.parametrize(
    "arm",
    [a for a in RoutingPolicy if a not in (RoutingPolicy.RANDOM, RoutingPolicy.SESSION, RoutingPolicy.PLAN)],
)
def test_a_burst_uses_all_workers_before_any_answers(arm: RoutingPolicy) -> None:
    """`sglang#27547`: load that counts only once the answer begins sends all of a burst to one worker."""
    made = fleet(5, arm)
    chosen = Counter(routed(made, request(str(n), prompt(f"p{n}", 2000)), 0.0).worker for n in range(10))
    assert chosen == dict.fromkeys(names(5), 2)


@pytest.mark.parametrize(("common", "tail"), [(20, 1), (100, 5)])
def test_a_burst_with_a_shared_cold_prefix_computes_it_once(common: int, tail: int) -> None:
    """`llm-d-router#1726`: with all scores 0 it was scattered over all workers."""
    made = fleet()
    workers = OneByOne(made, names())
    shared = prompt("comm", common)
    workers.run((0.0, request(f"r{n}", shared, tail=tail)) for n in range(8))
    assert sum(done.computed for done in workers.done.values()) == common * 16 + 8 * tail
    assert sum(made.copies.values()) == 0


def test_where_a_copy_is_the_better_choice_it_is_chosen_and_counted() -> None:
    """Tails as long as the prefix: waiting costs more than computing it on idle workers. What is computed is
    the distinct tokens and the copies that were chosen."""
    made = fleet()
    workers = OneByOne(made, names())
    shared = prompt("comm", 20)
    workers.run((0.0, request(f"r{n}", shared + prompt(f"t{n}", 20))) for n in range(8))
    computed = sum(done.computed for done in workers.done.values())
    distinct = 20 * 16 + 8 * (20 * 16 + 1)
    assert made.copies["earlier_here"] > 0
    assert computed == distinct + sum(made.copies.values())
    one_worker = OneByOne(fleet(1), names(1))
    one_worker.run((0.0, request(f"r{n}", shared + prompt(f"t{n}", 20))) for n in range(8))
    mean = [sum(d.ttft for d in w.done.values()) / 8 for w in (workers, one_worker)]
    assert mean[0] < mean[1] / 2


def test_a_hot_prefix_beyond_one_worker_s_capacity_is_replicated_and_mostly_hit() -> None:
    """`sglang#32195`, `production-stack#1035`: five times what one worker can do, on six workers."""
    made = fleet(6)
    workers = OneByOne(made, names(6))
    arrivals = [(0.05 * n, request(f"r{n}", HOT + prompt(f"u{n}", 15))) for n in range(400)]  # 241 ms of own
    workers.run(arrivals)
    served = Counter(done.worker for done in workers.done.values())
    hits = 1 - sum(d.computed - 241 for d in workers.done.values()) / (400 * 320)
    assert hits > 0.95
    assert max(served.values()) <= 1.5 * 400 / 6
    assert len(served) >= 5


def test_loads_of_workers_that_failed_and_were_tried_again_end_at_zero() -> None:
    """`vllm-project/router#211`: a 503 and a retry elsewhere."""
    made = fleet()
    first = routed(made, request("a", HOT), 0.0)
    made.progress("a", Stage.SENT, 0.0)
    made.progress("a", Stage.FAILED, 0.1)
    second = routed(made, request("a", HOT, avoid=frozenset({first.worker})), 0.1)
    assert second.worker != first.worker
    finish(made, "a", 1.0)
    made.progress("a", Stage.FAILED, 1.0)  # a second ending counts for nothing
    assert made.counters.late == 1
    made.report("w0", report(9.0), 9.0)
    nothing_left(made)


def test_two_models_have_two_fleets_and_two_roles_one() -> None:
    """`ray#58835`: one prefix tree for several deployments."""
    first, second = fleet(1), fleet(1)
    first.cached("w0", Shelf.L1, 0.0, HOT)
    assert routed(second, request("a", HOT), 0.0).found.total == 0
    split = Fleet(FleetConfig())
    split.join("p", profile(role=Role.PREFILL), 0.0)
    split.join("d", profile(role=Role.DECODE), 0.0)
    split.cached("d", Shelf.L1, 0.0, HOT)
    decision = routed(split, request("a", HOT), 0.0)
    assert (decision.worker, decision.decode, decision.found.total) == ("p", "d", 0)
    assert (decision.available, decision.copying) == (320, "not_allowed")


def test_a_long_prompt_does_not_block_short_ones_on_a_small_decode_worker() -> None:
    """`sglang#40703`."""
    made = Fleet(FleetConfig())
    made.join("p0", profile(role=Role.PREFILL), 0.0)
    made.join("p1", profile(role=Role.PREFILL), 0.0)
    made.join("d", profile(role=Role.DECODE, max_running=2, hand_off=LinkSpeed(0.0, 1e9)), 0.0)
    long = routed(made, request("long", (), tail=100_000), 0.0)
    short = [routed(made, request(f"s{n}", (), tail=10), 0.0) for n in range(10)]
    assert {d.worker for d in short} == {"p0", "p1"} - {long.worker}
    assert max(d.parts.queue for d in short) < 0.1


def test_reports_that_say_nothing_do_not_make_a_busy_worker_idle() -> None:
    """`vllm-project/router#197`: each health round zeroed the load."""
    made = fleet(2)
    for n in range(20):
        routed(made, request(f"s{n}", (), avoid=frozenset({"w1"})), 0.0)
        made.progress(f"s{n}", Stage.FIRST_TOKEN, 0.0)
    for round in range(30):
        for name in names(2):
            made.report(name, report(float(round)), float(round))
    assert made.loads(29.0)["w0"].decode == 20 / 1000
    assert routed(made, request("new", prompt("new", 9)), 29.0).worker == "w1"


def test_an_idle_worker_always_gets_what_is_there_however_long() -> None:
    """`dynamo#8163`: prompts longer than a step's budget were parked for ever when all workers were busy."""
    made = Fleet(FleetConfig(bound=1))
    for name in names(2):
        made.join(name, profile(max_batched_tokens=8192), 0.0)
    for n in range(2):
        routed(made, request(f"r{n}", (), tail=8500), 0.0)
    waits = made.route(request("r2", (), tail=8500), 0.0)
    assert not isinstance(waits, Decision)
    assert (waits.reason, waits.until, waits.expired) == ("all_at_bound", 10.0, False)
    assert made.wake_at() == 10.0
    finish(made, "r0", 3.0)
    assert made.wake_at() == 3.0
    assert routed(made, request("r2", (), tail=8500), 3.0).worker == "w0"


def test_a_wait_is_bounded_and_then_also_full_workers_may_be_chosen() -> None:
    made = fleet(1, bound=1)
    routed(made, request("a", HOT), 0.0)
    assert not isinstance(made.route(request("b", HOT), 0.0), Decision)
    assert not isinstance(made.route(request("b", HOT), 5.0), Decision)  # asked again: it waits since 0.0
    assert made.wake_at() == 10.0
    assert routed(made, request("b", HOT), 10.0).worker == "w0"
    made.drain("w0", 11.0)
    assert not isinstance(made.route(request("c", HOT), 11.0), Decision)
    refused = made.route(request("c", HOT), 21.0)
    assert not isinstance(refused, Decision)
    assert (refused.reason, refused.expired, made.wake_at()) == ("all_drain", True, None)
    made.route(request("d", HOT), 22.0)
    made.progress("d", Stage.CANCELLED, 22.0)
    assert (made.wake_at(), made.counters.late, made.counters.expired) == (None, 0, 1)


@pytest.mark.parametrize("since", [0.07 * n for n in range(20)])
def test_at_the_time_that_wake_at_says_the_wait_is_over(since: float) -> None:
    """Also where the difference of two times is rounded down; else a driver would ask at this very time for
    ever."""
    made = fleet(0, hold_s=0.7)
    waits = made.route(request("a", HOT), since)
    wake = made.wake_at()
    assert wake is not None
    assert (wake, waits.until) == (since + 0.7, wake)  # type: ignore[union-attr]
    refused = made.route(request("a", HOT), wake)
    assert not isinstance(refused, Decision)
    assert (refused.expired, made.wake_at()) == (True, None)


def test_a_request_that_waits_is_woken_though_another_one_was_looked_at_since() -> None:
    """The other one must avoid the worker that has become free."""
    made = fleet(2, bound=1)
    for id in "ab":
        routed(made, request(id, HOT), 0.0)
    assert not isinstance(made.route(request("c", HOT), 1.0), Decision)
    finish(made, "a", 2.0)
    assert not isinstance(made.route(request("d", HOT, avoid=frozenset({"w0"})), 2.0), Decision)
    assert made.wake_at() == 2.0
    assert routed(made, request("c", HOT), 2.0).worker == "w0"
    assert made.wake_at() == 12.0


def test_pages_that_several_streams_share_count_once_for_each_worker() -> None:
    """`dynamo#14157`: ten streams that share 90 %. Load is what the worker reports, and since then new
    pages."""
    made = fleet(1)
    made.cached("w0", Shelf.L1, 0.0, prompt("comm", 90))
    made.report("w0", report(0.0, protected=90), 0.0)
    for n in range(10):
        routed(made, request(f"s{n}", prompt("comm", 90) + prompt(f"t{n}", 9), tail=15), 0.5)
    assert made.loads(0.5)["w0"].pages == (90 + 10 * 10) / 10_000
    made.report("w0", report(1.0, protected=190), 1.0)
    assert made.loads(1.0)["w0"].pages == 190 / 10_000


def test_nothing_is_left_of_thousands_of_requests_whatever_their_endings() -> None:
    """`production-stack#1072`, `ray#61755`, `ray#61551`: maps and counters that only grew."""
    made = fleet(bound=3, sessions=50)
    drawn = random.Random(1)
    alive: list[str] = []
    now = 0.0
    for n in range(3000):
        now += 0.01
        pages = prompt(f"k{drawn.randrange(9)}", drawn.randrange(30))
        asked = request(str(n), pages, session=f"s{drawn.randrange(99)}")
        if isinstance(made.route(asked, now), Decision):
            alive.append(str(n))
        elif drawn.random() < 0.5:
            made.progress(str(n), Stage.CANCELLED, now)
        while len(alive) > 8:
            id = alive.pop(drawn.randrange(len(alive)))
            if drawn.random() < 0.6:
                made.progress(id, Stage.FIRST_TOKEN, now)
            made.progress(id, drawn.choice([Stage.ENDED, Stage.FAILED, Stage.CANCELLED]), now)
    for id in [*alive, *made._waiting]:
        made.progress(id, Stage.CANCELLED, now)
    made.report("w0", report(now + 99), now + 99)
    nothing_left(made)
    assert made.counters.late == 0
    assert len(made._homes) <= 50


def test_a_few_huge_cold_prompts_do_not_ruin_the_warm_ones() -> None:
    """`dynamo#12806`: 2 of 200 requests are 100 times as long. Warm requests wait for none of them, and they
    are not put off themselves."""
    made = fleet()
    workers = OneByOne(made, names())
    arrivals = []
    for n in range(200):
        huge = n in (50, 51)
        pages = prompt(f"h{n}", 2000) if huge else prompt(f"w{n % 4}", 20)
        arrivals.append((0.02 * n, request(f"{'huge' if huge else 'warm'} {n}", pages)))
    workers.run(arrivals)
    warm = sorted(done.ttft for id, done in workers.done.items() if id.startswith("warm"))
    huge = [done for id, done in workers.done.items() if id.startswith("huge")]
    assert warm[int(0.95 * len(warm))] < 0.65  # a cold one of them takes 0.321
    assert max(done.ttft for done in huge) < 33.5
    assert len({done.worker for done in huge}) == 2


def test_a_late_first_token_says_nothing_of_what_is_cached() -> None:
    """`semantic-router#1774`."""
    made = fleet(1)
    made.cached("w0", Shelf.L1, 0.0, HOT)
    before = routed(made, request("a", HOT), 0.0).found
    made.progress("a", Stage.FIRST_TOKEN, 60.0, Seen(59.0, 1.0, 0))
    made.progress("a", Stage.ENDED, 60.0)
    assert routed(made, request("b", HOT), 100.0).found == before


def test_prompts_shorter_than_a_page_are_spread_and_match_nothing() -> None:
    """`infera#107`."""
    made = fleet()
    decisions = [routed(made, request(str(n), (), tail=5), 0.0) for n in range(12)]
    assert not made._index._recent
    assert Counter(d.worker for d in decisions) == dict.fromkeys(names(), 3)
    assert {d.available for d in decisions} == {0}


def test_a_worker_that_dies_takes_its_requests_and_its_pages_along() -> None:
    made = fleet()
    home = routed(made, request("a", HOT), 0.0).worker
    assert routed(made, request("b", HOT), 0.0).worker == home
    made.leave(home, 0.1)
    for id in "ab":
        made.progress(id, Stage.FAILED, 0.1)
    again = [routed(made, request(id, HOT), 0.2) for id in "ab"]
    assert home not in {d.worker for d in again}
    assert [(d.available, d.found.flight) for d in again] == [(0, 0), (320, 320)]
    assert made.counters.late == 2


def test_if_the_request_that_computes_fails_the_next_one_takes_its_place() -> None:
    """`llm-d-router#1726` with an abort: the pages are still in flight, now through another request."""
    made = fleet(slack=0.2)
    tails = [prompt(f"t{n}", 1) for n in range(3)]
    home = routed(made, request("a", HOT), 0.0).worker
    for n, tail in enumerate(tails):
        assert routed(made, request(f"b{n}", HOT + tail), 0.0).worker == home
    work = made._bookings.work[home]
    assert (work.tokens, round(work.seconds, 6)) == (321 + 3 * 17, 0.372)
    made.progress("a", Stage.CANCELLED, 0.0)
    assert (work.tokens, round(work.seconds, 6)) == (321 + 3 * 17, 0.372)  # b0 computes them now
    decision = routed(made, request("c", HOT), 0.0)
    assert (decision.worker, decision.found.flight) == (home, 320)
    made.progress("c", Stage.CANCELLED, 0.0)
    made.progress("b0", Stage.FAILED, 0.0)
    decision = routed(made, request("d", HOT), 0.0)  # and now b1
    assert (decision.worker, decision.found.flight) == (home, 320)
    for id in ("b1", "b2", "d"):
        made.progress(id, Stage.CANCELLED, 0.0)
    nothing_left(made)
    assert routed(made, request("e", HOT), 0.0).available == 0


def test_if_a_decode_worker_dies_the_prefills_that_go_on_compute_what_its_requests_would_have() -> None:
    """Roles split: the request that computes ends with its decode worker, the next ones live on at the
    same prefill worker."""
    made = Fleet(FleetConfig())
    made.join("p", profile(role=Role.PREFILL), 0.0)
    for name in ("d0", "d1"):
        made.join(name, profile(role=Role.DECODE), 0.0)
    prompts = [HOT, *(HOT + prompt(f"t{n}", 1) for n in range(3))]
    decode = [routed(made, request(f"r{n}", keys), 0.0).decode for n, keys in enumerate(prompts)]
    assert decode == ["d0", "d1", "d0", "d1"]
    made.leave("d0", 0.0)
    work = made._bookings.work["p"]
    assert (work.tokens, round(work.seconds, 6)) == (321 + 2 * 17, 0.355)  # r1 computes HOT, r3 its own page
    decision = routed(made, request("late", HOT), 0.0)
    assert (decision.available, decision.found.flight) == (320, 320)
    for id in ("r1", "r3", "late"):
        made.progress(id, Stage.CANCELLED, 0.0)
    nothing_left(made)


def test_pages_in_flight_that_do_not_go_on_from_what_is_there_do_not_count() -> None:
    made = fleet(1)
    made.cached("w0", Shelf.L1, 0.0, HOT[:10])
    assert routed(made, request("a", HOT), 0.0).found.l1 == 160
    made.cached("w0", Shelf.L1, 0.0, removed=HOT[:10])
    assert routed(made, request("b", HOT), 0.0).found.total == 0


def test_requests_that_have_answered_hold_no_other_ones_in_memory() -> None:
    made = fleet(1)
    for n in range(3):
        routed(made, request(f"r{n}", HOT + prompt("tail", n)), 0.0)
    books = made._bookings.all
    assert books["r2"].leans is books["r1"]
    made.progress("r2", Stage.FIRST_TOKEN, 0.1)
    assert books["r2"].leans is None
    made.progress("r0", Stage.FIRST_TOKEN, 0.1)
    made.progress("r1", Stage.FIRST_TOKEN, 0.1)
    routed(made, request("late", HOT + prompt("tail", 5)), 0.1)
    assert books["late"].leans is None


def test_a_gap_keeps_the_index_and_a_failed_replay_drops_only_that_worker_s() -> None:
    """`dynamo#14627`: one gap threw the whole index away."""
    made = fleet(2)
    for name in names(2):
        assert made.events(name, Batch(0, (Change(Shelf.L1, HOT),)), 0.0) is None
    wanted = made.events("w0", Batch(2, (Change(Shelf.L1, (), HOT[10:]),)), 0.0)
    assert wanted is not None
    assert (wanted.worker, wanted.first) == ("w0", 1)
    only = frozenset({"w1"})
    assert routed(made, request("a", HOT, avoid=only), 0.0).found.l1 == 320
    made.progress("a", Stage.CANCELLED, 0.0)
    assert made.replay_failed(wanted, 0.0) is None
    assert routed(made, request("b", HOT, avoid=only), 0.0).found.total == 0
    assert routed(made, request("c", HOT), 0.0).worker == "w1"
    assert (made.counters.gaps, made.counters.dropped, made.counters.restarts) == (1, 1, 0)
