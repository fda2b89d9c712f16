"""Coalesced flights: each page is computed once, by whoever gets there first, and nobody waits for ever."""

from __future__ import annotations

import pytest

from hotprefix.kernel.config import Capabilities, Flight, Publication
from tests.support.drive import Driver
from tests.support.watch import OnceWatch

LONG = [(13 * i) % 97 for i in range(532)]


def run_watched(d: Driver, after_step: object = None) -> None:
    watch = OnceWatch(d)
    step = 0
    while d.kernel.has_work:
        plan = d.plan()
        assert plan.chunks
        watch.planned(plan)
        d.execute(plan)
        step += 1
        if callable(after_step):
            after_step(step)
    d.assert_cold_equal()
    d.kernel.check()


def needed(prompts: list[list[int]], page: int) -> int:
    """Positions that must be computed: the distinct whole pages, and each prompt's own rest (at least its
    last token's page)."""
    pages: set[tuple[int, ...]] = set()
    rest = 0
    for prompt in prompts:
        whole = (len(prompt) - 1) // page
        pages |= {tuple(prompt[: (k + 1) * page]) for k in range(whole)}
        rest += len(prompt) - whole * page
    return len(pages) * page + rest


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("budget", [2048, 256, 250, 100, 33])
@pytest.mark.parametrize("same_step", [True, False])
@pytest.mark.parametrize("publication", [Publication.FINISH, Publication.SCHEDULE])
def test_a_burst_computes_its_prompt_once(
    page: int, budget: int, same_step: bool, publication: Publication
) -> None:
    """8 identical cold prompts: duplication factor 1.0 whatever the chunks; each follower restores all
    whole pages before its last token."""
    d = Driver(
        5000 // page, page, Capabilities(same_step), publication=publication, max_batched_tokens=budget
    )
    for n in range(8):
        d.submit(f"r{n}", LONG, 3)
    run_watched(d)
    assert d.kernel.counters.computed_prompt_tokens == needed([LONG] * 8, page)
    assert sorted(d.cached.values()) == [0] + [531 // page * page] * 7


@pytest.mark.parametrize("page", [4, 16, 64])
@pytest.mark.parametrize("budget", [300, 100, 67])
@pytest.mark.parametrize("gap", [0, 1, 3])
@pytest.mark.parametrize("same_step", [True, False])
def test_different_tails_and_staggered_arrivals_share_every_common_page(
    page: int, budget: int, gap: int, same_step: bool
) -> None:
    d = Driver(8000 // page, page, Capabilities(same_step), max_batched_tokens=budget)
    prompts = [LONG[: 500 - 60 * n] + [n] * (20 + n) for n in range(6)]
    d.submit("decoding", [1, 2, 3], 60)

    def arrive(step: int) -> None:
        for n, prompt in enumerate(prompts):
            if 1 + gap * n == step:
                d.submit(f"r{n}", prompt, 5)

    run_watched(d, arrive)
    assert len(d.finish) == 7
    assert d.kernel.counters.computed_prompt_tokens == 3 + needed(prompts, page)


@pytest.mark.parametrize("same_step", [True, False])
@pytest.mark.parametrize("edge", range(1, 9))
@pytest.mark.parametrize("in_flight", [True, False])
def test_a_leader_that_leaves_at_a_chunk_edge_costs_nobody_a_step(
    same_step: bool, edge: int, in_flight: bool
) -> None:
    """Nobody waits longer than a step, and no page is computed twice while it is resident."""
    d = Driver(512, 16, Capabilities(same_step), max_batched_tokens=80)
    watch = OnceWatch(d)
    for n in range(4):
        d.submit(f"r{n}", LONG, 3)
    for step in range(1, 30):
        plan = d.plan()
        watch.planned(plan)
        leaves = step == edge and "r0" not in d.finish
        if leaves and in_flight:
            d.abort("r0")
        d.execute(plan)
        if leaves and not in_flight and "r0" not in d.finish:
            d.abort("r0")
        if not d.kernel.has_work:
            break
        if edge < step <= edge + 1 and not any(d.outputs.values()):
            assert sum(c.stop - c.start for c in plan.chunks) == 80, (
                "somebody carries on at once with all of the budget"
            )
    assert not d.kernel.has_work
    d.assert_cold_equal()


def test_a_follower_that_cannot_read_in_the_same_step_pauses_for_that_step_only() -> None:
    d = Driver(256, 4, Capabilities(same_step_reads=False))
    d.submit("leader", LONG[:41], 4)
    d.submit("follower", LONG[:41], 4)
    first = d.step()
    assert {c.request for c in first.chunks} == {"leader"}
    second = d.step()
    assert {c.request: len(c.tokens) // 4 for c in second.chunks} == {"leader": 1, "follower": 1}
    assert d.cached["follower"] == 40


def test_where_it_can_it_reads_in_the_same_step() -> None:
    d = Driver(256, 4)
    for n in range(8):
        d.submit(f"r{n}", LONG[:41], 4)
    assert {c.request: len(c.tokens) // 4 for c in d.step().chunks} == {"r0": 41} | {
        f"r{n}": 1 for n in range(1, 8)
    }
    d.run().assert_cold_equal()


def test_a_rest_of_the_budget_below_a_page_is_left_alone() -> None:
    """Or the follower would compute a part of a page that its leader computes next."""
    d = Driver(64, 16, max_batched_tokens=40)
    for n in range(2):
        d.submit(f"r{n}", LONG[:200], 2)
    assert [(c.request, c.start, c.stop) for c in d.step().chunks] == [("r0", 0, 32)]
    d.run().assert_cold_equal()
    assert d.kernel.counters.computed_prompt_tokens == 192 + 2 * 8


def test_a_rest_below_a_page_is_enough_for_a_prompt_that_ends_in_it() -> None:
    d = Driver(64, 16, max_batched_tokens=40)
    d.submit("long", LONG[:200], 2)
    d.submit("also long", LONG[300:400], 2)
    d.submit("short", [1, 2, 3], 2)
    assert [(c.request, len(c.tokens) // 4) for c in d.step().chunks] == [("long", 32), ("short", 3)]


def test_a_budget_below_a_page_still_gets_on() -> None:
    d = Driver(64, 16, max_batched_tokens=3, max_running=3)
    for n in range(3):
        d.submit(f"r{n}", LONG[:50], 2)
    d.run().assert_cold_equal()


def test_flights_of_two_namespaces_do_not_meet() -> None:
    d = Driver(256, 4)
    d.submit("a", LONG[:41], 2, salt="x")
    d.submit("b", LONG[:41], 2, salt="y")
    d.submit("c", LONG[:41], 2)
    d.run().assert_cold_equal()
    assert set(d.cached.values()) == {0}


@pytest.mark.parametrize("flight", [Flight.NONE, Flight.COALESCED])
def test_two_that_computed_the_same_page_end_up_on_one(flight: Flight) -> None:
    """The later one's table is moved to the page that is kept before its own is freed."""
    d = Driver(64, 4, flight=flight, publication=Publication.STEP)
    for n in range(3):
        d.submit(f"r{n}", LONG[:17], 6)
    d.step()
    l1 = d.kernel.status().l1
    assert d.kernel.counters.duplicate_pages == (8 if flight is Flight.NONE else 0)
    assert l1.protected == 4
    assert l1.owned == (3 if flight is Flight.NONE else 1), "only the parts of the last page"
    d.run().assert_cold_equal()
