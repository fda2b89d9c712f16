"""Refresh: what a pass may change, when it runs, and that the off switch leaves everything else alone."""

from __future__ import annotations

import random

import pytest

from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import Eviction, Flight, Order, Publication, Refresh
from hotprefix.kernel.plan import StepPlan
from hotprefix.kernel.request import Namespace
from tests.support.drive import Driver

A, B, C = ([n + 30 * base for n in range(20)] for base in range(3))


def cached(*prompts: list[int], pages: int = 64, **config: object) -> Driver:
    """Each prompt's 5 pages in the tree, the first one oldest; one slot, taken by a request that decodes."""
    d = Driver(pages, 4, **({"max_running": 1} | config))
    for n, prompt in enumerate(prompts):
        d.submit(f"warm{n}", prompt, 1)
        d.run()
    d.submit("busy", [96] * 4, 24)
    d.step()
    return d


def recency(d: Driver, prompt: list[int]) -> int:
    match = d.kernel._s.l1.tree.lookup(Namespace(), tk.encode(prompt), len(prompt) // 4)
    assert match is not None
    return match.node.last_access


def test_the_head_ends_most_recent() -> None:
    d = cached(A, B, C)
    for name, prompt in (("a", A), ("b", B), ("c", C)):
        d.submit(name, [*prompt, 1], 1)
    d.step()
    assert recency(d, A) > recency(d, B) > recency(d, C)


def test_it_runs_while_the_batch_is_full() -> None:
    """Nobody can be admitted in any of these steps, which is when prefixes are lost."""
    d = cached(A, B)
    d.submit("a", [*A, 1], 1)
    before = d.kernel.counters.refresh_passes
    for n in range(5):
        plan = d.step()
        assert [c.request for c in plan.chunks] == ["busy"]
        assert d.kernel.counters.refresh_passes == before + n + 1
        assert d.kernel.counters.refresh_touches == n + 1
    assert recency(d, A) > recency(d, B)


def test_a_pass_moves_recency_and_nothing_else() -> None:
    d = cached(A, B, session_pages=100)
    d.submit("a", [*A[:12], 77], 1)
    seq = next(iter(d.kernel._s.queue))
    tree = d.kernel._s.l1.tree
    status, matched = d.kernel.status(), seq.matched_at_enqueue
    pins = {id(node): node.pins for node in tree.walk_nodes()}
    hits = sum(node.hits for node in tree.walk_nodes())
    d.kernel._planner._refresh.run()
    assert d.kernel.status().l1 == status.l1
    assert (seq.matched_at_enqueue, seq.handle, seq.table, seq.computed) == (matched, None, [], 0)
    assert all(node.pins == pins.get(id(node), 0) for node in tree.walk_nodes())
    assert sum(node.hits for node in tree.walk_nodes()) == hits
    plan = d.plan()
    assert (plan.fetches, plan.restores, plan.saves) == ((), (), ())


def test_the_unmatched_suffix_gains_nothing() -> None:
    """A run whose first 3 pages are wanted is split there; the rest stays as old as it was."""
    d = cached(A, B)
    age = recency(d, A)
    d.submit("a", [*A[:12], 77], 1)
    d.step()
    assert recency(d, A) == age
    assert recency(d, A[:12]) > recency(d, B)
    nodes = d.kernel.status().tree_nodes
    for _ in range(5):
        d.step()
    assert d.kernel.status().tree_nodes == nodes


def test_the_period_skips_passes() -> None:
    d = cached(A, refresh_every=3)
    d.submit("a", [*A, 1], 1)
    touches = []
    for _ in range(9):
        d.step()
        touches.append(d.kernel.counters.refresh_touches)
    assert [later - now for now, later in zip(touches, touches[3:], strict=False)] == [1] * 6


def test_a_window_of_one_looks_at_the_head_of_the_queue() -> None:
    d = cached(A, B, refresh_window=1)
    ages = recency(d, A), recency(d, B)
    d.submit("a", [*A, 1], 1)
    d.submit("b", [*B, 1], 1)
    d.step()
    assert recency(d, A) > ages[0]
    assert recency(d, B) == ages[1]


def test_a_waiting_requests_match_is_found_again_after_the_tree_has_changed() -> None:
    """Its memo is of an empty namespace first, then of a shorter prefix; each pass sees what is there."""
    d = Driver(64, 4, max_running=1)
    d.submit("busy", A, 12)
    d.submit("a", [*A, 1], 1)
    for _ in range(4):
        d.step()
    assert d.kernel.counters.refresh_touches > 0
    d.kernel.flush(d.now)
    d.step()
    d.run().assert_cold_equal()


# -- queue_informed -------------------------------------------------------------------------------


def test_queue_informed_takes_from_the_unwanted_first_and_moves_no_recency() -> None:
    d = cached(A, B, pages=12, refresh=Refresh.QUEUE_INFORMED)  # 5 + 5 + 1, one free
    ages = recency(d, A), recency(d, B)
    d.submit("a", [*A, 1], 1)
    while d.kernel.counters.evicted_pages < 3:
        d.step()
    assert recency(d, A) == ages[0]
    match = d.kernel._s.l1.tree.lookup(Namespace(), tk.encode(B), 5)
    assert match is not None
    assert match.pages == 2
    assert d.kernel.counters.refresh_touches == 0
    d.run().assert_cold_equal()


def test_queue_informed_pins_nothing() -> None:
    """All that is cached is wanted, and yet a request that needs the whole pool runs."""
    d = cached(A, B, pages=12, refresh=Refresh.QUEUE_INFORMED, max_running=2)
    d.submit("whole", [5] * 30, 8, priority=-1)
    d.submit("a", [*A, 1], 1)
    d.submit("b", [*B, 1], 1)
    d.run().assert_cold_equal()
    assert d.kernel.counters.stalls == 0


def test_of_two_branches_only_the_wanted_one_is_spared() -> None:
    left, right = [*A[:8], *B[:8]], [*A[:8], *C[:8]]
    d = cached(left, right, pages=8, refresh=Refresh.QUEUE_INFORMED)  # 2 + 2 + 2 + 1, one free
    d.submit("left", [*left, 1], 1)
    while d.kernel.counters.evicted_pages < 2:
        d.step()
    tree = d.kernel._s.l1.tree
    kept = [tree.lookup(Namespace(), tk.encode(p), 4) for p in (left, right)]
    assert [m.pages for m in kept if m is not None] == [4, 2]


# -- the off switch -------------------------------------------------------------------------------


def program(seed: int, **config: object) -> list[StepPlan]:
    """Plans of a random run under pressure."""
    rng = random.Random(seed)
    fixed: dict[str, object] = {
        "order": rng.choice(list(Order)), "eviction": rng.choice(list(Eviction)),
        "publication": rng.choice(list(Publication)), "flight": rng.choice(list(Flight)),
        "max_running": rng.choice([1, 3]), "max_batched_tokens": 32,
    }  # fmt: skip
    pages = rng.choice([14, 30])
    d = Driver(pages, 4, **(fixed | config))
    for n in range(60):
        if rng.random() < 0.4:
            base = rng.choice([A, B, C])
            d.submit(f"r{n}", [*base[: rng.randrange(1, 20)], rng.randrange(90)], rng.randrange(1, 12))
        d.step()
    d.run().assert_cold_equal()
    return d.plans


@pytest.mark.parametrize("seed", range(12))
def test_switched_off_it_changes_nothing_else(seed: int) -> None:
    """Off, a window of nothing, and an informed eviction that nobody informs: the very same plans."""
    off = program(seed, refresh=Refresh.OFF)
    assert repr(off) == repr(program(seed, refresh=Refresh.WINDOW, refresh_window=0))
    assert repr(off) == repr(program(seed, refresh=Refresh.QUEUE_INFORMED, refresh_window=0))
    assert repr(off) == repr(program(seed, refresh=Refresh.WINDOW, refresh_every=10**9))


def test_the_programs_above_do_differ_where_refresh_is_on() -> None:
    assert any(
        repr(program(seed, refresh=Refresh.OFF)) != repr(program(seed, refresh=Refresh.WINDOW))
        for seed in range(12)
    )
