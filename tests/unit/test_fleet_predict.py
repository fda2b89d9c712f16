"""Predicted first tokens, reckoned by hand: a token costs 1 ms and 1,000 bytes, pages have 16 tokens."""

from __future__ import annotations

import pytest

from hotprefix.fleet.config import FleetConfig, Term
from hotprefix.fleet.correction import BOUNDS, Errors, Ratio
from hotprefix.fleet.fleet import Fleet
from hotprefix.fleet.records import Decision, LinkSpeed, Profile, Role, Seen, Shelf, Stage
from tests.support.fleet import finish, profile, prompt, report, request, routed, token_prices

HOT = prompt("hot", 100)  # 1,600 tokens
MB_S = LinkSpeed(0.01, 1e6)  # 1 ms a token, after 10 ms
QUICK = LinkSpeed(0.01, 1e7)  # 0.1 ms a token


def fleet(*profiles: Profile, without: tuple[Term, ...] = (), **config: float) -> Fleet:
    made = Fleet(FleetConfig(terms=frozenset(Term) - set(without), **config))  # type: ignore[arg-type]
    for number, found in enumerate(profiles):
        made.join(f"w{number}", found, 0.0)
    return made


def one(**more: object) -> Profile:
    return profile(kv_token_bytes=1000, **more)  # type: ignore[arg-type]


def test_the_queue_is_what_stands_there_less_what_time_has_done_of_its_first() -> None:
    made = fleet(one())
    assert routed(made, request("a", (), tail=300), 0.0).parts.first == pytest.approx(0.3)
    assert routed(made, request("b", (), tail=200), 0.1).parts[:2] == pytest.approx((0.2, 0.0))
    assert routed(made, request("c", (), tail=100), 5.0).parts.queue == pytest.approx(
        0.2
    )  # b cannot have begun
    finish(made, "a", 5.0)
    assert routed(made, request("d", (), tail=100), 5.1).parts.queue == pytest.approx(0.2)  # b began at 5.0


def test_the_prompt_is_computed_in_chunks_beside_the_decodes() -> None:
    """Chunks of 100 tokens, of which a decode takes one; 5 ms a step, 2 ms a decode in it."""
    prices = token_prices(0.001, 0.002, 0.005)
    made = fleet(Profile(prices, 1000, 16, 100, 10))
    assert routed(made, request("a", (), tail=250), 0.0).parts.compute == pytest.approx(3 * 0.005 + 0.25)
    made.progress("a", Stage.FIRST_TOKEN, 1.0, Seen(compute_s=0.265))
    parts = routed(made, request("b", (), tail=299), 1.0).parts
    assert parts.compute == pytest.approx(4 * (0.005 + 0.002) + 0.299)  # 99, 99, 99 and 2 tokens
    token_s = 0.001 + 0.005 / 100  # in a full step
    assert parts.delay == pytest.approx(299 * token_s)  # of the one that decodes
    assert parts.behind == pytest.approx(299 * token_s / 8)  # no other stands there, but one may come


def test_requests_that_share_a_step_do_not_each_wait_for_one() -> None:
    """64 prompts of 16 tokens at once: the last one's queue is half a step, not 63 steps."""
    made = fleet(Profile(token_prices(0.00001, 0.0, 0.01), 10_000, 16, 2048, 64))
    parts = [routed(made, request(f"r{n}", (), tail=16), 0.0).parts for n in range(64)]
    assert parts[0].first == pytest.approx(0.01 + 0.00016)
    assert parts[63].queue == pytest.approx(63 * (0.00016 + 0.01 * 16 / 2048))
    assert parts[63].compute == pytest.approx(parts[0].compute), "its own step is whole"


def test_restoring_overlaps_with_the_queue() -> None:
    """1,600 tokens of L2 in 0.17 s behind a queue of 0.5 s, and one token to compute."""
    made = fleet(one(restore=QUICK))
    made.cached("w0", Shelf.L2, 0.0, HOT)
    routed(made, request("a", (), tail=500), 0.0)
    decision = routed(made, request("b", HOT), 0.0)
    assert decision.found == (0, 1600, 0, 0, 0)
    assert decision.parts[:4] == pytest.approx((0.5, 0.17, 0.0, 0.001))
    assert decision.parts.first == pytest.approx(0.501)


def test_what_overlaps_does_not_add_up_in_the_choice_either() -> None:
    """0.501 s at the worker that restores while it is busy, 0.601 s at the idle one."""
    made = fleet(one(restore=QUICK), one(), slack=0.0)
    made.cached("w0", Shelf.L2, 0.0, HOT)
    made.cached("w1", Shelf.L1, 0.0, HOT[:62])
    routed(made, request("a", (), tail=500, avoid=frozenset({"w1"})), 0.0)
    decision = routed(made, request("b", HOT), 0.0)
    assert (decision.worker, decision.parts.first) == ("w0", pytest.approx(0.501))
    assert decision.runners_up[0].parts.first == pytest.approx(0.609)


def test_pages_of_l3_pass_both_links() -> None:
    made = fleet(one(restore=QUICK, fetch=QUICK))
    made.cached("w0", Shelf.L1, 0.0, HOT[:10])
    made.cached("w0", Shelf.L2, 0.0, HOT[:40])
    made.cached("w0", Shelf.L3, 0.0, HOT)
    decision = routed(made, request("a", HOT), 0.0)
    assert decision.found == (160, 480, 960, 0, 0)
    assert decision.parts.restore == pytest.approx(0.01 + 0.096 + 0.01 + 0.144)


@pytest.mark.parametrize(("links", "found"), [({"restore": MB_S}, 0), ({}, 0), ({"restore": QUICK}, 1600)])
def test_pages_that_are_computed_sooner_than_restored_or_have_no_link_do_not_count(
    links: dict[str, LinkSpeed], found: int
) -> None:
    made = fleet(one(**links))
    made.cached("w0", Shelf.L2, 0.0, HOT)
    decision = routed(made, request("a", HOT), 0.0)
    assert decision.found.total == found
    assert decision.parts.first == pytest.approx(0.171 if found else 1.601)


@pytest.mark.parametrize(("link", "peer"), [(QUICK, "w0"), (MB_S, None), (None, None)])
def test_a_cold_worker_pulls_where_that_is_quicker_than_computing(
    link: LinkSpeed | None, peer: str | None
) -> None:
    made = fleet(one(), one(pull=link))
    made.cached("w0", Shelf.L1, 0.0, HOT)
    decision = routed(made, request("a", HOT, avoid=frozenset({"w0"})), 0.0)
    assert (decision.peer, decision.found.peer) == (peer, 1600 if peer else 0)
    assert decision.parts.pull == pytest.approx(0.17 if peer else 0.0)
    assert decision.parts.first == pytest.approx(0.171 if peer else 1.601)
    assert decision.copied == (0 if peer else 1600)


def test_restores_and_hand_offs_of_several_requests_add_up_each_once() -> None:
    """What stands on a link before a request is in its prediction, but it is not its own work."""
    slow = LinkSpeed(0.0, 1000.0)  # a token a millisecond
    made = Fleet(FleetConfig())
    made.join("w", profile(token_s=0.1, restore=slow), 0.0)
    made.cached("w", Shelf.L2, 0.0, HOT)
    restores = [routed(made, request(str(n), HOT), 0.0).parts.restore for n in range(4)]
    assert restores == pytest.approx([1.6 * n for n in (1, 2, 3, 4)])
    assert made.loads(0.0)["w"].restore == pytest.approx(4 * 1.6)
    split = Fleet(FleetConfig())
    split.join("p", profile(role=Role.PREFILL), 0.0)
    split.join("d", profile(role=Role.DECODE, hand_off=slow), 0.0)
    parts = [routed(split, request(str(n), (), tail=100), 0.0).parts.hand_off for n in range(4)]
    assert parts == pytest.approx([0.1 * n for n in (1, 2, 3, 4)])
    assert split.loads(0.0)["d"].hand_off == pytest.approx(0.4)
    for id in "0123":
        finish(split, id, 1.0)
        finish(made, id, 1.0) if id != "3" else made.progress(id, Stage.FAILED, 1.0)
    assert (made.loads(1.0)["w"].restore, split.loads(1.0)["d"].hand_off) == (0.0, 0.0)


def test_roles_a_hand_over_and_the_wait_for_a_row() -> None:
    """One prefill worker; the decode workers have one row each, and requests stay for 2 s."""
    rows = {"role": Role.DECODE, "max_running": 1, "hand_off": QUICK}
    made = fleet(one(role=Role.PREFILL, max_batched_tokens=100), one(**rows), one(**rows))
    decisions = [routed(made, request(name, (), tail=200), 0.0) for name in "ab"]
    assert [(d.worker, d.decode) for d in decisions] == [("w0", "w1"), ("w0", "w2")]
    # The last chunk of 100 tokens is what is left to be handed over.
    assert decisions[0].parts[4:6] == pytest.approx((0.02, 0.0))
    for stage, now in ((Stage.FIRST_TOKEN, 1.0), (Stage.ENDED, 3.0)):
        for name in "ab":
            made.progress(name, stage, now)
    third = [routed(made, request(name, (), tail=200), 3.0) for name in "cde"][2]
    assert third.parts.decode_wait == pytest.approx(2.0)
    assert made.loads(3.0)["w0"].decode == 3.0 / 1000
    for name in "cde":
        made.progress(name, Stage.CANCELLED, 3.0)
    made.check()


def test_without_a_decode_worker_a_prefill_worker_serves_none() -> None:
    made = fleet(one(role=Role.PREFILL))
    waited = made.route(request("a", HOT), 0.0)
    assert not isinstance(waited, Decision)
    assert waited.reason == "no_decode_worker"
    made.join("d", one(role=Role.DECODE), 1.0)
    assert made.wake_at() == 1.0
    decision = routed(made, request("a", HOT), 1.0)
    assert (decision.worker, decision.decode, made.wake_at()) == ("w0", "d", None)
    assert decision.parts.hand_off == 0.0  # the link is not known


def test_displacement_is_the_price_of_what_must_go_and_unknown_without_a_report() -> None:
    """101 pages are needed for prompt and output, 30 are free: 71 pages of 16 ms, half of which come back."""
    made = fleet(one(), displacement_weight=1.0)
    assert routed(made, request("a", (), tail=10), 0.0).parts.displacement is None
    finish(made, "a", 0.0)
    made.report("w0", report(0.0, free=30), 0.0)
    assert routed(made, request("b", HOT), 0.0).parts.displacement == pytest.approx(71 * 0.016 / 2)
    assert routed(made, request("c", HOT[:1]), 0.0).parts.displacement == pytest.approx(1 * 0.016 / 2)


def test_unknown_displacement_counts_as_the_others_mean() -> None:
    """w1 has not reported; w0 must evict 100 pages, w2 none. Unknown is not taken for none."""
    made = fleet(one(), one(), one(), displacement_weight=1.0, delay_weight=0.0, slack=0.0)
    made.report("w0", report(0.0, free=1), 0.0)
    made.report("w2", report(0.0, free=200), 0.0)
    decision = routed(made, request("a", HOT), 0.0)
    assert decision.worker == "w2"
    assert [up.worker for up in decision.runners_up] == ["w1", "w0"]
    finish(made, "a", 0.0)
    decision = routed(made, request("b", prompt("b", 100)), 0.0)
    assert [decision.worker, *(up.worker for up in decision.runners_up)] == ["w2", "w1", "w0"]


def test_whether_displaced_pages_are_wanted_is_learnt_from_those_that_come_back() -> None:
    made = fleet(one())
    assert made._wanted.share == 0.5
    made.cached("w0", Shelf.L1, 0.0, removed=tuple(range(80)))  # ten of them are watched
    made.cached("w0", Shelf.L1, 0.0, stored=tuple(range(80)))
    assert made._wanted.share == 11 / 12
    made.cached("w0", Shelf.L1, 0.0, removed=tuple(range(8, 8 * 4107, 8)))
    assert made._wanted.share == 11 / 22


@pytest.mark.parametrize("term", [Term.QUEUE, Term.RESTORE, Term.DELAY, Term.BEHIND, Term.DISPLACEMENT])
def test_a_term_switched_off_is_as_if_its_cost_were_0(term: Term) -> None:
    free = {
        Term.RESTORE: ({"restore": LinkSpeed(0.0, 1e30)}, {}),
        Term.DELAY: ({}, {"delay_weight": 0.0}),
        Term.BEHIND: ({}, {"behind_weight": 0.0}),
        Term.DISPLACEMENT: ({}, {"displacement_weight": 0.0}),
        Term.QUEUE: ({}, {}),
    }[term]
    off = fleet(one(restore=QUICK), one(restore=QUICK), without=(term,))
    costless = fleet(*[one(**{"restore": QUICK, **free[0]})] * 2, **free[1])  # type: ignore[arg-type]
    for made in (off, costless):
        made.cached("w0", Shelf.L2, 0.0, HOT)
        for name in ("w0", "w1"):
            made.report(name, report(0.0, free=10), 0.0)
        if term is not Term.QUEUE:
            routed(made, request("a", prompt("own", 30)), 0.0)
            made.progress("a", Stage.FIRST_TOKEN, 0.1)
    first, second = (routed(made, request("b", HOT), 0.1) for made in (off, costless))
    assert (first.worker, first.found) == (second.worker, second.found)
    assert first.parts.first == pytest.approx(second.parts.first)


def test_without_the_term_queue_no_work_stands_before_a_request() -> None:
    made = fleet(one(), without=(Term.QUEUE,))
    routed(made, request("a", (), tail=500), 0.0)
    assert routed(made, request("b", (), tail=500), 0.0).parts.queue == 0.0


def test_without_the_terms_in_flight_and_pull_nothing_is_had_from_others() -> None:
    made = fleet(one(pull=QUICK), one(pull=QUICK), without=(Term.IN_FLIGHT, Term.PULL))
    routed(made, request("a", HOT), 0.0)
    made.cached("w0", Shelf.L1, 0.0, HOT[:50])
    decision = routed(made, request("b", HOT, avoid=frozenset({"w0"})), 0.0)
    assert (decision.found.total, decision.peer) == (0, None)
    assert routed(made, request("c", HOT, avoid=frozenset({"w1"})), 0.0).found == (800, 0, 0, 0, 0)


def test_a_worker_without_a_report_is_as_loaded_as_the_others_on_average() -> None:
    """`llm-d-router#2650`: unknown is neither 0 nor the best."""
    made = fleet(one(), one(), one())
    made.report("w0", report(0.0, tokens=800), 0.0)
    made.report("w1", report(0.0, tokens=600), 0.0)
    decision = routed(made, request("a", (), tail=10), 0.0)
    assert (decision.worker, decision.unknown, made.counters.unknown) == ("w1", (), 0)
    queues = {found.worker: found.parts.queue for found in decision.runners_up}
    assert queues == pytest.approx({"w0": 0.8, "w2": 0.7})
    only = routed(made, request("b", (), tail=10, avoid=frozenset({"w0", "w1"})), 0.0)
    assert (only.unknown, only.age_s, made.counters.unknown) == (("report",), None, 1)


# -- correction ------------------------------------------------------------------------------------


def test_a_token_in_the_step_of_others_teaches_nothing_of_compute() -> None:
    made = fleet(Profile(token_prices(0.00001, 0.0, 0.01), 10_000, 16, 8192, 64))
    routed(made, request("small", (), tail=16), 0.0)
    made.progress("small", Stage.FIRST_TOKEN, 0.09, Seen(queue_s=0.0, compute_s=0.09))
    large = routed(made, request("large", (), tail=8000), 0.1).parts.compute
    assert large == pytest.approx(0.09), "uncorrected, though the small one took nine times as long"
    made.progress("large", Stage.FIRST_TOKEN, 0.28, Seen(queue_s=0.0, compute_s=0.18))
    assert routed(made, request("next", (), tail=8000), 0.3).parts.compute == pytest.approx(0.18)


def test_a_worker_s_queue_and_compute_are_corrected_apart_by_the_median() -> None:
    made = fleet(one(), window=3)
    for number, slow in enumerate((2.0, 2.0, 7.0, 2.0)):
        name = f"r{number}"
        routed(made, request(name, (), tail=100), float(number))
        finish(made, name, number + 0.5, Seen(0.0, 0.1 * slow))
    assert routed(made, request("a", (), tail=100), 9.0).parts.compute == pytest.approx(0.2)
    behind = routed(made, request("b", (), tail=100), 9.0)
    assert behind.parts[:1] == pytest.approx((0.2,))
    finish(made, "a", 9.2, Seen(0.0, 0.2))
    finish(made, "b", 9.9, Seen(0.6, 0.2))
    routed(made, request("c", (), tail=100), 10.0)
    assert routed(made, request("d", (), tail=100), 10.0).parts.queue == pytest.approx(0.6)


def test_without_observed_parts_only_requests_that_did_not_wait_teach() -> None:
    made = fleet(one())
    routed(made, request("a", (), tail=100), 0.0)
    routed(made, request("b", (), tail=100), 0.0)
    made.progress("b", Stage.FIRST_TOKEN, 5.0)
    assert made._members["w0"].compute.value == 1.0
    made.progress("a", Stage.FIRST_TOKEN, 5.0)
    assert made._members["w0"].compute.value == 8.0  # 50 times, and at most 8


def test_a_ratio_is_the_median_of_its_window() -> None:
    ratio = Ratio(4)
    for observed in (1.0, 2.0, 3.0, 100.0):
        ratio.learn(observed, 1.0)
    assert ratio.value == 2.5
    ratio.learn(0.0001, 1.0)
    ratio.learn(1.0, 0.0)
    assert ratio.value == 2.5
    for _ in range(4):
        ratio.learn(0.5, 1.0)
    assert ratio.value == 0.5


def test_errors_tell_bias_quantiles_and_a_histogram() -> None:
    errors = Errors()
    assert (errors.bias, errors.quantile(0.5)) == (None, None)
    for off in (0.0005, -0.009, 0.009, 0.3):
        errors.add(1.0 + off, 1.0)
    assert errors.bias == pytest.approx(0.300_5 / 4)
    assert errors.quantile(0.5) == 0.01
    assert errors.quantile(0.95) == BOUNDS[13] == 0.398107
    errors.add(0.0, 1000.0)
    assert errors.quantile(1.0) == float("inf")
    assert sum(errors.histogram) == errors.count == 5


def test_the_fleet_publishes_how_far_it_was_off() -> None:
    made = fleet(one(), one())
    decision = routed(made, request("a", (), tail=100), 0.0)
    made.progress("a", Stage.SENT, 0.5)
    made.progress("a", Stage.FIRST_TOKEN, 0.7)
    made.progress("a", Stage.FIRST_TOKEN, 0.9)
    assert made.error.count == made.errors()[decision.worker].count == 1
    assert made.error.bias == pytest.approx(0.1 - 0.2)
