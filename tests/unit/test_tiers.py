"""The tiers, fault by fault: what may be copied, restored, fetched, and what of it
counts."""

from __future__ import annotations

import pytest

from hotprefix.errors import ConfigError, ProtocolError
from hotprefix.kernel import events as ev
from hotprefix.kernel.config import Order, Prefetch, Refresh, TierConfig, Write
from hotprefix.kernel.plan import StepPlan
from tests.support.drive import Driver

PAGE = 4
LONG = list(range(41))  # 10 pages and a token
NEVER = 10**9


def tiered(pages: int = 40, host: int = 40, sink: ev.Sink | None = None, **config: object) -> Driver:
    """A driver with an L2 and an L3; `tiers` settings and kernel settings together."""
    names = TierConfig.__dataclass_fields__
    tiers = {
        "min_restore_pages": 1,
        "min_fetch_pages": 1,
        "prefetch": Prefetch.WAIT_COMPLETE,
        "storage": True,
    }
    tiers |= {name: value for name, value in config.items() if name in names}
    rest = {name: value for name, value in config.items() if name not in names}
    return Driver(pages, PAGE, sink=sink, tiers=TierConfig(pages=host, **tiers), **rest)  # type: ignore[arg-type]


def in_storage(d: Driver, *prompts: list[int]) -> Driver:
    """Leave the prompts' pages in L3 and nowhere else, as after a restart."""
    for n, prompt in enumerate(prompts):
        d.submit(f"warm{n}", prompt, 1)
        d.run()
    d.kernel.flush(d.now)
    assert d.kernel.status().l1.free == d.kernel.status().l1.total
    d.plans.clear()
    return d


def moves(d: Driver) -> tuple[int, int, int]:
    """(saves, restores, stores) of all plans so far."""
    return (
        sum(len(p.saves) for p in d.plans),
        sum(len(p.restores) for p in d.plans),
        sum(len(p.stores) for p in d.plans),
    )


def evict_all(d: Driver) -> None:
    """Somebody else takes the whole of L1."""
    d.submit("evictor", [95] * (d.config.total_pages * PAGE - 1), 1, salt="other")
    d.run()


# -- write policies -------------------------------------------------------------------------------


def test_write_through_copies_what_is_published() -> None:
    d = tiered(storage=False)
    d.submit("a", LONG, 1)
    d.run()
    assert moves(d) == (10, 0, 0)


def test_selective_copies_what_is_used_a_second_time() -> None:
    d = tiered(write=Write.SELECTIVE, storage=False)
    d.submit("a", LONG, 1)
    d.run()
    assert moves(d)[0] == 0
    d.submit("b", [*LONG[:20], 77], 1)
    d.run()
    assert moves(d)[0] == 5


def test_write_back_copies_what_is_evicted() -> None:
    d = tiered(pages=12, write=Write.BACK, storage=False)
    d.submit("a", LONG, 1)
    d.run()
    assert moves(d)[0] == 0
    evict_all(d)
    assert moves(d)[0] == 10
    d.submit("b", LONG, 1)
    d.run().assert_cold_equal()
    assert d.sources["b"] == (0, 40, 0)


def test_pages_per_link_are_those_of_steps_that_ran() -> None:
    d = tiered(pages=12)
    d.submit("a", LONG, 1)
    while "a" not in d.finish:
        d.step()
    d.executor.fail_next = 1
    d.run()
    host, _ = d.kernel.tier_counters
    assert (host.saved, host.stored) == (0, 0)
    d.submit("b", LONG, 1)
    d.run()
    evict_all(d)
    d.submit("c", LONG, 1)
    d.run().assert_cold_equal()
    assert d.sources["c"] == (0, 40, 0)
    assert d.kernel.tier_counters[0].restored == 10


# -- L2 is full, or gone (106, 96) ----------------------------------------------------------------


@pytest.mark.parametrize("write", list(Write))
def test_what_found_no_room_in_l2_is_lost_and_not_taken_for_saved(write: Write) -> None:
    """L2 has 2 pages, both protected by moves in flight; the rest is computed again."""
    d = tiered(pages=12, host=2, write=write, storage=False)
    d.submit("a", LONG, 1)
    d.run()
    d.submit("again", LONG, 1)
    d.run()
    evict_all(d)
    host, _ = d.kernel.tier_counters
    assert host.save_no_room > 0
    d.submit("b", LONG, 1)
    d.run().assert_cold_equal()
    assert d.cached["b"] <= 2 * PAGE
    assert d.cached["b"] + d.computed["b"] == len(LONG)


def test_a_store_that_lost_the_third_of_five_pages_gives_two() -> None:
    """A key that was never put, or vanished, ends the hit before it."""
    d = in_storage(tiered(), LONG[:21])
    del d.executor.stored[list(d.executor.stored)[2]]
    d.submit("b", LONG[:21], 1)
    d.run().assert_cold_equal()
    assert d.sources["b"] == (0, 0, 2 * PAGE)


@pytest.mark.parametrize("came", [0, 1, 3, 10])
def test_a_part_of_a_fetch_is_used_as_whole_pages(came: int) -> None:
    """Never more than what came, never a part of a page."""
    d = in_storage(tiered(), LONG)
    d.storage_delay = NEVER
    d.submit("b", LONG, 1)
    d.step()
    d.land(next(iter(d.fetches)), came)
    d.run().assert_cold_equal()
    assert d.sources["b"] == (0, 0, came * PAGE)
    assert d.computed["b"] == len(LONG) - came * PAGE


def test_more_pages_than_were_asked_for_are_an_error() -> None:
    d = in_storage(tiered(), LONG)
    d.storage_delay = NEVER
    d.submit("b", LONG, 1)
    fetch = d.step().fetches[0]
    with pytest.raises(ProtocolError, match="11 pages, 10 were asked for"):
        d.kernel.transfer_done(fetch.id, 11, 1.0, d.now)


# -- slow and late (102) --------------------------------------------------------------------------


def test_a_store_that_hangs_costs_the_timeout_and_its_late_answer_is_dropped() -> None:
    """Nothing is reserved for bytes on their way, so none can land in a page that was
    given to somebody else."""
    d = in_storage(tiered(prefetch=Prefetch.TIMEOUT, prefetch_timeout_s=3.0), LONG)
    d.storage_delay = NEVER
    asked = d.now
    d.submit("b", LONG, 1)
    fetch = d.step().fetches[0]
    while "b" not in d.finish:
        d.step()
    assert d.now - asked <= 3.0 + 2.0
    assert [p.cancels for p in d.plans if p.cancels] == [(fetch.id,)]
    assert d.cached["b"] == 0
    l2 = d.kernel.status().l2
    assert d.kernel.transfer_done(fetch.id, 10, 60.0, d.now) == {}
    assert d.kernel.status().l2 == l2
    d.run().assert_cold_equal()


def test_best_effort_never_waits() -> None:
    d = in_storage(tiered(prefetch=Prefetch.BEST_EFFORT), LONG)
    d.storage_delay = NEVER
    d.submit("b", LONG, 1)
    assert d.step().admissions


def test_others_go_on_while_one_waits_for_its_pages() -> None:
    d = in_storage(tiered(min_fetch_pages=3), LONG)
    d.storage_delay = 20
    d.submit("slow", LONG, 1)
    d.submit("quick", [90] * 9, 1)
    d.step()
    assert "quick" in d.finish
    d.run().assert_cold_equal()
    assert d.sources["slow"] == (0, 0, 40)


# -- abort and failure (109, 107) -----------------------------------------------------------------


def test_an_abort_while_the_prefetch_runs_returns_everything() -> None:
    """An abort while pages are on their way, before and after they have landed."""
    d = in_storage(tiered(max_running=1, min_fetch_pages=3), LONG)
    d.submit("busy", [90] * 9, 20)
    d.storage_delay = 3
    for landed in (False, True):
        d.submit(f"b{landed}", LONG, 1)
        for _ in range(6 if landed else 1):
            d.step()
        l2 = d.kernel.status().l2
        assert l2 is not None
        assert (l2.protected >= 10) == landed
        d.abort(f"b{landed}")
        assert d.kernel.status().fetches == 0
    d.run().assert_cold_equal()
    assert d.kernel.status().l2.protected == 0  # type: ignore[union-attr]


def test_a_fetch_lands_under_its_own_tokens_whoever_still_waits() -> None:
    """Two prompts share their first page; the one whose pages are on their way leaves."""
    first, second = [*range(4), *[9] * 8, 1], [*range(4), *[8] * 8, 1]
    d = in_storage(tiered(), first, second)
    d.storage_delay = 5
    d.submit("a", first, 2)
    d.submit("b", second, 2)
    d.step()
    d.abort("a")
    d.run().assert_cold_equal()
    assert d.sources["b"] == (0, 0, 12)


def test_one_whose_pages_are_all_on_their_way_shares_the_fetch() -> None:
    """Single flight on restores; it goes on for the shorter one when the longer one leaves."""
    d = in_storage(tiered(), LONG)
    d.storage_delay = 5
    d.submit("long", LONG, 2)
    d.submit("short", LONG[:22], 2)
    assert len(d.step().fetches) == 1
    assert d.kernel.tier_counters[1].shared == 1
    d.abort("long")
    assert d.step().cancels == ()
    d.run().assert_cold_equal()
    assert d.sources["short"] == (0, 0, 20)
    host = d.kernel._s.host
    assert host is not None
    assert all(len(n.key) == 4 * PAGE * len(n.pages) for n in host.tier.tree.walk_nodes())


def test_one_that_lacks_more_gets_all_of_it() -> None:
    """The second shares only the first page with what is on its way, yet its own pages come too."""
    first, second = [*range(4), *[9] * 8, 1], [*range(4), *[8] * 16, 1]
    d = in_storage(tiered(), first, second)
    d.storage_delay = 5
    d.submit("a", first, 1)
    d.submit("b", second, 1)
    d.run().assert_cold_equal()
    assert (d.sources["a"], d.sources["b"]) == ((0, 0, 12), (0, 0, 20))


def test_a_failed_step_does_not_meet_a_pin_on_pages_it_was_saving() -> None:
    """Pages land that a save queued for the next step copies as well; then that step fails."""
    d = in_storage(tiered(max_running=1), LONG)
    d.storage_delay = NEVER
    d.submit("busy", [90] * 3, 30)
    d.step()
    d.submit("b", LONG, 1)
    fetch = d.step().fetches[0]
    host, waiting = d.kernel._s.host, next(iter(d.kernel._s.queue))
    assert host is not None
    host.save(waiting.request.namespace, waiting.target_key[:32], [0, 1])  # as another one's end would
    assert d.kernel.transfer_done(fetch.id, 10, 1.0, d.now) == {}
    d.executor.fail_next = 1
    d.step()
    d.run().assert_cold_equal()


def test_a_page_is_read_out_before_it_can_be_given_to_another() -> None:
    """The store gets the bytes under the right key though L1 evicts the page in the very
    next plan."""
    d = tiered(pages=12)
    d.submit("a", LONG, 1)
    while "a" not in d.finish:
        d.step()
    evict_all(d)
    for n, prompt in enumerate((LONG, [95] * 47)):
        d.kernel.flush(d.now)
        d.submit(f"again{n}", prompt, 1, salt=[None, "other"][n])
        d.run()
    d.assert_cold_equal()
    assert d.sources["again0"] == (0, 0, 40)


# -- restore or recompute (114) -------------------------------------------------------------------


def test_slower_than_computing_means_computing() -> None:
    slow = {"compute_s_per_token": 0.001, "restore_s_per_page": 0.005}  # a page takes 0.004 s to compute
    d = tiered(pages=12, storage=False, **slow)
    d.submit("a", LONG, 1)
    d.run()
    evict_all(d)
    d.submit("b", LONG, 1)
    d.run().assert_cold_equal()
    assert d.cached["b"] == 0


def test_a_fetch_that_would_take_longer_is_not_begun() -> None:
    d = in_storage(tiered(compute_s_per_token=0.001, fetch_s_per_page=0.005), LONG)
    d.submit("b", LONG, 1)
    d.run()
    assert not any(p.fetches for p in d.plans)
    assert d.kernel.tier_counters[1].not_worth == 2  # when it was written, and now


def test_a_slow_moment_does_not_rule_a_tier_out_for_ever() -> None:
    """Each refusal makes the next try a little more likely; a tier that is slow indeed is tried rarely."""
    d = in_storage(tiered(compute_s_per_token=0.001, fetch_s_per_page=0.0044, restore_s_per_page=0.0), LONG)
    tried = []
    for n in range(60):
        d.submit(f"b{n}", LONG, 1)
        d.run()
        tried.append(d.sources[f"b{n}"][2] > 0)
        d.kernel.flush(d.now)
        if any(tried):
            break
    assert 5 < len(tried) < 40
    d = tiered(host=100, storage=False, compute_s_per_token=0.001, restore_s_per_page=0.0044)
    d.submit("a", LONG, 1)
    d.run()
    for n in range(40):
        d.kernel._s.l1.flush()
        d.submit(f"r{n}", LONG, 1)
        d.run()
    first = next(n for n in range(40) if d.sources[f"r{n}"][1])
    assert 5 < first < 40


def test_below_the_minimum_size_nothing_moves() -> None:
    for length, fetches in ((13, 0), (17, 1)):
        d = in_storage(tiered(min_fetch_pages=4), LONG)
        d.submit("b", LONG[:length], 1)
        assert len(d.step().fetches) == fetches
    for length, restores in ((13, 0), (17, 4)):
        d = tiered(host=100, min_restore_pages=4, storage=False)
        d.submit("a", LONG, 1)
        d.run()
        evict_all(d)
        d.submit("b", LONG[:length], 1)
        assert len(d.step().restores) == restores


# -- what L1 has and L2 has not -------------------------------------------------------------------


def test_pages_beyond_what_l1_holds_come_although_l2_lacks_its_part() -> None:
    """L2 holds no page without its parents: the fetch begins where L2's copy ends."""
    d = in_storage(tiered(), LONG)
    d.submit("half", LONG[:21], 1)
    d.run()
    host = d.kernel._s.host
    assert host is not None
    host.tier.flush()
    assert host.tier.occupancy().free == 40
    d.submit("b", LONG, 1)
    d.run().assert_cold_equal()
    assert d.sources["b"] == (20, 0, 20)


def lose_l2(d: Driver) -> None:
    host = d.kernel._s.host
    assert host is not None
    host.tier.flush()
    assert host.tier.occupancy().free == host.tier.occupancy().total


def test_what_l1_holds_is_not_worth_a_fetch() -> None:
    d = in_storage(tiered(min_fetch_pages=6), LONG)
    d.submit("half", LONG[:21], 1)
    d.run()
    lose_l2(d)
    d.submit("b", LONG, 1)
    assert d.step().fetches == ()


def test_pages_whose_parents_l2_has_lost_do_not_land() -> None:
    """Nor is such a fetch shared by one that lacks the parents too."""
    d = in_storage(tiered(), LONG)
    d.submit("half", LONG[:21], 1)
    d.run()
    d.storage_delay = NEVER
    d.submit("b", LONG, 1)
    first = d.step().fetches[0]
    assert len(first.keys) == 5
    d.kernel._s.l1.flush()
    lose_l2(d)
    d.submit("c", LONG, 1)
    second = d.step().fetches[0]
    assert len(second.keys) == 10
    d.land(first.id)
    assert d.kernel.status().l2.free == 40  # type: ignore[union-attr]
    d.step()
    d.land(second.id)
    d.run().assert_cold_equal()
    assert d.sources["c"][2] + d.sources["c"][0] == 40


def test_two_that_want_the_same_pages_restore_them_once() -> None:
    d = tiered(pages=24, storage=False)
    d.submit("a", LONG, 1)
    d.run()
    d.kernel._s.l1.flush()
    d.submit("b", LONG, 1)
    d.submit("c", [*LONG[:40], 77], 1)
    d.run().assert_cold_equal()
    assert moves(d)[1] == 10
    assert (d.sources["b"], d.sources["c"]) == ((0, 40, 0), (0, 40, 0)), "the same copy serves both"


def test_after_a_failed_step_pages_are_computed_not_copied_again() -> None:
    """The copy may be what fails."""
    d = tiered(pages=24, storage=False)
    d.submit("a", LONG, 1)
    d.run()
    d.kernel._s.l1.flush()
    d.submit("b", LONG, 1)
    d.executor.fail_next = 1
    assert len(d.step().restores) == 10
    d.run().assert_cold_equal()
    assert moves(d)[1] == 10
    assert d.cached["b"] == 0


# -- prefetches and the queue (176, 72) -----------------------------------------------------------


@pytest.mark.parametrize("policy", list(Prefetch))
@pytest.mark.parametrize("delay", [0, 2, 50])
def test_later_prefetches_never_block_the_head(policy: Prefetch, delay: int) -> None:
    """20 queued requests with 10 pages each in L3, an L2 of 40 pages."""
    prompts = [[n, *range(40)] for n in range(20)]
    d = in_storage(
        tiered(pages=64, prefetch=policy, prefetch_timeout_s=4.0, max_running=2, refresh=Refresh.OFF),
        *prompts,
    )
    d.storage_delay, d.storage_seconds = delay, 0.0
    for n, prompt in enumerate(prompts):
        d.submit(f"q{n}", prompt, 1)
    started: list[str] = []
    for _ in range(2000):
        plan = d.step()
        l2 = d.kernel.status().l2
        assert l2 is not None
        assert l2.protected <= 40
        started += [a.request for a in plan.admissions]
        if not d.kernel.has_work:
            break
    d.assert_cold_equal()
    assert len(started) == 20
    if policy is Prefetch.WAIT_COMPLETE:
        assert sum(source[2] for name, source in d.sources.items() if name[0] == "q") == 20 * 40
    first = [f.request for p in d.plans for f in p.fetches]
    assert first == sorted(first, key=lambda name: int(name[1:])), "fetches start in queue order"


def test_a_small_fetch_does_not_overtake_a_large_one_that_waits_for_room() -> None:
    """Half of L2's 40 pages may be on their way: 10, then 15 find no room, and 5 are not to slip in."""
    prompts = [[n, *range(4 * pages)] for n, pages in enumerate((10, 15, 5))]
    d = in_storage(tiered(pages=64, max_running=1), *prompts)
    d.storage_delay, d.storage_seconds = 3, 0.0
    for n, prompt in enumerate(prompts):
        d.submit(f"q{n}", prompt, 1)
    d.run().assert_cold_equal()
    assert [f.request for p in d.plans for f in p.fetches] == ["q0", "q1", "q2"]
    assert [d.sources[f"q{n}"][2] for n in range(3)] == [40, 60, 20]


def test_one_that_waits_for_l3_holds_no_page_of_l1() -> None:
    """The head needs the whole pool while the one behind it is parked at a transfer."""
    d = in_storage(tiered(pages=12), LONG)
    d.storage_delay = 30
    d.submit("parked", LONG, 1)
    d.step()
    d.storage_delay = 0
    d.submit("whole", [90] * 40, 8)
    d.step()
    d.step()
    assert d.kernel.status().l1.free <= 2
    d.run().assert_cold_equal()
    assert d.kernel.counters.stalls == 0
    assert d.sources["parked"] == (0, 0, 40)


def test_waiting_for_l3_is_no_stall_and_costs_no_session_its_hold() -> None:
    d = in_storage(tiered(session_pages=100), LONG)
    d.submit("turn", [90] * 20, 1, session="s", hold_s=1e6)
    d.run()
    d.storage_delay = 10
    d.submit("b", LONG, 1)
    for _ in range(8):
        assert d.step().stall is None
    assert d.kernel.status().l1.protected == 5
    assert d.kernel.counters.stalls == 0
    d.run()


def test_nobody_is_retracted_for_one_whose_pages_are_still_on_their_way() -> None:
    d = in_storage(tiered(pages=12, order=Order.PRIORITY, preemption=True, output_reserve=1.0), LONG)
    d.storage_delay = 8
    d.submit("low", [90] * 10, 30, priority=2)
    d.step()
    d.submit("high", LONG, 2, priority=0)
    for _ in range(7):
        d.step()
        assert d.kernel.counters.retractions == 0
    d.run().assert_cold_equal()
    assert d.kernel.counters.retractions == 1
    assert d.sources["high"] == (0, 0, 40)


# -- flush (99, 136) ------------------------------------------------------------------------------


@pytest.mark.parametrize("write", list(Write))
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_a_flush_leaves_nothing_behind_in_l2(write: Write, after: int) -> None:
    """Write-back carries nothing over that was flushed, and copies that have not begun are dropped."""
    d = tiered(write=write)
    d.submit("a", LONG, 1)
    d.submit("again", LONG, 1)
    while "again" not in d.finish:
        d.step()
    for _ in range(after):  # copies to L2, then to L3, are on their way
        d.step()
    d.kernel.flush(d.now)
    assert not d.kernel.status().l1.total - d.kernel.status().l1.free
    l2 = d.kernel.status().l2
    assert l2 is not None
    assert l2.free == l2.total
    stored = len(d.executor.stored)
    d.run()
    assert len(d.executor.stored) == stored
    d.executor.stored.clear()
    d.submit("b", LONG, 1)
    d.run().assert_cold_equal()
    assert d.cached["b"] == 0


def test_a_page_that_leaves_one_tier_is_still_known_in_the_next() -> None:
    """Out of L1 it is in L2, out of L2 it is in L3."""
    d = tiered(pages=12, host=12)
    d.submit("a", LONG, 1)
    d.run()
    evict_all(d)
    d.submit("b", LONG, 1)
    d.run()
    assert d.sources["b"] == (0, 4, 24)  # one page was left in L2; half of L2 may be fetched at a time
    d.submit("c", LONG, 1)
    d.run().assert_cold_equal()
    assert d.sources["c"] == (40, 0, 0)


# -- isolation and small pools --------------------------------------------------------------------


def test_a_tenants_pages_in_the_store_are_no_hit_for_another() -> None:
    d = in_storage(tiered(), LONG)
    d.submit("other", LONG, 1, salt="t")
    d.run().assert_cold_equal()
    assert d.cached["other"] == 0


def test_many_prompts_through_an_l2_that_holds_few() -> None:
    """L1 and L2 tiny, everything goes to L3 and comes back."""
    prompts = [[n, 90 - n, *range(n, n + 20), n] for n in range(50)]
    d = tiered(pages=8, host=6)
    for turn in range(2):
        for n, prompt in enumerate(prompts):
            d.submit(f"{turn}-{n}", prompt, 3)
            d.run()
    d.assert_cold_equal()
    assert sum(source[2] for source in d.sources.values()) > 50 * 8


@pytest.mark.parametrize("host", [1, 2, 3])
@pytest.mark.parametrize("write", list(Write))
def test_an_l2_of_almost_no_pages(host: int, write: Write) -> None:
    d = tiered(pages=12, host=host, write=write)
    for n in range(3):
        d.submit(f"a{n}", LONG, 2)
        d.run()
        evict_all(d) if n == 0 else d.kernel.flush(d.now)
    d.assert_cold_equal()


def test_one_page_is_enough_of_an_l2_to_fetch_one() -> None:
    d = in_storage(tiered(host=1, write=Write.THROUGH), LONG[:5])
    d.submit("b", LONG[:5], 1)
    d.run().assert_cold_equal()
    assert d.sources["b"] == (0, 0, 4)


def test_sources_and_events_say_the_same() -> None:
    events: list[ev.Event] = []
    d = in_storage(tiered(sink=events.append), LONG[:21])
    d.submit("b", [*LONG[:20], 5, 6, 7], 1)
    d.run().assert_cold_equal()
    admitted = next(e for e in events if isinstance(e, ev.Admitted) and e.request == "b")
    assert (admitted.matched, admitted.restored_host, admitted.restored_storage) == (0, 0, 20)
    assert d.sources["b"] == (0, 0, 20)
    ended = [e for e in events if isinstance(e, ev.FetchEnded)]
    assert [(e.pages, e.landed) for e in ended if e.pages] == [(5, 5)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pages": 0}, "tiers.pages=0"),
        ({"pages": 1, "fetch_window": 0}, "tiers.fetch_window=0"),
        ({"pages": 1, "prefetch_timeout_s": -1}, "prefetch_timeout_s=-1"),
        ({"pages": 1, "prefetch_timeout_s": float("nan")}, "prefetch_timeout_s=nan"),
        (
            {"pages": 1, "write": "through the roof"},
            "tiers.write=.* give one of Write.THROUGH, Write.SELECTIVE, Write.BACK",
        ),
        ({"pages": 1, "prefetch": "never"}, "Prefetch.BEST_EFFORT, Prefetch.WAIT_COMPLETE, Prefetch.TIMEOUT"),
    ],
)
def test_settings_out_of_range(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TierConfig(**settings)  # type: ignore[arg-type]


def test_plans_without_tiers_carry_nothing() -> None:
    d = Driver(40, PAGE)
    d.submit("a", LONG, 3)
    d.run()
    assert all(p == StepPlan(p.step, p.chunks, p.admissions, repeat=p.repeat) for p in d.plans)
