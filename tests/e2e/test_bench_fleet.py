"""`hotprefix bench fleet` on paced engines: the counts that follow from the policy alone."""

from __future__ import annotations

import json
import os
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from hotprefix.bench.fleet_runner import ARMS, FleetOptions, run_fleet_bench
from hotprefix.bench.fleet_summary import FleetArm
from hotprefix.bench.fleet_workloads import FleetName, FleetScale

SCALE = FleetScale(groups=2, copies=4, questions=6, document=400, streams=8, outputs=2, long=40, rate=20.0)
NAMES = (FleetName.KILLED, FleetName.BURST, FleetName.DOCUMENT)


def test_counts_of_every_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    given = {"model": "default", "paced": "llama-3.1-8b.1xh100.fp8", "kv_tokens": 16000}
    options = FleetOptions(given, 2, NAMES, 1, scale=SCALE)
    run_fleet_bench(options, tmp_path / "out", Console(file=StringIO()))
    killed, burst, document = json.loads((tmp_path / "out" / "summary.json").read_text())["workloads"]
    for workload in (killed, burst, document):
        arms = {arm["policy"]: FleetArm(**arm) for arm in workload["arms"]}
        assert tuple(arms) == ARMS
        for arm in arms.values():
            assert arm.reused_tokens[0] + arm.computed_tokens[0] == arm.prompt_tokens[0]
    _a_worker_was_killed(killed["arms"])
    _the_fleet_computed_once(burst["arms"], 2 * (532 + 3 * 4))
    _the_fleet_computed_once(document["arms"], 424 + 5 * 24)
    # By turns, so each worker computes the document.
    assert document["arms"][0]["computed_tokens"] == [424 + 5 * 24 + 400]
    assert document["arms"][0]["by_worker"] == [[3, 3]]
    assert "round_robin" in (tmp_path / "out" / "report.html").read_text()


def _a_worker_was_killed(arms: list[dict[str, object]]) -> None:
    for arm in map(FleetArm.model_validate, arms):
        answered = arm.prompt_tokens[0] // 200
        assert answered + arm.lost[0] == 8
        assert answered >= 1
        assert sum(arm.by_worker[0]) == 8 + arm.retries[0] + sum(arm.migrations or ())
        assert arm.duplication == (None,)
        assert arm.lost[0] + arm.retries[0] + sum(arm.migrations or ()) > 0


def _the_fleet_computed_once(arms: list[dict[str, object]], required: int) -> None:
    """With affinity; `predicted` may compute more where it says so."""
    for arm in map(FleetArm.model_validate, arms):
        assert arm.required_tokens == (required,)
        assert sum(arm.by_worker[0]) == arm.requests
        assert (arm.lost, arm.retries) == ((0,), (0,))
        assert 1 <= (arm.duplication[0] or 0) <= 2
        if arm.policy == "affinity":
            assert arm.computed_tokens == (required,)
        if arm.policy == "predicted":
            assert arm.computed_tokens[0] - required <= arm.copied_tokens[0]
