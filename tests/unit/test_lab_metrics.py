"""Metrics of a replay: exact values on small tables (rules 58, 56, 61)."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from hotprefix.definitions import GROUPS, Slo
from hotprefix.errors import ConfigError
from hotprefix.lab.buckets import buckets
from hotprefix.lab.metric_names import METRICS, REQUEST_METRICS, known
from hotprefix.lab.paired_sections import Run
from hotprefix.lab.replay_metrics import beyond_horizon, metrics
from hotprefix.lab.table_math import Floats, percentiles
from tests.support.tables import UNSERVED, links, request, requests, window, windows

NO_TIME, NO_LINKS = windows(), links()
NO_SLO = Slo()
REJECTED = UNSERVED | {"outcome": "rejected", "instance": None}


def percentile(values: Floats, beyond: int, q: float) -> float | None:
    return percentiles(values, beyond, (q,))[0]


def of(*rows: dict[str, object], slo: Slo = NO_SLO, **more: float) -> dict[str, float | None]:
    return metrics(requests(*rows), NO_TIME, NO_LINKS, slo=slo, page_tokens=16, **more)


def test_every_metric_has_one_name_a_unit_and_a_value_or_none() -> None:
    found = of(request(0))
    assert found.keys() == METRICS.keys()
    assert len(METRICS) == 3 * len(REQUEST_METRICS) + 20 + 20
    assert {m.better for m in METRICS.values()} == {"lower", "higher", "neither"}


@pytest.mark.parametrize(
    ("name", "all_"),
    [
        ("ttft_p95_s", True), ("cold.completion_p50_s", True), ("worst_group_ttft_p95_s", True),
        ("hot.slo_share", True), ("ttft_mean_s", False), ("tpot_p95_s", False), ("timeout_share", False),
        ("computed_tokens", False), ("evicted_pages", False), ("cached_tps_window_p50", False),
    ],
)  # fmt: skip
def test_which_metrics_count_every_request(name: str, all_: bool) -> None:
    assert METRICS[name].counts_all is all_


def test_an_unknown_metric_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"ttft_p59_s.*ttft_p95_s"):
        known("ttft_p59_s")


def test_percentiles_are_numpys_linear_ones() -> None:
    values = np.array([1.0, 2.0, 4.0, 8.0])
    assert percentile(values, 0, 50) == 3.0
    assert percentile(values, 0, 95) == float(np.percentile(values, 95, method="linear"))
    assert percentile(np.array([7.0]), 0, 99) == 7.0
    assert percentile(np.array([]), 0, 50) is None


def test_a_percentile_among_requests_never_served_is_none_not_smaller() -> None:
    values = np.arange(95.0)  # 100 requests, 5 never served: p95's upper neighbour is the 96th
    assert percentile(values, 5, 50) == 49.5
    assert percentile(values, 5, 94) == pytest.approx(93.06)
    assert percentile(values, 5, 95) is None
    assert percentile(values[:1], 99, 50) is None


def test_unfinished_requests_are_in_every_figure() -> None:
    rows = [request(i) for i in range(3)] + [request(3, **UNSERVED)]
    found = of(*rows, slo=Slo(ttft_s=10, timeout_s=5), end_s=103.0)
    assert (found["requests"], found["finished"], found["unfinished"], found["rejected"]) == (4, 3, 1, 0)
    assert found["finished_share"] == found["slo_share"] == 0.75
    assert found["ttft_p50_s"] == 2.0
    assert found["ttft_p95_s"] is None
    assert beyond_horizon("ttft_p95_s", found)
    assert not beyond_horizon("ttft_p50_s", found)
    assert found["ttft_mean_s"] == (2 + 2 + 2 + 100) / 4  # so far
    assert found["queue_wait_mean_s"] == (1 + 1 + 1 + 100) / 4
    assert found["oldest_wait_s"] == 100.0
    assert (found["timeouts"], found["timeout_share"]) == (1, 0.25)


def test_rejected_requests_count_but_have_no_latency() -> None:
    found = of(request(0), request(1, **REJECTED), slo=Slo(ttft_s=10, timeout_s=5), end_s=100.0)
    assert (found["rejected"], found["finished_share"], found["slo_share"]) == (1, 0.5, 0.5)
    assert found["ttft_mean_s"] == 2.0
    assert found["ttft_p50_s"] is None
    assert found["timeouts"] == 0
    assert found["oldest_wait_s"] == 1.0


def test_latency_counts_from_arrival_not_from_admission() -> None:
    """(h) 162: at 10 arrivals a second served at 5 a second the wait grows, and is in TTFT."""
    rows = [
        request(0, id=f"r{i}", arrival_s=i / 10, admit_s=i / 5, first_token_s=i / 5 + 0.2, finish_s=i / 5 + 1)
        for i in range(100)
    ]
    found = of(*rows)
    assert found["queue_wait_p99_s"] == pytest.approx(np.percentile(np.arange(100) / 10, 99))
    assert found["ttft_mean_s"] == pytest.approx(49.5 / 10 + 0.2)


def test_tpot_leaves_the_first_token_out() -> None:
    """(h) 159, 161: eight tokens, first at 1.0 s, last at 2.4 s: 1.4 / 7."""
    found = of(request(0, arrival_s=0.0, first_token_s=1.0, finish_s=2.4, output_tokens=8))
    assert found["tpot_mean_s"] == pytest.approx(0.2)
    assert found["ttft_mean_s"] == 1.0


def test_queue_wait_ends_at_the_first_admission_and_requeueing_is_separate() -> None:
    """(h) 154."""
    found = of(request(0, requeue_s=7.0, retractions=2))
    assert (found["queue_wait_mean_s"], found["requeue_mean_s"], found["retractions"]) == (1.0, 7.0, 2)


def test_repeated_work_is_cost_and_never_reuse() -> None:
    """(h) 156: nothing was known, everything computed twice."""
    unknown = dict.fromkeys(("ideal_tokens", "cached_l1", "matched_at_enqueue", "matched_at_admission"), 0)
    none_kept = dict.fromkeys(("retained_tokens", "recomputed_tokens"), 0)
    found = of(request(0, computed_tokens=200, rework_tokens=100, retractions=1, **unknown, **none_kept))
    assert (found["reuse_share"], found["computed_tokens"], found["rework_tokens"]) == (0.0, 200, 100)
    assert found["duplication_factor"] == 2.0
    assert found["reuse_of_ideal"] is None
    assert found["net_l1_hit_loss_share"] is None


def test_one_token_of_a_prompt_is_always_new() -> None:
    """A prompt that an endless cache knows whole still needs its last token computed."""
    found = of(request(0, ideal_tokens=100, cached_l1=96, computed_tokens=4))
    assert (found["duplication_factor"], found["reuse_of_ideal"]) == (4.0, 96 / 99)


def test_the_request_chain() -> None:
    row = request(
        0, matched_at_enqueue=60, matched_at_admission=44, retained_tokens=20, restored_l2_tokens=16,
        restored_l3_tokens=4, recomputed_tokens=20, cached_l1=44, cached_l2=10, cached_l3=6,
        computed_tokens=40,
    )  # fmt: skip
    found = of(row)
    assert found["net_l1_hit_loss_tokens"] == 16  # net: 24 tokens came that were not there on arrival
    assert found["lost_tokens"] == 40
    shares = [found[f"{part}_share"] for part in ("retained", "restored_l2", "restored_l3", "recomputed")]
    assert shares == [20 / 60, 16 / 60, 4 / 60, 20 / 60]
    assert [found[f"cached_l{tier}_share"] for tier in (1, 2, 3)] == [0.44, 0.10, 0.06]
    assert (found["reused_tokens"], found["reuse_share"], found["reuse_of_ideal"]) == (60, 0.6, 1.0)
    assert found["duplication_factor"] == 1.0


def test_net_loss_may_be_negative() -> None:
    found = of(request(0, matched_at_enqueue=20, matched_at_admission=60, retained_tokens=20))
    assert (found["net_l1_hit_loss_tokens"], found["net_l1_hit_loss_share"]) == (-40, -2.0)


def test_hot_means_half_of_the_prompt_was_seen_before() -> None:
    rows = [request(0, ideal_tokens=50), request(1, ideal_tokens=49, first_token_s=6.0)]
    found = of(*rows)
    assert [found[f"{group}.requests"] for group in GROUPS] == [1, 1]
    assert (found["hot.ttft_p95_s"], found["cold.ttft_p95_s"]) == (2.0, 5.0)
    assert found["worst_group_ttft_p95_s"] == 5.0


def test_the_worst_group_is_beyond_the_horizon_if_one_is() -> None:
    found = of(request(0), request(1, ideal_tokens=0, **UNSERVED))
    assert found["worst_group_ttft_p95_s"] is None
    assert beyond_horizon("worst_group_ttft_p95_s", found)
    assert found["hot.ttft_p95_s"] == 2.0


def test_goodput_needs_every_objective() -> None:
    rows = [request(i) for i in range(5)]
    assert of(*rows, slo=Slo(ttft_s=2.0, tpot_s=0.11, completion_s=3.0))["goodput_rps"] == 5 / 4
    assert of(*rows, slo=Slo(ttft_s=1.9))["good_requests"] == 0
    assert of(*rows, slo=Slo(tpot_s=0.09))["good_requests"] == 0
    assert of(*rows, slo=Slo(completion_s=2.9))["good_requests"] == 0
    one_token = request(9, output_tokens=1, finish_s=11.0)
    assert of(one_token, slo=Slo(tpot_s=0.01))["good_requests"] == 1


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [request(0)],
        [request(0), request(0, id="tie")],
        [request(0, **UNSERVED)],
        [request(0, **REJECTED)],
        [request(0, output_tokens=1, finish_s=2.0)],
        [request(0, input_tokens=0, ideal_tokens=0, cached_l1=0, computed_tokens=0, matched_at_enqueue=0)],
    ],
    ids=["nothing", "one", "ties", "all unfinished", "all rejected", "one token", "no prompt"],
)
def test_nothing_is_ever_nan_or_infinite(rows: list[dict[str, object]]) -> None:
    """(h) 164: empty groups, single values, ties, zero durations."""
    for time in (NO_TIME, windows(window(0, seconds=0.0)), windows(window(0))):
        found = metrics(requests(*rows), time, NO_LINKS, slo=Slo(ttft_s=1, timeout_s=1), page_tokens=16)
        json.dumps(found, allow_nan=False)
        assert found.keys() == METRICS.keys()
        assert all(v is None or math.isfinite(v) for v in found.values())
    if len(rows) < 2 or rows[0]["arrival_s"] == rows[1]["arrival_s"]:
        assert found["goodput_rps"] is None


def test_windows_and_links() -> None:
    time = windows(
        window(0, cached_tokens=300, computed_tokens=600, prefill_s=6.0, decode_s=3.0, scheduler_s=1.5,
               evicted_pages=5, refresh_touches=7, stalls=1),
        window(30, seconds=10.0, cached_tokens=100, prefill_s=1.0),
        window(0, instance=1, cached_tokens=0, prefill_s=1.0, scheduler_s=0.5),
    )  # fmt: skip
    columns = ("instance", "link", "bytes", "seconds", "transfers", "cancels")
    amounts = (
        (0, "l2-l1", 800, 2.0, 3, 2),
        (1, "l2-l1", 200, 0.5, 1, 0),
        (0, "l3-l2", 0, 0.0, 0, 0),
    )
    moved = links(*(dict(zip(columns, one, strict=True)) for one in amounts))
    found = metrics(requests(request(0)), time, moved, slo=Slo(), page_tokens=16)
    assert (found["cached_tps"], found["uncached_tps"]) == (400 / 40, 600 / 40)
    assert (found["cached_tps_window_p50"], found["cached_tps_window_max"]) == (10.0, 10.0)
    assert found["uncached_tps_window_max"] == 20.0
    assert found["prefill_busy_share"] == 8 / 80
    assert found["decode_busy_share"] == 3 / 80
    assert found["scheduler_share"] == 2 / 80
    assert (found["evicted_pages"], found["evicted_tokens"]) == (5, 80)
    assert (found["refresh_touches"], found["stalls"]) == (7, 1)
    assert (found["normalised_load_worst"], found["normalised_load_mean"]) == (10 / 40, 5.5 / 40)
    assert found["load_imbalance"] == 10 / 5.5
    assert (found["l2_l1_bytes"], found["l2_l1_bandwidth"]) == (1000, 400.0)
    assert [found[f"l2_l1_{n}"] for n in ("transfers", "cancels")] == [4, 2]
    assert (found["l3_l2_bytes"], found["l3_l2_bandwidth"]) == (0, None)
    assert found["l1_l2_bytes"] is None


def test_the_worst_instance() -> None:
    rows = [request(0), request(1, instance=1, first_token_s=9.0), request(2, **REJECTED)]
    found = of(*rows, slo=Slo(ttft_s=5))
    assert (found["worst_instance_ttft_p95_s"], found["worst_instance_slo_share"]) == (8.0, 0.0)


def test_buckets_hold_every_request_once() -> None:
    rows = [
        request(0, heat=0, queue_depth=0, input_tokens=1023),
        request(1, heat=3, queue_depth=1, input_tokens=1024, instance=1),
        request(2, heat=256, queue_depth=5000, input_tokens=200000, instance=1),
        request(3, **REJECTED),
    ]
    found = buckets(Run(0, requests(*rows), NO_TIME, NO_LINKS, page_tokens=16), Slo())
    for by in ("heat", "queue depth", "prompt tokens"):
        assert found.filter(by=by)["requests"].sum() == 4
    assert found.filter(by="heat")["bucket"].to_list() == ["0", "1 to 3", "256 and more"]
    assert found.filter(by="prompt tokens")["order"].to_list() == [0, 1, 5]
    assert found.filter(by="instance").select("bucket", "requests").rows() == [("0", 1.0), ("1", 2.0)]


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_objectives_are_positive_seconds(value: float) -> None:
    with pytest.raises(ConfigError, match=r"ttft_s=.*: give seconds > 0"):
        Slo(ttft_s=value)


def test_predictions_are_compared_with_what_came_on_the_instance_chosen_first() -> None:
    """TTFT is 2 s. The third began again elsewhere, and of the fourth nothing was predicted."""
    knew = {"available_tokens": 60, "captured_tokens": 30, "copied_tokens": 10}
    found = of(
        request(0, predicted_first_s=2.5, **knew),
        request(1, predicted_first_s=1.0, **knew),
        request(2, predicted_first_s=90.0, failovers=1, **knew),
        request(3),
    )
    assert found["prediction_bias_s"] == pytest.approx((0.5 - 1.0) / 2)
    assert found["prediction_error_p50_s"] == pytest.approx(0.75)
    assert found["failed_over"] == 1
    assert found["available_share"] == pytest.approx(180 / 400)
    assert found["captured_share"] == pytest.approx(90 / 400)
    assert found["copied_tokens"] == 30
    nothing = of(request(0))
    assert {nothing[name] for name in ("prediction_bias_s", "available_share", "copied_tokens")} == {None}
    assert METRICS["prediction_bias_s"].signed
    assert not METRICS["prediction_error_p95_s"].counts_all


def test_the_spread_of_cached_tps_is_of_instances() -> None:
    table = windows(
        window(0.0, cached_tokens=100), window(30.0, cached_tokens=200),
        window(0.0, cached_tokens=100, instance=1), window(0.0, instance=2, cached_tokens=500),
    )  # fmt: skip
    found = metrics(requests(request(0)), table, NO_LINKS, slo=NO_SLO, page_tokens=16)
    assert found["cached_tps_spread"] == pytest.approx((500 - 100) / 300)
