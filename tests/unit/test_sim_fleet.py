"""The simulator and the fleet core: what the core hears, when, and what becomes of requests whose instance
dies."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import polars as pl
import pytest

from hotprefix.definitions import Slo
from hotprefix.errors import ConfigError
from hotprefix.fleet.config import FleetConfig, Homes, RoutingPolicy
from hotprefix.fleet.fleet import Fleet
from hotprefix.fleet.records import Batch, WorkerReport
from hotprefix.kernel.config import TierConfig, Write
from hotprefix.lab.replay_metrics import metrics
from hotprefix.lab.sim import fleet_driver, table_rows
from hotprefix.lab.sim.arrivals import Loop
from hotprefix.lab.sim.replay import Death, Routing, Worker
from hotprefix.lab.sim.simulate import Tables
from tests.support.replays import BLOCK, agents, price, replay, request

CLOSED: dict[str, Any] = {"loop": Loop.CLOSED}


def routing(arm: RoutingPolicy = RoutingPolicy.PREDICTED, **more: Any) -> Routing:
    return Routing(FleetConfig(policy=arm, homes=Homes.TURNS), **more)


class Heard(Fleet):
    """Keeps what it heard, as (method, time, arguments)."""

    calls: list[tuple[str, float, tuple[Any, ...]]]
    latest: Heard

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls = []
        Heard.latest = self

    def report(self, worker: str, report: WorkerReport, now: float) -> None:
        self.calls.append(("report", now, (worker, report)))
        super().report(worker, report, now)

    def events(self, worker: str, batch: Batch, now: float) -> Any:
        wanted = super().events(worker, batch, now)
        self.calls.append(("events", now, (worker, batch, wanted)))
        return wanted

    def replayed(self, wanted: Any, batches: tuple[Batch, ...], now: float) -> Any:
        self.calls.append(("replayed", now, (wanted, batches)))
        return super().replayed(wanted, batches, now)

    def of(self, method: str) -> list[tuple[float, tuple[Any, ...]]]:
        return [(now, args) for name, now, args in self.calls if name == method]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_driver, "Fleet", Heard)


def finished(tables: Tables) -> None:
    assert set(tables.requests["outcome"]) == {"finished"}
    for row in tables.requests.to_dicts():
        reused = row["cached_l1"] + row["cached_l2"] + row["cached_l3"]
        assert reused + row["computed_tokens"] - row["rework_tokens"] == row["input_tokens"], row


# -- what it hears ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("heard")
def test_one_instance_is_not_asked_how_it_is() -> None:
    tables = replay(agents(3, 3), routing=routing(), **CLOSED)
    assert Heard.latest.calls == []
    assert tables.routes.is_empty()
    assert tables.loads.is_empty()
    assert tables.requests["predicted_first_s"].null_count() == tables.requests.height


@pytest.mark.usefixtures("heard")
def test_reports_and_events_come_as_late_as_was_said() -> None:
    replay(agents(9, 4), instances=3, routing=routing(staleness_s=0.25, report_every_s=0.5), **CLOSED)
    reports, events = Heard.latest.of("report"), Heard.latest.of("events")
    assert len(reports) > 3
    assert len(events) > 20
    assert all(now == report.made + 0.25 for now, (_, report) in reports)
    assert all(now == batch.made + 0.25 for now, (_, batch, _) in events)
    assert {report.made % 0.5 for _, (_, report) in reports} == {0.0}
    for worker in "012":
        numbers = [batch.number for _, (name, batch, _) in events if name == worker]
        assert numbers == list(range(len(numbers)))


@pytest.mark.usefixtures("heard")
def test_lost_batches_are_asked_for_and_come_late_too() -> None:
    told = routing(staleness_s=0.1, lost_events=0.3)
    replay(agents(12, 5), instances=2, routing=told, total_pages=60, **CLOSED)
    events, answers = Heard.latest.of("events"), Heard.latest.of("replayed")
    gaps = [(now, wanted) for now, (_, _, wanted) in events if wanted is not None]
    assert gaps
    assert answers
    assert all(batches[0].number == wanted.first for _, (wanted, batches) in answers)
    asked = {(wanted.worker, wanted.ticket): now for now, wanted in gaps}
    firsts = [(now, w) for now, (w, _) in answers if (w.worker, w.ticket) in asked]
    assert all(now == pytest.approx(asked[w.worker, w.ticket] + 0.1) for now, w in firsts)


@pytest.mark.usefixtures("heard")
def test_a_report_adds_up() -> None:
    trace = [request(f"r{i}", range(10 * i, 10 * i + 9), 30, arrival=0.01 * i) for i in range(12)]
    replay(trace, instances=2, routing=routing(report_every_s=0.05), max_running=3, total_pages=200)
    reports = [report for _, (_, report) in Heard.latest.of("report")]
    assert all(r.free + r.evictable + r.owned + r.protected == 200 for r in reports)
    assert max(r.waiting for r in reports) > 0
    assert max(r.decodes for r in reports) == 3
    assert max(r.prefill_tokens for r in reports) >= 37
    assert all(r.prefill_tokens <= 37 * (r.waiting + 3) for r in reports)


def test_knowledge_that_never_comes_leaves_nothing_captured() -> None:
    def routes(staleness_s: float) -> pl.DataFrame:
        fleet = FleetConfig(policy=RoutingPolicy.AFFINITY, confirm_s=0.0)
        return replay(
            agents(10, 4), instances=2, routing=Routing(fleet, staleness_s=staleness_s), **CLOSED
        ).routes

    none, at_once = routes(1e6), routes(0.0)
    assert none["found_l1"].sum() == 0 < at_once["found_l1"].sum()


# -- what is written down -----------------------------------------------------------------------------


def test_what_the_fleet_knows_at_once_is_what_the_kernel_finds() -> None:
    """Requests far apart: nothing changes between the choice and the enqueueing."""
    trace = [
        request(f"r{i}", [*range(6), 100 + i % 3, 200 + i % 4, 300 + i], arrival=5.0 * i) for i in range(20)
    ]
    for arm in (RoutingPolicy.PREDICTED, RoutingPolicy.AFFINITY, RoutingPolicy.ROUND_ROBIN):
        tables = replay(trace, instances=3, routing=routing(arm))
        both = tables.routes.join(tables.requests.select("id", "matched_at_enqueue", "cached_l1"), on="id")
        assert both["found_l1"].to_list() == both["matched_at_enqueue"].to_list()
        assert both["delivered_tokens"].to_list() == both["cached_l1"].to_list()
        assert both["found_l1"].sum() > 0
        assert (both["available_tokens"] >= both["found_l1"]).all()


def test_routes_say_what_came_of_the_predictions() -> None:
    tables = replay(agents(12, 5, think=0.1), instances=3, routing=routing(), **CLOSED)
    both = tables.routes.join(tables.requests, on="id")
    assert both.height == tables.requests.height == 60
    assert both["actual_first_s"].to_list() == pytest.approx(
        (both["first_token_s"] - both["arrival_s"]).to_list()
    )
    parts = both["actual_queue_s"] + both["actual_compute_s"]
    assert parts.to_list() == pytest.approx(both["actual_first_s"].to_list())
    assert both["first_s"].to_list() == both["predicted_first_s"].to_list()
    assert (both["instance"] == both["instance_right"]).all()
    figures = metrics(
        tables.requests, tables.windows, tables.links, slo=Slo(), page_tokens=BLOCK, end_s=tables.virtual_s
    )
    off = (both["first_s"] - both["actual_first_s"]).to_numpy()
    assert figures["prediction_bias_s"] == pytest.approx(off.mean())
    assert figures["captured_share"] == pytest.approx(
        tables.requests["captured_tokens"].sum() / tables.requests["input_tokens"].sum()
    )


def test_the_core_s_own_counts_are_those_of_the_tables() -> None:
    tables = replay(
        agents(12, 5, think=0.1), instances=3, routing=routing(RoutingPolicy.ROUND_ROBIN), **CLOSED
    )
    told, rows = tables.fleet, tables.requests
    assert told["counters"]["routed"] == told["hits"]["requests"] == 60
    assert told["hits"]["available"] == rows["available_tokens"].sum()
    assert told["hits"]["captured"] == rows["captured_tokens"].sum()
    assert told["hits"]["delivered"] == rows["cached_l1"].sum()
    by_reason = tables.routes.group_by("copying").agg(pl.sum("copied_tokens")).drop_nulls()
    assert {reason: tokens for reason, tokens in told["copies"].items() if tokens} == dict(by_reason.rows())
    assert told["copies"]["by_rule"] > 0


def test_loads_are_means_of_what_was_seen() -> None:
    trace = [request(f"r{i}", [i], 400, arrival=0.01 * i) for i in range(8)]
    tables = replay(
        trace,
        instances=2,
        routing=routing(RoutingPolicy.ROUND_ROBIN, report_every_s=0.25),
        window_s=1.0,
        max_running=4,
    )
    loads = tables.loads.to_dicts()
    assert {row["instance"] for row in loads} == {0, 1}
    assert [row["seen"] for row in loads if row["instance"] == 0][:3] == [4, 4, 4]
    assert all(row["load"] <= row["load_max"] for row in loads)
    full = [row for row in loads if row["start_s"] == 1.0]
    assert [row["decode"] for row in full] == [1.0, 1.0], "four of four rows"


# -- instances that differ, and that die --------------------------------------------------------------


def test_workers_have_their_own_prices_and_room() -> None:
    workers = (Worker(price(), 200, None), Worker(price().scaled(10.0), 30, None))
    trace = [request(f"r{i}", range(10 * i, 10 * i + 5), arrival=9.0 * i) for i in range(6)]
    tables = replay(trace, instances=2, workers=workers, routing=routing(RoutingPolicy.ROUND_ROBIN))
    took = tables.requests.group_by("instance").agg(t=(pl.col("finish_s") - pl.col("arrival_s")).mean())
    quick, slow = took.sort("instance")["t"]
    assert slow == pytest.approx(10 * quick)
    free = tables.windows.group_by("instance").agg(pl.max("free_pages")).sort("instance")["free_pages"]
    assert free[0] > 30 > free[1]
    chosen = replay(trace, instances=2, workers=workers, routing=routing()).requests["instance"]
    assert set(chosen) == {0}, "the quick one is idle each time"


DEATH = (Death(0, 0.2, 1.5), Death(1, 0.9))


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("arm", [RoutingPolicy.PREDICTED, RoutingPolicy.SESSION, RoutingPolicy.ROUND_ROBIN])
def test_requests_of_a_dead_instance_begin_again_elsewhere(arm: RoutingPolicy) -> None:
    told = routing(arm, staleness_s=0.05, report_every_s=0.1)
    tables = replay(agents(14, 4, think=0.1), instances=3, routing=told, deaths=DEATH, **CLOSED)
    finished(tables)
    moved = tables.requests.filter(pl.col("failovers") > 0)
    assert moved.height > 0
    assert len(tables.counters) == 4, "one life more than there are instances"
    routes = tables.routes
    assert routes.height == tables.requests.height + tables.requests["failovers"].sum()
    down = (pl.col("instance") == 0) & pl.col("at_s").is_between(0.2, 1.5, closed="left")
    assert routes.filter(down | ((pl.col("instance") == 1) & (pl.col("at_s") >= 0.9))).is_empty()
    if arm is not RoutingPolicy.SESSION:
        assert routes.filter((pl.col("instance") == 0) & (pl.col("at_s") >= 1.5)).height > 0
    lost = routes.join(moved.select("id", "failovers"), on="id").filter(
        pl.col("attempt") <= pl.col("failovers")
    )
    assert lost["actual_first_s"].null_count() == lost.height
    assert moved["arrival_s"].to_list() <= moved["first_token_s"].to_list()
    assert tables.requests["computed_tokens"].sum() <= tables.windows["computed_tokens"].sum()
    Heard.latest.check()
    for load in Heard.latest.loads(tables.virtual_s).values():
        assert (load.prefill, load.decode, load.restore, load.hand_off) == (0.0, 0.0, 0.0, 0.0)


def test_computed_before_the_death_is_rework_and_nothing_of_it_is_reused() -> None:
    trace = [request("a", range(20), 3)]
    alone = replay(trace, instances=2, routing=routing(RoutingPolicy.ROUND_ROBIN), max_batched_tokens=16)
    row = alone.requests.to_dicts()[0]
    at = row["first_token_s"] * 0.6
    dies = replay(
        trace,
        instances=2,
        routing=routing(RoutingPolicy.ROUND_ROBIN),
        max_batched_tokens=16,
        deaths=(Death(0, at),),
    ).requests.to_dicts()[0]
    assert (row["instance"], dies["instance"], dies["failovers"]) == (0, 1, 1)
    assert 0 < dies["rework_tokens"] < row["computed_tokens"] == 81
    assert dies["computed_tokens"] == 81 + dies["rework_tokens"]
    assert dies["first_token_s"] == pytest.approx(at + row["first_token_s"])


def test_a_first_token_that_was_sent_stays_the_first() -> None:
    trace = [request("a", range(3), 50)]
    one = replay(trace, instances=2, routing=routing(RoutingPolicy.ROUND_ROBIN)).requests.to_dicts()[0]
    at = (one["first_token_s"] + one["finish_s"]) / 2
    tables = replay(trace, instances=2, routing=routing(RoutingPolicy.ROUND_ROBIN), deaths=(Death(0, at),))
    row = tables.requests.to_dicts()[0]
    assert row["first_token_s"] == one["first_token_s"] < at < row["finish_s"]
    assert row["admit_s"] == at
    assert tables.routes["actual_first_s"].to_list() == [None, None]


def test_without_an_instance_requests_wait_and_are_refused_in_the_end() -> None:
    trace = [request("a", [1], arrival=0.0), request("b", [2], arrival=2.0), request("c", [3], arrival=15.0)]
    tables = replay(trace, deaths=(Death(0, 1.0, 5.0),))
    rows = {row["trace_id"]: row for row in tables.requests.to_dicts()}
    assert rows["b"]["admit_s"] == 5.0, "as soon as it is back"
    gone = replay(trace, instances=2, deaths=(Death(0, 1.0), Death(1, 1.0, 14.0)), routing=routing())
    rows = {row["trace_id"]: row for row in gone.requests.to_dicts()}
    assert [rows[name]["outcome"] for name in "abc"] == ["finished", "rejected", "finished"]
    assert rows["b"]["instance"] is None
    cut = replay(trace, deaths=(Death(0, 1.0),), horizon_s=4.0)
    assert cut.requests["outcome"].to_list() == ["finished", "unfinished"]


def test_requests_are_refused_in_the_end_whenever_they_came() -> None:
    trace = [request(f"r{n}", [n], arrival=0.07 * n) for n in range(20)]
    gone = replay(trace, deaths=(Death(0, 0.0),), routing=Routing(FleetConfig(hold_s=0.7)))
    assert set(gone.requests["outcome"]) == {"rejected"}


def test_an_instance_that_is_back_finds_the_shared_store() -> None:
    tiers = TierConfig(500, storage=True, write=Write.THROUGH)
    told = routing(RoutingPolicy.ROUND_ROBIN)
    trace = [request(f"r{i}", range(20), arrival=3.0 * i) for i in range(4)]
    tables = replay(trace, instances=2, tiers=tiers, routing=told, deaths=(Death(0, 2.0, 5.0),))
    finished(tables)
    back = tables.requests.filter((pl.col("instance") == 0) & (pl.col("arrival_s") > 5.0))
    assert back["cached_l3"].sum() > 0
    assert back["cached_l1"].head(1).item() == 0


@pytest.mark.usefixtures("heard")
def test_words_of_a_life_that_is_over_do_not_end_the_next_one() -> None:
    """They are on their way for longer than the instance is away."""
    told = routing(staleness_s=0.4, report_every_s=0.1)
    tables = replay(
        agents(14, 4, think=0.1), instances=3, routing=told, deaths=(Death(0, 0.5, 0.6),), **CLOSED
    )
    finished(tables)
    old = [b for now, (name, b, _) in Heard.latest.of("events") if name == "0" and now > 0.6 > b.made]
    assert old
    assert (Heard.latest.counters.restarts, Heard.latest.counters.late) == (0, 0)


# -- what does not decide, and what is refused --------------------------------------------------------


@pytest.mark.parametrize("arm", list(RoutingPolicy))
def test_every_arm_serves_everything_and_a_seed_decides(arm: RoutingPolicy) -> None:
    told = routing(arm, staleness_s=0.2, lost_events=0.2, report_every_s=0.3)

    def run(seed: int, repeats: int = 1 << 20) -> Tables:
        return replay(agents(9, 4, think=0.1), seed, instances=4, routing=told, repeats=repeats, **CLOSED)

    first = run(1)
    finished(first)
    assert first.routes.equals(run(1).routes)
    assert first.requests.equals(run(1).requests)


def test_all_arms_are_one_with_one_worker() -> None:
    tables = [replay(agents(6, 4), routing=routing(arm), **CLOSED).requests for arm in RoutingPolicy]
    assert all(a.equals(b) for a, b in itertools.pairwise(tables))


def test_bad_settings_are_refused_with_the_fix() -> None:
    trace = [request("a", [1])]
    for wrong, text in (
        ({"deaths": (Death(3, 1.0),), "instances": 2}, r"failures.worker=3: there are 2 instances"),
        ({"deaths": (Death(0, 1.0), Death(0, 2.0))}, r"at_s=2: instance 0 has died before and is not back"),
        (
            {"deaths": (Death(0, 1.0, 2.0), Death(0, 2.0))},
            r"at_s=2: instance 0 .* give the earlier failure a back_s before",
        ),
        ({"workers": (Worker(),), "instances": 2}, r"workers: they are 1, and there are 2 instances"),
    ):
        with pytest.raises(ConfigError, match=text):
            replay(trace, **wrong)
    for field, value in (("staleness_s", -1.0), ("lost_events", 1.0), ("report_every_s", 0.0)):
        with pytest.raises(ConfigError, match=f"cluster.{field}={value}"):
            replace(Routing(), **{field: value})
    with pytest.raises(ConfigError, match="back_s=1: it died at 2"):
        Death(0, 2.0, 1.0)


@pytest.mark.usefixtures("heard")
def test_a_report_counts_what_came_during_a_step() -> None:
    """The first prompt is computed in one step of 0.4 s; the second comes meanwhile."""
    trace = [request("a", range(100), 2), request("b", [200], 2, arrival=0.22)]
    told = routing(RoutingPolicy.ROUND_ROBIN, report_every_s=0.1)
    replay(trace, instances=2, routing=told, max_batched_tokens=512, deaths=(Death(1, 0.0),))
    waiting = {round(now, 1): r.waiting for now, (name, r) in Heard.latest.of("report") if name == "0"}
    assert (waiting[0.2], waiting[0.3]) == (0, 1)


def test_tables_do_not_depend_on_how_rows_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def tables() -> Tables:
        return replay(agents(9, 4), instances=3, warm_up=5, routing=routing(), deaths=DEATH, **CLOSED)

    whole = tables()
    monkeypatch.setattr(table_rows, "CHUNK", 4)
    chunks = tables()
    assert whole.requests.equals(chunks.requests)
    assert whole.routes.equals(chunks.routes)
    assert whole.requests.height == 31
    assert whole.requests["id"].is_sorted()
    assert whole.routes["at_s"].is_sorted()
    assert set(whole.routes["id"]) == set(whole.requests["id"])
