"""What an experiment file may say of a fleet, and what reaches the replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotprefix.errors import InputError
from hotprefix.fleet.config import Homes, RoutingPolicy, Term
from hotprefix.lab.experiment.load import Changes, load
from hotprefix.lab.experiment.run_plan import plan
from hotprefix.lab.sim.replay import Death, Replay

FILE = """
name = "fleet"
question = "Which instance?"
baseline = "session"
seeds = 1
cost = "llama-3.1-8b.1xh100.fp8"
[trace]
generate = "agents"
[trace.params]
sessions = 8
steps = { median = 3, sigma = 0.3 }
[load]
concurrency = 6
[cluster]
instances = 4
[capacity]
size = 40960
[[arms]]
name = "session"
[[arms]]
name = "predicted"
set = { "cluster.policy" = "predicted" }
[[arms]]
name = "without-delay"
set = { "cluster.policy" = "predicted", "cluster.terms.delay" = false }
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "fleet.toml").write_text(FILE)
    return tmp_path / "fleet.toml"


def replays(path: Path, *sets: str) -> dict[str, Replay]:
    runs = plan(load(str(path), Changes(sets=sets))).runs
    return {arm: tasks[0].replay() for (_, arm), tasks in runs.items()}


def test_arms_choose_policies_and_switch_terms_off(path: Path) -> None:
    found = {arm: replay.routing.fleet for arm, replay in replays(path).items()}
    assert [fleet.policy for fleet in found.values()] == [
        RoutingPolicy.SESSION,
        RoutingPolicy.PREDICTED,
        RoutingPolicy.PREDICTED,
    ]
    assert [len(fleet.terms) for fleet in found.values()] == [len(Term), len(Term), len(Term) - 1]
    assert Term.DELAY not in found["without-delay"].terms
    assert {fleet.homes for fleet in found.values()} == {Homes.TURNS}


def test_every_setting_reaches_the_replay(path: Path) -> None:
    found = replays(
        path, "cluster.report_every_s=2.0", "cluster.staleness_s=0.5", "cluster.lost_events=0.1",
        "cluster.fleet.homes=hash", "cluster.fleet.spread=0.5", "cluster.fleet.plan.slots=3",
        'cluster.workers=[{count=3}, {speed=0.5, capacity=0.25, requests_per_s=2.0}]',
        "cluster.requests_per_s=5.0", "cluster.failures=[{worker=1, at_s=3.0, back_s=9.0}]",
    )["session"]  # fmt: skip
    routing = found.routing
    assert (routing.report_every_s, routing.staleness_s, routing.lost_events) == (2.0, 0.5, 0.1)
    assert (routing.fleet.homes, routing.fleet.spread, routing.fleet.plan.slots) == (Homes.HASH, 0.5, 3)
    assert found.deaths == (Death(1, 3.0, 9.0),)
    pages = found.kernel.total_pages
    assert [found.kernel_of(i).total_pages for i in range(4)] == [pages] * 3 + [pages // 4]
    assert [found.worker(i).capacity for i in range(4)] == [5.0] * 3 + [2.0]
    assert found.cost_of(3).base_s == pytest.approx(2 * found.cost_of(0).base_s)
    alike = replays(path, "cluster.requests_per_s=5.0")["session"]
    assert [alike.worker(i).capacity for i in range(4)] == [5.0] * 4


def test_what_decides_a_run_is_in_its_key(path: Path) -> None:
    def keys(*sets: str) -> set[str]:
        return {task.key for task in plan(load(str(path), Changes(sets=sets))).tasks}

    every = keys()
    assert len(every) == 3
    for setting in (
        "cluster.report_every_s=2.0", "cluster.staleness_s=0.5", "cluster.lost_events=0.1",
        "cluster.fleet.spread=0.5", "cluster.requests_per_s=2.0",
        "cluster.workers=[{count=2},{count=2,speed=2}]",
        "cluster.failures=[{worker=0, at_s=1}]",
    ):  # fmt: skip
        assert not every & keys(setting), setting


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ("cluster.route=least_loaded",),
            r"cluster.route='least_loaded' is cluster.policy='least_requests' now",
        ),
        (("cluster.route=session",), r"cluster.route='session' is cluster.policy='session' now"),
        (("cluster.fleet.homes=nowhere",), r"cluster.fleet.homes='nowhere'"),
        (("cluster.workers=[{count=3}]",), r"cluster.workers are 3 together, and cluster.instances=4"),
        (("cluster.fleet.policy=session",), r"cluster.fleet.policy: no such key"),
        (("cluster.fleet.spred=1",), r"cluster.fleet.spred: no such key.*spread"),
        (("cluster.fleet.plan.period=3",), r"cluster.fleet.plan.period: no such key; .* period_s\?"),
        (("cluster.fleet.plan.slots=0",), r"cluster.fleet.plan.slots=0: give a whole number >= 1"),
        (("cluster.fleet.slack=-1",), r"cluster.fleet.slack=-1.0: give a number >= 0"),
        (("cluster.fleet.slack=much",), r"cluster.fleet.slack='much': give a valid number"),
        (("kernel.tiers.page=3",), r"kernel.tiers.page: no such key; .* pages\?"),
        (("kernel.max_running=0",), r"kernel.max_running=0: give a whole number >= 1"),
        (("cluster.fleet.spread=-1",), r"spread=-1.*give a number >= 0"),
        (("cluster.fleet.runners_up=many",), r"cluster.fleet.runners_up='many'"),
        (("cluster.terms.speed=false",), r"cluster.terms.speed"),
        (("cluster.lost_events=1.0",), r"cluster.lost_events"),
        (("cluster.failures=[{worker=9, at_s=1}]",), r"failures.worker=9: there are 4 instances"),
    ],
)
def test_what_is_wrong_is_refused_with_the_fix(path: Path, sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(load(str(path), Changes(sets=sets)))


def test_what_draws_needs_seeds(path: Path) -> None:
    path.write_text(path.read_text().replace("seeds = 1", "seeds = 3"))
    path.write_text(path.read_text().replace("concurrency = 6", ""))
    path.write_text(path.read_text().split("[trace]")[0] + "[trace]\nsource = 'sample:agents'\n[load]"
                    + path.read_text().split("[load]")[1])  # fmt: skip
    runs = plan(load(str(path))).runs
    assert [len(tasks) for tasks in runs.values()] == [1, 1, 1]
    lossy = plan(load(str(path), Changes(sets=("cluster.lost_events=0.1",)))).runs
    assert [len(tasks) for tasks in lossy.values()] == [3, 3, 3]
    path.write_text(path.read_text().replace('"predicted"', '"random"'))
    runs = plan(load(str(path))).runs
    assert [len(tasks) for tasks in runs.values()] == [1, 3, 3]


def test_a_run_keeps_its_route_and_load_tables(path: Path) -> None:
    task = plan(load(str(path))).runs["all", "predicted"][0]
    tables: dict[str, Any] = task.run(lambda done: None).tables
    assert tables["routes"].height == tables["requests"].height > 20
    assert tables["loads"]["instance"].n_unique() == 4
