"""The simulator: what it counts, when things arrive, and that nothing but its inputs decides."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from hotprefix.cost.model import Link, Links
from hotprefix.definitions import Slo
from hotprefix.errors import ConfigError, InputError
from hotprefix.fleet.config import FleetConfig, Homes, RoutingPolicy
from hotprefix.kernel.config import Eviction, Flight, Prefetch, Publication, Refresh, TierConfig, Write
from hotprefix.lab.replay_metrics import metrics
from hotprefix.lab.sim.arrivals import Loop
from hotprefix.lab.sim.block_prompts import PromptMaker
from hotprefix.lab.sim.replay import Routing
from hotprefix.lab.sim.simulate import Tables
from hotprefix.lab.trace.line_fields import MAX_BLOCK
from hotprefix.lab.trace.trace_request import TraceRequest
from tests.support.replays import BLOCK, agents, price, replay, request

CLOSED: dict[str, Any] = {"loop": Loop.CLOSED}


def rows(tables: Tables) -> list[dict[str, Any]]:
    return tables.requests.to_dicts()


def by_name(tables: Tables) -> dict[str, dict[str, Any]]:
    return {row["trace_id"]: row for row in rows(tables)}


def balanced(tables: Tables) -> None:
    """Computed + reused = required, for every request that ran to its end."""
    for row in rows(tables):
        if row["outcome"] == "finished":
            reused = row["cached_l1"] + row["cached_l2"] + row["cached_l3"]
            assert reused + row["computed_tokens"] - row["rework_tokens"] == row["input_tokens"], row
            times = [row[f"{k}_s"] for k in ("arrival", "admit", "prefill_done", "first_token", "finish")]
            assert times == sorted(times)


# -- time ---------------------------------------------------------------------------------------------


def test_one_request_takes_exactly_what_its_steps_cost() -> None:
    cost = price()
    one = replay([request("a", range(2), 3)], page_size=BLOCK)
    row = rows(one)[0]
    prefill = cost.prices.scheduler_s(1, 0) + cost.prices.step_s(9, 45, 0, 0)
    decode = [cost.prices.scheduler_s(1, 0) + cost.prices.step_s(0, 0, 1, n) for n in (10, 11)]
    assert row["first_token_s"] == pytest.approx(prefill)
    assert row["finish_s"] == pytest.approx(prefill + sum(decode))
    assert row["admit_s"] == row["arrival_s"] == 0.0
    assert one.virtual_s == row["finish_s"]


def test_the_scheduler_s_own_time_is_part_of_a_step() -> None:
    slow = replay([request("a", range(2), 3)], cost=price(scheduler_base_s=1.0))
    quick = replay([request("a", range(2), 3)], cost=price(scheduler_base_s=0.0))
    assert slow.virtual_s - quick.virtual_s == pytest.approx(3.0)
    assert slow.windows["scheduler_s"].sum() == pytest.approx(3.0 + 3 * price().scheduler_running_s)


def test_throughput_never_exceeds_saturation() -> None:
    """All the work of all steps fits into the time that has gone by, on each instance."""
    tables = replay(agents(8, 5), instances=2, **CLOSED)
    for windows in tables.windows.partition_by("instance"):
        spent = windows.select(
            pl.sum("prefill_s") + pl.sum("decode_s") + pl.sum("scheduler_s") + pl.sum("restore_s")
        ).item()
        assert 0 < spent <= tables.virtual_s
        assert windows["computed_tokens"].sum() * price().prefill_token_s <= tables.virtual_s


def test_a_request_between_two_steps_ends_is_seen_at_the_next() -> None:
    """A run of decodes is cut where something arrives, at a step's end and not in the middle."""
    tables = replay([request("a", [], 4, tail=2), request("b", [9], 1, arrival=0.03)], page_size=16)
    a, b = by_name(tables)["a"], by_name(tables)["b"]
    cost = price()
    ends, at = [], 0.0
    for step in (cost.prices.step_s(2, 3, 0, 0), *(cost.prices.step_s(0, 0, 1, n) for n in (3, 4, 5))):
        at += cost.prices.scheduler_s(1, 0) + step
        ends.append(at)
    assert b["arrival_s"] == 0.03
    assert b["admit_s"] == min(e for e in ends if e >= 0.03)
    assert a["finish_s"] >= b["first_token_s"]


# -- arrivals -----------------------------------------------------------------------------------------


def test_open_loop_arrives_by_the_clock_and_scales() -> None:
    trace = [request("a", [1], arrival=0.0), request("b", [2], arrival=8.0)]
    assert by_name(replay(trace))["b"]["arrival_s"] == 8.0
    assert by_name(replay(trace, speed=4.0))["b"]["arrival_s"] == 2.0


def test_closed_loop_comes_after_completion_and_thinking() -> None:
    found = by_name(replay(agents(2, 3, think=1.5), **CLOSED))
    for session in ("s0", "s1"):
        for turn in (1, 2):
            before, after = found[f"{session}t{turn - 1}"], found[f"{session}t{turn}"]
            assert after["arrival_s"] == pytest.approx(before["finish_s"] + 1.5)
    slower = replay(agents(2, 3, think=1.5), cost=price(base_s=1.0), **CLOSED)
    assert slower.virtual_s > replay(agents(2, 3, think=1.5), **CLOSED).virtual_s + 3


def test_concurrency_bounds_the_sessions_alive() -> None:
    tables = replay(agents(6, 2), concurrency=2, **CLOSED).requests
    spans = tables.group_by("session").agg(pl.min("arrival_s").alias("a"), pl.max("finish_s").alias("b"))
    for moment in spans["a"]:
        assert spans.filter((pl.col("a") <= moment) & (pl.col("b") > moment)).height <= 2
    assert tables["session"].n_unique() == 6


def test_a_seed_shuffles_sessions_and_nothing_else() -> None:
    first = [replay(agents(6, 2), seed=s, concurrency=1, **CLOSED).requests for s in range(4)]
    assert len({tuple(t["trace_id"]) for t in first}) > 1
    assert all(sorted(t["trace_id"]) == sorted(first[0]["trace_id"]) for t in first)


def test_a_trace_must_have_what_the_loop_needs() -> None:
    with pytest.raises(InputError, match=r"'a' has no session: replay this trace in open loop"):
        replay([request("a", [1])], **CLOSED)
    with pytest.raises(InputError, match=r"'s0t1' has no arrival time: replay this trace in closed loop"):
        replay(agents(1, 2))


# -- reuse --------------------------------------------------------------------------------------------


def test_a_second_turn_computes_only_what_is_new() -> None:
    found = by_name(replay(agents(1, 3, shared=5, grow=3), **CLOSED))
    assert [found[f"s0t{t}"]["cached_l1"] for t in range(3)] == [0, 8 * BLOCK, 11 * BLOCK]
    assert [found[f"s0t{t}"]["computed_tokens"] for t in range(3)] == [33, 13, 13]


def test_what_was_generated_is_found_by_the_next_turn() -> None:
    second = request("b", [1, 2, 3, 4], session="s", arrival=None, parent="a", think_s=0.1)
    first = request("a", [1, 2], 6, tail=2, session="s")
    first = replace(first, blocks=second.blocks[:3], output_blocks=second.blocks[2:])
    assert by_name(replay([first, second], **CLOSED))["b"]["cached_l1"] == 3 * BLOCK
    unknown = replace(first, output_blocks=None)  # the block that both share was completed by the answer
    assert by_name(replay([unknown, second], **CLOSED))["b"]["cached_l1"] == 2 * BLOCK


@pytest.mark.parametrize("eviction", list(Eviction))
@pytest.mark.parametrize("pages", [30, 60, 400])
def test_every_request_balances(eviction: Eviction, pages: int) -> None:
    tables = replay(agents(12, 5, grow=2), total_pages=pages, eviction=eviction, **CLOSED)
    balanced(tables)
    assert set(tables.requests["outcome"]) == {"finished"}
    assert tables.requests["cached_l1"].sum() == tables.windows["cached_tokens"].sum()
    assert (tables.requests["cached_l1"] <= tables.requests["ideal_tokens"]).all()


def test_what_no_block_covers_is_no_block_whatever_ids_a_trace_has() -> None:
    largest, maker = MAX_BLOCK, PromptMaker(BLOCK)
    prompts = [maker.make(request(f"r{i}", [0, largest - i], 9)) for i in range(6)]
    covered = [np.frombuffer(p.tokens, "<i4")[: 2 * BLOCK] for p in prompts]
    fillers = [np.frombuffer(p.tokens + p.outputs, "<i4")[2 * BLOCK :] for p in prompts]
    assert not np.isin(fillers, covered).any()
    assert [len(set(f.tolist())) for f in fillers] == [1] * 6
    assert len(np.unique(fillers)) == 6


def test_an_endless_cache_reuses_the_ideal() -> None:
    tables = replay(agents(9, 4), total_pages=5000, seed=3, **CLOSED)
    assert tables.requests["cached_l1"].sum() == tables.requests["ideal_tokens"].sum() > 0


def test_pressure_retracts_and_still_balances() -> None:
    trace = [request(f"r{i}", [10 * i, 10 * i + 1], 40) for i in range(6)]
    tables = replay(trace, total_pages=30, output_reserve=0.0)
    assert tables.requests["retractions"].sum() > 0
    assert tables.requests["rework_tokens"].sum() > 0
    balanced(tables)
    requeued = tables.requests.filter(pl.col("retractions") > 0)
    assert (requeued["requeue_s"] > 0).all()


# -- what does not decide -----------------------------------------------------------------------------


@pytest.mark.parametrize("publication", list(Publication))
@pytest.mark.parametrize("flight", list(Flight))
def test_repeating_steps_changes_no_number(publication: Publication, flight: Flight) -> None:
    def run(repeats: int) -> Tables:
        return replay(
            agents(7, 4, think=0.03), total_pages=70, max_running=3, publication=publication, flight=flight,
            page_size=8, repeats=repeats, **CLOSED,
        )  # fmt: skip

    once, many = run(1), run(1 << 20)
    assert once.requests.equals(many.requests)
    assert once.links.equals(many.links)
    steps = once.windows["steps"].sum()
    assert steps == many.windows["steps"].sum()


def test_refresh_off_is_a_window_of_nothing() -> None:
    def run(**config: object) -> pl.DataFrame:
        trace = agents(14, 4, shared=1, think=0.1)
        return replay(trace, total_pages=70, max_running=2, **config, **CLOSED).requests

    off = run(refresh=Refresh.OFF)
    assert off.equals(run(refresh=Refresh.WINDOW, refresh_window=0))
    assert off.equals(run(refresh=Refresh.QUEUE_INFORMED, refresh_window=0))
    assert not off.equals(run(refresh=Refresh.WINDOW))


SCRIPT = """
import sys
from pathlib import Path
from hotprefix.lab.sim.arrivals import Loop
from hotprefix.lab.trace.line_fields import MAX_BLOCK
from hotprefix.lab.trace.trace_request import TraceRequest
from tests.support.replays import agents, replay
t = replay(agents(9, 4), seed=5, total_pages=60, instances=2, log=Path(sys.argv[1]), loop=Loop.CLOSED)
t.requests.write_ndjson(sys.argv[1] + ".rows")
"""


def test_a_seed_gives_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    found = []
    for hash_seed in ("0", "12345"):
        out = tmp_path / hash_seed
        subprocess.run(
            [sys.executable, "-c", SCRIPT, str(out)], check=True, cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )  # fmt: skip
        found.append((out.read_bytes(), Path(f"{out}.rows").read_bytes()))
    assert found[0] == found[1]
    assert found[0][0].count(b"\n") > 300


def test_a_log_changes_nothing_and_is_whole_or_absent(tmp_path: Path) -> None:
    trace = agents(3, 3)
    logged = replay(trace, log=tmp_path / "log.jsonl", **CLOSED)
    assert logged.requests.equals(replay(trace, **CLOSED).requests)
    with pytest.raises(InputError):
        replay(trace, log=tmp_path / "other.jsonl")
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]
    with pytest.raises(InputError, match="cannot write the log"):
        replay(trace, log=tmp_path / "log.jsonl" / "below", **CLOSED)


# -- ends ---------------------------------------------------------------------------------------------


def test_unfinished_and_rejected_requests_have_rows() -> None:
    trace = [
        request("a", range(3), 4),
        request("huge", range(500), 4),
        request("late", range(3), 50, arrival=0.05),
        request("never", [7], arrival=9.0),
    ]
    tables = replay(trace, horizon_s=0.2)
    found = {k: v["outcome"] for k, v in by_name(tables).items()}
    assert found == {"a": "finished", "huge": "rejected", "late": "unfinished"}
    assert by_name(tables)["late"]["finish_s"] is None
    assert tables.virtual_s == 0.2


def test_what_a_horizon_cuts_counts_as_far_as_it_came() -> None:
    """One request has generated, one is in its prefill, and a run of decodes is cut in its middle."""
    trace = [
        request("a", range(5), 3),
        request("b", range(5), 200, arrival=0.5, tail=2),
        request("c", range(40), 3, arrival=1.9),
    ]
    once, many = (
        replay(trace, horizon_s=horizon, repeats=repeats, max_batched_tokens=16, page_size=64)
        for horizon, repeats in ((1.8, 1), (1.8, 1 << 20))
    )
    assert once.requests.equals(many.requests)
    assert once.windows["output_tokens"].to_list() == many.windows["output_tokens"].to_list()
    tables = replay(trace, horizon_s=2.0, max_batched_tokens=16)
    found = by_name(tables)
    b, c = found["b"], found["c"]
    assert (b["outcome"], b["cached_l1"], b["computed_tokens"]) == ("unfinished", 20, 2)
    assert (c["cached_l1"], c["output_tokens"], c["prefill_done_s"]) == (20, 0, None)
    assert tables.windows["output_tokens"].sum() == 2 + b["output_tokens"] - 1 > 100
    assert tables.windows["computed_tokens"].sum() == 21 + 2 + c["computed_tokens"] < 21 + 2 + 141
    figures = metrics(tables.requests, tables.windows, tables.links, slo=Slo(), page_tokens=BLOCK)
    assert {
        name: figures[name]
        for name in ("reused_tokens", "computed_tokens", "input_tokens", "duplication_factor")
    } == {"reused_tokens": 20, "computed_tokens": 23, "input_tokens": 43, "duplication_factor": 1.0}


@pytest.mark.parametrize("warm_up", [0, 1])
def test_an_instance_that_gets_nothing_is_idle_and_not_absent(warm_up: int) -> None:
    trace = [request(f"a{i}", range(5), 3, arrival=0.7 * i, session="s") for i in range(3)]
    tables = replay(trace, instances=2, window_s=0.1, warm_up=warm_up)
    figures = metrics(tables.requests, tables.windows, tables.links, slo=Slo(), page_tokens=BLOCK)
    assert figures["load_imbalance"] == 2.0
    assert tables.windows.filter(pl.col("instance") == 1)["steps"].to_list() == [0]
    assert (tables.windows["start_s"] + tables.windows["seconds"]).max() == pytest.approx(tables.virtual_s)


def test_a_pool_below_one_request_rejects_and_ends() -> None:
    """No livelock."""
    tables = replay(agents(3, 3), total_pages=4, **CLOSED)
    assert set(tables.requests["outcome"]) == {"rejected"}
    assert tables.requests.height == 9


def test_a_warm_start_is_not_reported() -> None:
    trace = [request(f"r{i}", range(5), arrival=float(i)) for i in range(4)]
    warm = replay(trace, warm_up=2)
    assert [r["cached_l1"] for r in rows(warm)] == [20, 20]
    assert [r["trace_id"] for r in rows(warm)] == ["r2", "r3"]
    assert rows(replay(trace))[0]["cached_l1"] == 0


@pytest.mark.parametrize(
    ("field", "value"), [("instances", 0), ("speed", 0.0), ("horizon_s", -1.0), ("warm_up", -1)]
)
def test_bad_settings_name_the_field(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        replay([request("a", [1])], **{field: value})


# -- instances and tiers ------------------------------------------------------------------------------


def test_routes() -> None:
    def instances(trace: list[TraceRequest], arm: RoutingPolicy) -> list[int]:
        routing = Routing(FleetConfig(policy=arm, homes=Homes.TURNS))
        tables = replay(
            trace, instances=3, routing=routing, loop=Loop.OPEN if trace[0].session is None else Loop.CLOSED
        )
        return [r["instance"] for r in rows(tables)]

    together = [request(f"r{i}", [i]) for i in range(5)]
    apart = [request(f"r{i}", [i], arrival=10.0 * i) for i in range(5)]
    assert instances(together, RoutingPolicy.ROUND_ROBIN) == [0, 1, 2, 0, 1]
    assert instances(together, RoutingPolicy.LEAST_REQUESTS) == [0, 1, 2, 0, 1]
    assert instances(apart, RoutingPolicy.ROUND_ROBIN) == [0, 1, 2, 0, 1]
    assert instances(apart, RoutingPolicy.LEAST_REQUESTS) == [0, 1, 2, 0, 1]
    tables = replay(agents(7, 4), instances=3, **CLOSED).requests
    homes = tables.group_by("session").agg(pl.col("instance").unique())["instance"]
    assert sorted(h.to_list() for h in homes) == [[0]] * 3 + [[1]] * 2 + [[2]] * 2


def test_bytes_on_links_are_the_pages_moved() -> None:
    tiers = TierConfig(500, write=Write.THROUGH, min_restore_pages=1, restore_s_per_page=1e-9)
    tables = replay(agents(8, 4), total_pages=45, max_running=2, tiers=tiers, **CLOSED)
    balanced(tables)
    moved = {r["link"]: r["bytes"] for r in tables.links.to_dicts()}
    page = BLOCK * price().kv_token_bytes
    restored = tables.requests["cached_l2"].sum()
    assert restored > 0
    assert moved["l2-l1"] == restored * price().kv_token_bytes
    assert moved["l1-l2"] % page == 0 < moved["l1-l2"]
    assert tables.windows["restore_s"].sum() == pytest.approx(
        tables.links.filter(pl.col("link") == "l2-l1")["seconds"].sum()
    )


def test_instances_share_one_store() -> None:
    tiers = TierConfig(500, storage=True, min_fetch_pages=1, fetch_s_per_page=1e-9, restore_s_per_page=1e-9)
    trace = [request(f"r{i}", range(10), arrival=float(i)) for i in range(3)]
    tables = replay(trace, instances=3, tiers=tiers)
    assert [r["cached_l3"] for r in rows(tables)] == [0, 40, 40]
    fetched = tables.links.filter(pl.col("link") == "l3-l2").sort("instance")["bytes"]
    assert list(fetched) == [0, 4000, 4000]
    alone = replay(trace, instances=3, tiers=replace(tiers, storage=False))
    assert alone.requests["cached_l3"].sum() == 0


@pytest.mark.parametrize("write", list(Write))
@pytest.mark.parametrize("prefetch", list(Prefetch))
@pytest.mark.parametrize("fetch_bytes_s", [1e9, 3e4])
def test_a_replay_over_all_tiers_ends_and_balances(
    write: Write, prefetch: Prefetch, fetch_bytes_s: float
) -> None:
    """Two instances thrash over one store, pages come in time or late; each instance has idle moments."""
    tiers = TierConfig(
        30, storage=True, write=write, prefetch=prefetch, prefetch_timeout_s=0.05, min_restore_pages=1,
        min_fetch_pages=1,
    )  # fmt: skip
    links = price().links.model_copy(update={"fetch": Link(latency_s=1e-3, bytes_per_s=fetch_bytes_s)})
    tables = replay(
        agents(8, 5), total_pages=45, max_running=2, instances=2, tiers=tiers, links=links, **CLOSED
    )
    balanced(tables)
    assert set(tables.requests["outcome"]) == {"finished"}
    spent = tables.windows.select("prefill_s", "decode_s", "scheduler_s", "restore_s").sum().sum_horizontal()
    assert spent.item() <= 2 * tables.virtual_s
    if write is Write.THROUGH and prefetch is Prefetch.WAIT_COMPLETE:
        assert tables.requests["cached_l3"].sum() > 0


def test_a_tier_without_figures_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"links\.save is not known"):
        replay([request("a", [1])], tiers=TierConfig(10), links=Links())
