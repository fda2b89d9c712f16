"""What moves between tiers in a replay: the store's bound, the wires' order, and which bytes are counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hotprefix.cost.model import Link
from hotprefix.engine.l3_loop import Storage
from hotprefix.errors import ConfigError
from hotprefix.kernel.config import Prefetch, Refresh, TierConfig, Write
from hotprefix.kernel.plan import Fetch, StepPlan
from hotprefix.lab.sim.arrivals import Loop
from hotprefix.lab.sim.lower_tiers import Store
from hotprefix.lab.sim.wires import Wire
from hotprefix.lab.trace.trace_request import TraceRequest
from tests.support.replays import BLOCK, agents, price, replay, request
from tests.support.stores import ScriptedStore


def test_a_store_forgets_the_page_used_longest_ago() -> None:
    store = Store(3)
    for key, parent in ((b"a", None), (b"b", b"a"), (b"c", None)):
        store.put(key, parent)
    store.touch([b"a", b"b"])
    store.put(b"d")  # c was used longest ago
    assert [store.leading((key,)) for key in (b"a", b"b", b"c", b"d")] == [1, 1, 0, 1]
    store.put(b"e")  # of a chain the root goes last
    assert [store.leading((key,)) for key in (b"a", b"b", b"d", b"e")] == [1, 0, 1, 1]
    assert store.leading((b"a", b"x", b"d")) == 1


def test_a_prefix_longer_than_the_store_keeps_its_beginning() -> None:
    store = Store(3)
    for key, parent in zip(b"abcdef", [None, *b"abcde"], strict=True):
        store.put(bytes([key]), None if parent is None else bytes([parent]))
    assert store.leading(tuple(bytes([key]) for key in b"abcdef")) == len(store) == 3


def test_a_transfer_waits_for_the_one_before_it() -> None:
    wire = Wire("l1-l2", Link(latency_s=1.0, bytes_per_s=10.0))
    assert [wire.send(20, now) for now in (0.0, 1.0, 10.0)] == [3.0, 6.0, 13.0]
    assert (wire.bytes, wire.seconds, wire.transfers) == (60, 9.0, 3)


def test_a_page_written_through_crosses_two_links_once() -> None:
    tiers = TierConfig(500, storage=True, write=Write.THROUGH)
    tables = replay([request("a", range(10)), request("b", [50], arrival=5.0)], tiers=tiers)
    moved = {row["link"]: row["bytes"] for row in tables.links.to_dicts()}
    # Prompt and answer of both but for the last token, which has no KV.
    pages = 44 // BLOCK + 8 // BLOCK
    page = BLOCK * price().kv_token_bytes
    assert moved["l1-l2"] == moved["l2-l3"] == pages * page
    assert moved["l3-l2"] == 0


def test_a_fetch_nobody_waits_for_is_counted_as_cancelled() -> None:
    """Best effort: the plan that begins the fetch admits its request, and so gives the fetch up again."""
    tiers = TierConfig(
        100, storage=True, prefetch=Prefetch.BEST_EFFORT, min_fetch_pages=1, min_restore_pages=1
    )
    slow = price().links.model_copy(update={"fetch": Link(latency_s=9.0, bytes_per_s=1e9)})
    trace = [request("a", range(10)), request("b", range(10), arrival=5.0)]
    tables = replay(trace, instances=2, tiers=tiers, links=slow)
    cancels = {(row["instance"], row["link"]): row["cancels"] for row in tables.links.to_dicts()}
    assert cancels[1, "l3-l2"] == 1
    assert tables.requests["cached_l3"].to_list() == [0, 0]


def test_the_engine_gives_up_a_fetch_that_the_same_plan_begins() -> None:
    storage = Storage(ScriptedStore(), page_bytes=64, timeout_s=60.0)
    try:
        storage.begin(StepPlan(1, fetches=(Fetch(1, (b"k",)),), cancels=(1,)))
        assert storage.stats().endings["cancelled"] == 1
    finally:
        storage.close()


def test_a_store_too_small_for_a_prefix_gives_its_beginning() -> None:
    tiers = TierConfig(500, storage=True, min_fetch_pages=1, fetch_s_per_page=1e-9, restore_s_per_page=1e-9)
    trace = [request(f"r{i}", range(10), arrival=float(i)) for i in range(3)]
    tables = replay(trace, instances=3, tiers=tiers, storage_pages=2)
    assert tables.requests["cached_l3"].to_list() == [0, 2 * BLOCK, 2 * BLOCK]


def whole(name: str, first: int, pages: int, **more: object) -> TraceRequest:
    """A prompt of `pages` whole pages that leaves these and no more: its one output token has no KV."""
    return request(name, range(first, first + pages), 1, tail=0, **more)  # type: ignore[arg-type]


EAGER = TierConfig(100, storage=True, min_fetch_pages=1, min_restore_pages=1, prefetch=Prefetch.WAIT_COMPLETE)


def test_a_prefix_used_in_l1_outlives_one_stored_after_it_in_l3() -> None:
    """L3 holds both; room for two pages more comes from the end of the one that was used longest ago."""
    trace = [
        whole("a", 0, 8, arrival=0.0, session="here"),
        whole("b", 100, 8, arrival=5.0, session="here"),
        whole("a again", 0, 8, arrival=10.0, session="here"),  # nothing to store: only the touch tells L3
        whole("c", 200, 2, arrival=15.0, session="here"),
        whole("a there", 0, 8, arrival=20.0, session="there"),
        whole("b there", 100, 8, arrival=25.0, session="there"),
    ]
    table = replay(trace, instances=2, tiers=EAGER, storage_pages=16).requests
    # At least one token is computed, so seven pages of eight can be reused; b has six left.
    assert table["cached_l3"].to_list() == [0, 0, 0, 0, 7 * BLOCK, 6 * BLOCK]
    assert table["cached_l1"].to_list() == [0, 0, 7 * BLOCK, 0, 0, 0]


@pytest.mark.parametrize(
    ("host_pages", "l2", "l3", "computed"),
    [
        (12, 0, 6, 1),  # b and c have taken all of L2; a fetch may use half of it
        (30, 6, 1, 0),  # they have taken the last two pages of a, one of which is computed anyway
    ],
)
def test_what_was_lost_while_waiting_comes_back_from_l2_and_l3(
    host_pages: int, l2: int, l3: int, computed: int
) -> None:
    """It matched in L1 on arrival, waited behind b and c, which evicted it, and was then looked for below."""
    trace = [
        whole("a", 0, 8, arrival=0.0),
        whole("b", 100, 8, arrival=5.0),
        whole("c", 200, 16, arrival=5.001),
        whole("a again", 0, 8, arrival=5.002),
    ]
    tiers = replace(EAGER, pages=host_pages, fetch_window=1)
    table = replay(trace, tiers=tiers, total_pages=20, max_running=1, refresh=Refresh.OFF).requests
    row = table.row(3, named=True)
    split = ("matched_at_enqueue", "retained_tokens", "restored_l2_tokens", "restored_l3_tokens")
    assert [row[name] for name in split] == [7 * BLOCK, 0, l2 * BLOCK, l3 * BLOCK]
    assert row["recomputed_tokens"] == computed * BLOCK
    assert [row[f"cached_{tier}"] for tier in ("l1", "l2", "l3")] == [0, l2 * BLOCK, l3 * BLOCK]
    assert row["computed_tokens"] == (computed + 1) * BLOCK


def test_waiting_requests_cost_scheduler_time() -> None:
    trace = [request(f"r{i}", [i], 1) for i in range(3)]
    cost = price(scheduler_base_s=0.0, scheduler_running_s=0.0, scheduler_waiting_s=1.0)
    tables = replay(trace, max_running=1, cost=cost)
    assert tables.windows["scheduler_s"].sum() == pytest.approx(2.0 + 1.0)


def test_lines_out_of_order_arrive_in_order() -> None:
    """And those of one moment in the trace's order, or, of sessions, in the seed's."""
    trace = [request("late", [1], arrival=2.0, session="z")]
    trace += [request(name, [2], arrival=1.0, session=name) for name in "bac"]
    assert replay(trace).requests["trace_id"].to_list() == ["b", "a", "c", "late"]
    orders = [replay(trace, seed, loop=Loop.CLOSED).requests["trace_id"].to_list() for seed in range(9)]
    assert {order[-1] for order in orders} == {"late"}
    drawn = [np.random.default_rng(seed).permutation(4).tolist() for seed in range(9)]
    assert orders == [[trace[i].id for i in order if i] + ["late"] for order in drawn]


def test_speed_is_refused_where_it_would_change_nothing() -> None:
    with pytest.raises(
        ConfigError, match=r"load.speed=2: in closed loop .*; leave it out .*load.loop=open"
    ) as caught:
        replay(agents(1, 1), speed=2.0, loop=Loop.CLOSED)
    assert caught.value.param == "load.speed"


def test_concurrency_is_refused_where_it_would_change_nothing() -> None:
    with pytest.raises(
        ConfigError, match=r"load.concurrency=2: in open loop .*; leave it out .*load.loop=closed"
    ) as caught:
        replay(agents(1, 1), concurrency=2, loop=Loop.OPEN)
    assert caught.value.param == "load.concurrency"


def test_with_bounded_concurrency_a_session_begins_when_its_turn_comes() -> None:
    """Not as long after the replay's start as it was recorded."""
    trace = [
        request("a", [1], arrival=1000.0, session="a"),
        request("b", [2], arrival=2000.0, session="b"),
        request("b2", [3], arrival=2003.0, session="b"),
    ]
    rows = replay(trace, loop=Loop.CLOSED, concurrency=2).requests.sort("trace_id")
    assert rows["arrival_s"].to_list() == [0.0, 0.0, 3.0]


def test_windows_of_the_warm_up_are_not_reported() -> None:
    trace = [request(f"r{i}", [i], arrival=float(i)) for i in range(4)]
    starts = replay(trace, warm_up=2, window_s=1.0).windows["start_s"].to_list()
    assert starts == [2.0, 3.0]


def test_agents_find_in_l3_what_l1_and_l2_have_lost() -> None:
    """And the split of what matched on arrival adds up."""
    tiers = TierConfig(
        24, storage=True, min_fetch_pages=1, min_restore_pages=1, prefetch=Prefetch.WAIT_COMPLETE
    )
    quick = price().links.model_copy(update={"fetch": Link(latency_s=0.0, bytes_per_s=1e9)})
    table = replay(
        agents(10, 5, think=0.05), total_pages=45, max_running=2, tiers=tiers, links=quick, loop=Loop.CLOSED
    ).requests
    parts = ("retained_tokens", "restored_l2_tokens", "restored_l3_tokens", "recomputed_tokens")
    assert (table.select(parts).sum_horizontal() == table["matched_at_enqueue"]).all()
    assert table["cached_l3"].sum() > 0
