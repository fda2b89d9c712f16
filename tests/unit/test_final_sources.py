"""Where a reused token finally came from, and what became of the pages that a request matched on arrival:
small cases by hand, the kernel's counts beside what drivers, records and replays are told."""

from __future__ import annotations

import pytest

from hotprefix.kernel import events as ev
from hotprefix.kernel.config import Flight, Order, Publication, Refresh, Write
from hotprefix.kernel.sources import Source, Taken, Use, used
from tests.support.drive import Driver
from tests.unit.test_tiers import LONG, NEVER, PAGE, evict_all, in_storage, tiered

HELD = {"publication": Publication.STEP, "flight": Flight.COALESCED}


def in_host(d: Driver) -> Driver:
    """Leave LONG's pages in L2 and nowhere else."""
    d.submit("warm", LONG, 1)
    d.run()
    d.kernel._s.l1.flush()
    return d


def counted(d: Driver) -> tuple[int, int, int]:
    count = d.kernel.counters
    return (
        count.cached_tokens - count.cached_host_tokens - count.cached_storage_tokens,
        count.cached_host_tokens,
        count.cached_storage_tokens,
    )


# -- final sources --------------------------------------------------------------------------------


def test_all_that_take_a_page_in_the_step_that_copies_it_have_it_from_l2() -> None:
    d = in_host(tiered(storage=False))
    for name in "bcd":
        d.submit(name, [*LONG[:40], ord(name) % 90], 1)
    d.run().assert_cold_equal()
    assert [d.sources[name] for name in "bcd"] == [(0, 40, 0)] * 3
    assert counted(d) == (0, 120, 0)
    assert d.kernel.tier_counters[0].restored == 10, "the link carried each page once"


def test_one_that_may_not_read_it_in_that_step_waited_for_the_same_copy() -> None:
    """With `step` publication the second is held back until the step has ended, in `schedule` it is not: the
    source does not depend on that."""
    d = in_host(tiered(storage=False, **HELD))
    d.submit("b", LONG, 1)
    d.submit("c", LONG, 1)
    d.run().assert_cold_equal()
    assert len([plan for plan in d.plans if plan.restores]) == 1
    assert [d.sources[name] for name in "bc"] == [(0, 40, 0)] * 2


def test_what_was_in_l1_when_it_was_admitted_is_l1() -> None:
    d = in_host(tiered(storage=False))
    d.submit("b", LONG, 1)
    d.step()
    d.submit("c", LONG, 1)
    d.run()
    assert [d.sources[name] for name in "bc"] == [(0, 40, 0), (40, 0, 0)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_overlapping_fetches_may_land_in_any_order(order: tuple[int, int]) -> None:
    """The longer one cannot share the shorter one's fetch, so both are under way: whichever lands first, both
    waited for L3, and L3's link is told of its own bytes by its own counter."""
    d = in_storage(tiered(), LONG)
    d.storage_delay = NEVER
    d.submit("short", LONG[:22], 1)
    d.submit("long", LONG, 1)
    d.step()
    fetches = sorted(d.fetches)
    assert len(fetches) == 2
    for place in order:
        d.land(fetches[place])
    d.run().assert_cold_equal()
    assert (d.sources["short"], d.sources["long"]) == ((0, 0, 20), (0, 0, 40))
    assert counted(d) == (0, 0, 60)
    assert d.kernel.tier_counters[0].landed == 10


def test_one_that_came_when_the_pages_had_landed_has_them_from_l2() -> None:
    """The first waited for L3, the second did not; both take them in the step that copies them to L1."""
    d = in_storage(tiered(max_running=2), LONG)
    d.storage_delay = NEVER
    d.submit("first", LONG, 1)
    d.step()
    d.land(next(iter(d.fetches)))
    d.submit("second", LONG, 1)
    d.run().assert_cold_equal()
    assert (d.sources["first"], d.sources["second"]) == ((0, 0, 40), (0, 40, 0))


def test_a_page_of_l2_that_came_from_l3_and_then_again_from_l1_is_l2() -> None:
    """What a number of a landing tells ends with the page's stay in L2."""
    d = in_storage(tiered(host=12), LONG)
    d.submit("b", LONG, 1)
    d.run()
    host = d.kernel._s.host
    assert host is not None
    landed = [page for node in host.tier.tree.walk_nodes() for page in node.pages if host.landed(page)]
    assert len(landed) == 6, "a fetch may use half of L2"
    host.tier.flush()
    d.kernel._s.l1.flush()
    d.submit("other", [50 + i % 40 for i in range(41)], 1, salt="t")
    d.run()
    saved = [page for node in host.tier.tree.walk_nodes() for page in node.pages]
    assert set(saved) & set(landed)
    assert not any(host.landed(page) for page in saved)


def test_a_restore_whose_step_fails_is_no_reuse_of_anybody() -> None:
    d = in_host(tiered(storage=False))
    d.submit("b", LONG, 1)
    d.submit("c", LONG, 1)
    d.executor.fail_next = 1
    d.run().assert_cold_equal()
    assert counted(d) == tuple(sum(d.sources[n][tier] for n in "bc") for tier in range(3))
    assert d.computed["b"] + d.computed["c"] + sum(d.sources["b"] + d.sources["c"]) == 82


# -- retention ------------------------------------------------------------------------------------


def lost_and_computed_by_another() -> tuple[Driver, list[ev.Event]]:
    """C arrives with A's 4 pages in L1 and waits behind B, whose growth evicts them; D, more important,
    computes the same prefix again; then C starts and finds as many pages as on arrival."""
    events: list[ev.Event] = []
    d = Driver(8, PAGE, sink=events.append, max_running=1, refresh=Refresh.OFF, order=Order.PRIORITY)
    prefix = list(range(16))
    d.submit("a", [*prefix, 20], 1)
    d.run()
    d.submit("b", [90] * 4, 29)
    d.step()
    d.submit("c", [*prefix, 21], 1, priority=5)
    assert d.kernel._s.sequences["c"].matched_at_enqueue == 16
    while "b" not in d.finish:
        d.step()
    d.submit("d", [*prefix, 22], 1)
    d.run().assert_cold_equal()
    return d, events


def test_pages_that_another_computed_again_are_lost_and_regained_not_retained() -> None:
    d, events = lost_and_computed_by_another()
    count = d.kernel.counters
    admitted = next(e for e in events if isinstance(e, ev.Admitted) and e.request == "c")
    assert (admitted.matched_at_enqueue, admitted.matched) == (16, 16), "by their number nothing is lost"
    use = next(e.use for e in events if isinstance(e, ev.Prefilled) and e.request == "c")
    assert (use.retained, use.regained, use.device) == (0, 16, 16)
    assert (count.retained_tokens, count.lost_waiting_tokens, count.lost_regained_tokens) == (0, 16, 16)
    assert d.sources["c"] == (16, 0, 0)


@pytest.mark.parametrize("write", list(Write))
def test_the_parts_of_a_hit_add_up_whatever_becomes_of_it(write: Write) -> None:
    d = tiered(pages=24, host=6, storage=False, write=write, max_running=1, refresh=Refresh.OFF)
    d.submit("a", LONG, 1)
    d.run()
    d.submit("b", [70] * 60, 9)
    d.step()
    d.submit("c", LONG, 1)
    hit = d.kernel._s.sequences["c"].matched_at_enqueue
    d.run().assert_cold_equal()
    count = d.kernel.counters
    lost = (
        count.lost_regained_tokens + count.lost_host_tokens + count.lost_storage_tokens
        + count.lost_recomputed_tokens
    )  # fmt: skip
    assert count.lost_waiting_tokens == lost > 0
    assert count.retained_tokens + lost == hit > 0


# -- the one function -----------------------------------------------------------------------------


def test_a_chunk_by_hand() -> None:
    """A prompt of 100 tokens, of which 60 were matched on arrival; 32 of them in L1 all along."""
    taken = [
        Taken(0, 32, Source.DEVICE, same=True), Taken(32, 40, Source.DEVICE), Taken(40, 48, Source.HOST),
        Taken(48, 56, Source.STORAGE),
    ]  # fmt: skip
    use = used(taken, 56, 72, reached=0, prompt=100, hit=60)
    assert use == Use(
        40, 8, 8, prompt=16, retained=32, regained=8, restored_host=8, restored_storage=8, recomputed=4
    )
    assert (use.reused, use.lost, use.again) == (56, 28, 0)


def test_after_a_retraction_nothing_below_what_was_reached_counts_as_reuse() -> None:
    """A prompt of 10, 5 outputs said (14 positions computed), back in the queue: 8 positions are still
    cached, the others are computed again, and the last output's for the first time."""
    use = used([Taken(0, 8, Source.HOST)], 8, 15, reached=14, prompt=10, hit=8)
    assert use == Use(prompt=2, outputs=5, again_prompt=2, again_outputs=4)


def test_recomputed_outputs_are_no_prompt_tokens() -> None:
    """Retracted while it decoded: the prompt was computed twice, and each output's position as often as that
    is so; the parts of computation add up without one too many for each retraction."""
    d = Driver(9, PAGE, output_reserve=0.0, max_running=2)
    d.submit("a", list(range(8)), 20)
    d.submit("b", list(range(40, 48)), 20)
    d.run().assert_cold_equal()
    count = d.kernel.counters
    assert count.retractions > 0
    assert count.computed_prompt_tokens - count.recomputed_prompt_tokens + count.cached_tokens == 16
    again = count.recomputed_tokens - count.recomputed_prompt_tokens
    assert count.computed_output_tokens - again == 2 * 19


# -- look-ups -------------------------------------------------------------------------------------


def test_one_that_may_take_nothing_does_not_look_up() -> None:
    d = Driver(40, PAGE)
    d.submit("a", LONG, 1)
    d.run()
    d.submit("logits of all", LONG, 1, reuse_limit=0)
    d.submit("b", LONG, 1)
    d.run()
    count = d.kernel.counters
    assert (count.lookups, count.queried_tokens, count.hits, count.prompt_tokens) == (2, 82, 1, 123)


def test_where_the_cache_is_off_nobody_looks_up() -> None:
    d = Driver(40, PAGE, prefix_cache=False)
    d.submit("a", LONG, 1)
    d.run()
    count = d.kernel.counters
    assert (count.lookups, count.queried_tokens, count.prompt_tokens) == (0, 0, 41)


def test_evicted_and_restored_for_itself() -> None:
    d = in_host(tiered(pages=24, storage=False))
    evict_all(d)
    d.submit("b", LONG, 1)
    d.run()
    assert d.sources["b"] == (0, 40, 0)
