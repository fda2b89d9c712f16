"""A check that cannot fail is not measured: it supports no claim and refutes none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hotprefix.cost.model import CostModel
from hotprefix.cost.presets import load_cost, preset_names
from hotprefix.definitions import Slo
from hotprefix.kernel.config import Eviction, KernelConfig, Refresh, TierConfig
from hotprefix.lab.basis import Models, modelled, not_measured, rests_on
from hotprefix.lab.experiment.assess import assess
from hotprefix.lab.experiment.load import load, shipped
from hotprefix.lab.experiment.run_plan import plan
from hotprefix.lab.hypothesis import Hypothesis, Kind, Tolerance
from hotprefix.lab.metric_names import METRICS
from hotprefix.lab.paired_sections import Run, figures
from hotprefix.lab.verdict import ClaimState, Outcome, Verdict
from tests.support.replays import price
from tests.support.tables import run

SLO = Slo(ttft_s=3.0, timeout_s=10.0)
OFF = KernelConfig(total_pages=64, refresh=Refresh.OFF)
WINDOW = replace(OFF, refresh=Refresh.WINDOW)
UNPRICED = load_cost("llama-3.3-70b.2xh100.fp8")


def models(
    kernel: KernelConfig, cost: CostModel, *, key: str = "a", instances: int = 1, cut: bool = True
) -> Models:
    return modelled(kernel, cost, run=key, instances=instances, arrivals_vary=cut, horizon=cut)


def runs(stream: int, found: Models | None) -> list[Run]:
    return [replace(run(seed, stream, sigma=0.3), models=found) for seed in range(3)]


def verdict(base: Models | None, arm: Models | None, *wanted: Tolerance, slo: Slo = SLO) -> Verdict:
    """Of a claim that nothing gets worse."""
    one = Hypothesis("h", "c", Kind.HARM, "arm", "base", "c", not_worse=wanted)
    pair = {("c", "base"): runs(1, base), ("c", "arm"): runs(2, arm)}
    return assess(pair, [one], baseline="base", slo=slo).verdicts[0]


SCHEDULER = Tolerance("scheduler_share", 0.005, "difference")
REUSE = Tolerance("reuse_share", 0.5)


def test_a_share_of_a_time_that_has_no_price_supports_nothing() -> None:
    found = verdict(models(OFF, UNPRICED), models(WINDOW, UNPRICED, key="b"), SCHEDULER, REUSE)
    assert found.outcome is Outcome.INCONCLUSIVE
    assert [f.state for f in found.findings] == [ClaimState.NOT_MEASURED, ClaimState.HOLDS]
    assert "scheduler_share: not measured, the cost model gives the scheduler no price" in found.reason
    assert found.findings[0].interval is None
    assert found.settled  # no number of seeds would measure it
    assert found.would_decide is None


def test_what_two_arms_differ_in_must_have_a_price() -> None:
    cost = price()
    unknown = verdict(models(OFF, cost), models(WINDOW, cost, key="b"), SCHEDULER)
    assert unknown.findings[0].state is ClaimState.NOT_MEASURED
    assert "no price to what they differ in (kernel.refresh)" in unknown.reason
    priced = price(refresh_touch_s=1e-6)
    assert (
        verdict(models(OFF, priced), models(WINDOW, priced, key="b"), SCHEDULER).outcome is Outcome.SUPPORTED
    )
    # Arms that make the scheduler do the same work need none.
    few = replace(WINDOW, max_running=2)
    assert verdict(models(WINDOW, cost), models(few, cost, key="b"), SCHEDULER).outcome is Outcome.SUPPORTED
    informed = replace(OFF, refresh=Refresh.QUEUE_INFORMED)
    for other in (informed, replace(OFF, eviction=Eviction.LFU)):
        assert not_measured("scheduler_share", models(OFF, priced), models(other, priced, key="b"), SLO)


def test_a_run_compared_with_itself_shows_nothing() -> None:
    same = models(OFF, price())
    found = verdict(same, same, REUSE)
    assert found.findings[0].state is ClaimState.NOT_MEASURED
    assert "one run, told twice" in found.reason


@pytest.mark.parametrize(
    ("metric", "why"),
    [
        ("cached_l2_share", "there is no L2"),
        ("hot.restored_l3_share", "there is no L3"),
        ("load_imbalance", "there is one instance"),
        ("unfinished", "served to its end"),
        ("cold.requests", "in every arm alike"),
    ],
)
def test_what_every_arm_has_by_construction_is_not_measured(metric: str, why: str) -> None:
    plain, other = (models(k, price(), key=key, cut=False) for k, key in ((OFF, "a"), (WINDOW, "b")))
    assert why in not_measured(metric, plain, other, SLO)
    tiers = replace(OFF, tiers=TierConfig(pages=8, storage=True))
    full = [models(tiers, price(), key=key, instances=2) for key in "ab"]
    assert not_measured(metric, full[0], full[1], SLO) == ""


def test_without_objectives_there_is_no_goodput() -> None:
    found = verdict(None, None, Tolerance("goodput_rps", 0.5), REUSE, slo=Slo(timeout_s=10.0))
    assert [f.state for f in found.findings] == [ClaimState.NOT_MEASURED, ClaimState.HOLDS]
    assert "no objective is given (slo.ttft_s" in found.reason
    assert verdict(None, None, Tolerance("goodput_rps", 0.5)).findings[0].state is not ClaimState.NOT_MEASURED


def test_no_zero_stands_for_what_was_not_measured() -> None:
    (one, *_) = runs(1, models(OFF, UNPRICED))
    found = figures(one, SLO)
    assert found["scheduler_share"] is found["cached_l2_share"] is found["restored_l3_share"] is None
    assert found["reuse_share"] is not None
    hot = replace(one, requests=one.requests.filter(one.requests["ideal_tokens"] > 0))
    assert figures(hot, SLO)["cold.requests"] == 0
    assert figures(hot, SLO)["cold.lost_tokens"] is None


def test_every_metric_says_what_it_rests_on() -> None:
    assert rests_on("cold.ttft_p95_s") == rests_on("goodput_rps") == "times by the cost model"
    assert rests_on("lost_tokens") == rests_on("reuse_share") == "counted by the kernel"
    assert {rests_on(name) for name in METRICS} == {"times by the cost model", "counted by the kernel"}


def test_every_check_that_ships_is_measured_but_the_schedulers_price() -> None:
    """With the presets they ship with. What refresh costs the scheduler needs a calibrated cost file."""
    blind = set()
    for name in shipped():
        experiment = load(name)
        planned = plan(experiment)
        for spec in experiment.hypotheses:
            one = spec.build(experiment.baseline)
            base, arm = (planned.runs[one.condition, arm][0] for arm in (one.baseline, one.arm))
            ours = [
                modelled(
                    task.kernel, task.cost, run=task.key, instances=task.settings.cluster.instances,
                    arrivals_vary=False,
                    horizon=task.settings.load.horizon_s is not None,
                )
                for task in (base, arm)
            ]  # fmt: skip
            for check in (*one.improves, *one.reaches, *one.not_worse, *one.equal):
                if not_measured(check.metric, *ours, experiment.slo.build()):
                    blind.add((name, one.id, check.metric))
    assert blind == {("refresh-off-on", "window-costs-the-scheduler-little", "scheduler_share")}


def test_published_presets_do_not_claim_to_know_what_refresh_costs() -> None:
    assert {load_cost(name).refresh_touch_s for name in preset_names()} == {None}


def test_the_report_says_so(tmp_path: Path) -> None:
    from hotprefix.report.replay.verdict_cards import cards
    from tests.support.results import demo

    result = demo()
    blind = verdict(models(OFF, UNPRICED), models(WINDOW, UNPRICED, key="b"), SCHEDULER, REUSE)
    (card,) = cards(replace(result, verdicts=(blind,)))
    assert [row["state"] for row in card["rows"]] == ["not measured", "holds"]
    assert card["rows"][0]["change"] == "not measured"
    assert card["rows"][1]["rests"] == "counted by the kernel, 9 sections"
    assert "Judged by 3 seeds at 97.5 %" in card["judged"]
