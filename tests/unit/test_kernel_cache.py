"""What the prefix cache answers, request by request: never a wrong token, never a hit too long or too short.

Every output is compared with an uncached run.
"""

from __future__ import annotations

import itertools
import random

import pytest

from hotprefix.kernel.config import Flight, Publication
from hotprefix.kernel.events import Enqueued, Event
from hotprefix.kernel.plan import Finish
from tests.support.drive import Driver
from tests.support.fake import cold_run

PUBLICATIONS = pytest.mark.parametrize("publication", Publication)


def one_by_one(d: Driver, *prompts: list[int], outputs: int = 3) -> list[int]:
    """Run the prompts one after another; what each took from the cache."""
    start = len(d.prompts)
    for n, prompt in enumerate(prompts, start):
        d.submit(f"r{n}", prompt, outputs)
        d.run()
    d.assert_cold_equal()
    return [d.cached[f"r{n}"] for n in range(start, start + len(prompts))]


# -- how long a hit may be ------------------------------------------------------------------------


@PUBLICATIONS
def test_a_prompt_of_whole_pages_resent_still_computes_its_last_page(publication: Publication) -> None:
    """And later hits are not lost by it."""
    d = Driver(64, 4, publication=publication)
    prompt = list(range(8))
    assert one_by_one(d, prompt, prompt, prompt, outputs=1) == [0, 4, 4]
    assert one_by_one(d, [*prompt, 50, 51, 52, 53], outputs=1) == [8]


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("extra", [0, 1])
def test_exact_repeats_of_tiny_prompts_answer_the_same(page: int, extra: int) -> None:
    """Prompts of one token, of a page, of a page and one."""
    for length in {1, page, page + extra}:
        d = Driver(64, page)
        prompt = list(range(length))
        first, second = one_by_one(d, prompt, prompt)
        assert (first, second) == (0, (length - 1) // page * page)
        assert d.outputs["r0"] == d.outputs["r1"] != []


@PUBLICATIONS
@pytest.mark.parametrize("total", [8, 9])
def test_the_last_sampled_token_has_no_kv_to_reuse(publication: Publication, total: int) -> None:
    """5 + 3 tokens; the next request may reuse 7 at most, by pages 4."""
    d = Driver(64, 4, publication=publication)
    prompt = list(range(5))
    text = prompt + cold_run(prompt, 3) + [60]
    assert one_by_one(d, prompt, text[:total]) == [0, 4]


@PUBLICATIONS
def test_the_next_turn_reuses_what_was_generated(publication: Publication) -> None:
    """100 + 50, then + 50 more: all but the last token's page."""
    d = Driver(128, 4, publication=publication)
    prompt = [*list(range(97)), 1, 2, 3]
    d.submit("turn1", prompt, 50)
    d.run()
    follow = prompt + d.outputs["turn1"] + [9] * 50
    assert one_by_one(d, follow) == [148]


@PUBLICATIONS
@pytest.mark.parametrize("flight", Flight)
def test_a_long_chat_never_lags_a_turn_behind_nor_stores_a_turn_twice(
    publication: Publication, flight: Flight
) -> None:
    """Cached(N) >= floor_P(total(N - 1) - 1); the store grows by the new pages only."""
    d = Driver(600, 16, publication=publication, flight=flight, max_batched_tokens=300)
    text: list[int] = []
    rng = random.Random(46)
    for turn in range(9):
        before = len(text)
        text += [rng.randrange(97) for _ in range(700)]
        d.submit(f"t{turn}", text, 100)
        d.run()
        assert d.cached[f"t{turn}"] >= max(before - 1, 0) // 16 * 16
        text = text + d.outputs[f"t{turn}"]
        assert d.kernel.status().l1.evictable == (len(text) - 1) // 16
    d.assert_cold_equal()
    assert d.kernel.counters.duplicate_pages == 0


def test_the_same_prefix_with_another_tail_is_reused_whole() -> None:
    d = Driver(400, 16, max_batched_tokens=256)
    prefix = [n % 97 for n in range(2200)]
    assert one_by_one(d, prefix + [1] * 30, prefix + [2] * 30, prefix + [3] * 700) == [0, 2192, 2192]


def test_a_hit_serves_any_number_of_adopters() -> None:
    """The entry is not used up."""
    d = Driver(200, 4)
    prefix = list(range(40))
    one_by_one(d, prefix)
    for n in range(1, 9):
        d.submit(f"r{n}", [*prefix, n, n], 4)
    d.run().assert_cold_equal()
    assert [d.cached[f"r{n}"] for n in range(1, 9)] == [40] * 8


def test_distinct_prefixes_that_fit_together_are_all_kept() -> None:
    """Eight prefixes in 60 % of the pool, replayed in order."""
    d = Driver(100, 4)
    prompts = [[n] * 29 for n in range(8)]
    one_by_one(d, *prompts, outputs=1)
    assert one_by_one(d, *prompts, outputs=1) == [28] * 8
    assert d.kernel.counters.evicted_pages == 0


# -- who may share --------------------------------------------------------------------------------


def test_other_tenants_and_adapters_miss_and_then_hit_their_own() -> None:
    """12, 14."""
    d = Driver(200, 4)
    prompt = list(range(30))
    for salt in (None, "adapter-1", "", "ab", "a", None, "adapter-1", "", "ab", "a"):
        d.submit(f"r{len(d.prompts)}", prompt, 2, salt)
        d.run()
    d.assert_cold_equal()
    assert list(d.cached.values()) == [0] * 5 + [28] * 5


def test_a_part_filled_page_is_nobodys_but_its_owners() -> None:
    """Six tokens with pages of four, four samples of one prompt and another continuation."""
    d = Driver(64, 4)
    prompt = list(range(6))
    for n in range(4):
        d.submit(f"sample{n}", prompt, 9)
    d.submit("other", [*prompt, 90], 9)
    plan = d.step()
    tails = [c.table[-1] for c in plan.chunks]
    assert len(set(tails)) == 5, "each writes into a page of its own"
    d.run().assert_cold_equal()
    assert d.kernel.status().l1.protected == d.kernel.status().l1.owned == 0


def test_equal_pages_behind_a_hole_are_not_reached() -> None:
    """Chains A B C and A B' C."""
    d = Driver(64, 4)
    a, b, other, c = [[t] * 4 for t in (1, 2, 3, 4)]
    assert one_by_one(d, a + b + c + [9], a + other + c + [9]) == [0, 4]
    assert one_by_one(d, a + other + c + [9]) == [12]


@PUBLICATIONS
@pytest.mark.parametrize("flight", Flight)
def test_sixteen_at_once_say_what_each_says_alone(publication: Publication, flight: Flight) -> None:
    """Shared and divergent prefixes, computed together."""
    rng = random.Random(29)
    base = [rng.randrange(97) for _ in range(60)]
    d = Driver(400, 4, publication=publication, flight=flight, max_batched_tokens=64)
    for n in range(16):
        d.submit(f"r{n}", base[: rng.randrange(1, 60)] + [n] * rng.randrange(4), 12)
        if n % 5 == 0:
            d.step()
    d.run().assert_cold_equal()


def test_scattered_pages_serve_as_well_as_consecutive_ones() -> None:
    """Every second page is free, and a prefix is cached."""
    d = Driver(40, 4, max_running=20)
    d.submit("warm", list(range(13)), 1)
    d.run()
    pool = d.kernel._s.l1.pool
    taken = pool.allocate(pool.free)
    pool.release(taken[::2])
    d.submit("r", [*range(13), *[5] * 20], 8)
    pages: list[int] = []
    while d.kernel.has_work:
        plan = d.plan()
        pages[plan.chunks[0].table_from :] = plan.chunks[0].table
        outcome = d.executor.run(plan)
        for progress in d.kernel.commit(plan, outcome, d.now):
            d._note(progress)
    assert any(abs(y - x) != 1 for x, y in itertools.pairwise(pages))
    d.assert_cold_equal()
    assert d.cached["r"] == 12
    pool.release(taken[1::2])
    d.kernel.check()


# -- what is never published ----------------------------------------------------------------------


@PUBLICATIONS
@pytest.mark.parametrize("flight", [Flight.NONE, Flight.COALESCED])
@pytest.mark.parametrize("steps", range(1, 7))
@pytest.mark.parametrize("budget", [8, 10, 3])
def test_an_aborted_prefill_leaves_only_what_it_has_computed(
    publication: Publication, flight: Flight, steps: int, budget: int
) -> None:
    """21, 82: abort at every chunk edge, on and off page boundaries."""
    d = Driver(64, 4, publication=publication, flight=flight, max_batched_tokens=budget, max_running=3)
    prompt = [(5 * n) % 97 for n in range(30)]
    d.submit("a", prompt, 3)
    done = 0
    for _ in range(steps):
        plan = d.step()
        done = plan.chunks[0].stop if plan.chunks else done
        if "a" in d.finish:
            return
    d.abort("a")
    assert d.finish["a"] is Finish.ABORT
    l1 = d.kernel.status().l1
    assert (l1.owned, l1.protected) == (0, 0)
    assert l1.evictable == min(done, 32) // 4
    d.submit("b", prompt, 3)
    d.run().assert_cold_equal()
    assert d.cached["b"] == min(done // 4 * 4, 28)


@PUBLICATIONS
def test_what_a_stop_ended_is_published_without_the_token_that_stopped_it(publication: Publication) -> None:
    """Batches ended by stop tokens, then prompts that go on from there."""
    d = Driver(200, 4, publication=publication)
    prompt = list(range(20))
    said = cold_run(prompt, 12)
    d.stop_at = frozenset({said[6]})
    d.submit("stopped", prompt, 40)
    d.run()
    ends = said.index(said[6]) + 1
    assert d.finish["stopped"] is Finish.STOP
    assert d.outputs["stopped"] == said[:ends]
    d.stop_at = frozenset()
    assert d.kernel.status().l1.evictable == (20 + ends - 1) // 4
    (cached,) = one_by_one(d, prompt + said[:ends] + [7, 8])
    assert cached == (20 + ends - 1) // 4 * 4


@pytest.mark.parametrize("share_limit", [0, 3, 4, 9, 100])
def test_nothing_beyond_the_share_limit_is_ever_visible(share_limit: int) -> None:
    d = Driver(64, 4)
    prompt = list(range(17))
    d.submit("private", prompt, 9, share_limit=share_limit)
    d.step()
    d.submit("other", prompt, 3)
    d.run().assert_cold_equal()
    assert d.cached["other"] == min(share_limit, 16) // 4 * 4


@pytest.mark.parametrize(("reuse_limit", "cached"), [(0, 0), (3, 0), (4, 4), (11, 8), (99, 16)])
def test_no_more_than_the_reuse_limit_is_taken_from_the_cache(reuse_limit: int, cached: int) -> None:
    d = Driver(64, 4)
    prompt = list(range(17))
    one_by_one(d, prompt)
    d.submit("limited", prompt, 3, reuse_limit=reuse_limit)
    d.run().assert_cold_equal()
    assert d.cached["limited"] == cached
    assert d.kernel.counters.duplicate_pages == 4 - cached // 4, "its own copies are given back"


# -- counting -------------------------------------------------------------------------------------


def test_reuse_is_counted_once_and_computing_again_is_not_reuse() -> None:
    """156, 157: a preempted or blocked request looks up many times; hits count its first use only."""
    d = Driver(16, 4, output_reserve=0.0)
    for n in range(4):
        d.submit(f"r{n}", [n * 9 + k for k in range(9)], 20)
    d.run().assert_cold_equal()
    count = d.kernel.counters
    assert count.retractions > 0
    assert count.recomputed_tokens > 0
    assert (count.hits, count.cached_tokens) == (0, 0)
    assert count.lookups == 4
    assert count.prompt_tokens == 36


@pytest.mark.parametrize("ok", [True, False])
def test_pages_only_planned_are_no_hit_yet_when_a_request_arrives(ok: bool) -> None:
    """Nor are they lost by the time it is admitted, should their step fail."""
    events: list[Event] = []
    d = Driver(64, 4, sink=events.append)
    d.submit("a", list(range(20)), 2)
    plan = d.plan()
    d.submit("b", list(range(20)), 2)
    d.executor.fail_next = int(not ok)
    d.execute(plan)
    d.run().assert_cold_equal()
    assert [e.matched for e in events if isinstance(e, Enqueued)] == [0, 0]
    assert d.kernel.counters.lost_waiting_tokens == 0


def test_without_a_cache_nothing_is_kept_and_nothing_is_hit() -> None:
    d = Driver(64, 4, prefix_cache=False)
    assert one_by_one(d, *[list(range(20))] * 3) == [0, 0, 0]
    assert d.kernel.status().l1.free == 64
    assert d.kernel.counters.indexed_pages == 0
