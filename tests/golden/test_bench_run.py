"""`run_bench` end to end on the real kernel, without a model: files, order of runs, refusals."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from kernel_loop import FakeExecutor, KernelLoop
from rich.console import Console

from hotprefix.bench.arms import arms
from hotprefix.bench.bench_summary import Summary
from hotprefix.bench.runner import PAGES, Options, Rig, parse_names, run_bench
from hotprefix.bench.workloads import Name
from hotprefix.engine.executor import Executor
from hotprefix.errors import InputError
from hotprefix.kernel.config import KernelConfig
from tests.support.material import SyntheticMaterial


class Recorder:
    """A rig whose loops note the kernels that were made."""

    def __init__(self) -> None:
        self.made: list[KernelConfig] = []
        self.rig = Rig(
            FakeExecutor(), self._loop, SyntheticMaterial(), "none", "none", "none", {"torch": "none"}
        )

    def _loop(self, executor: Executor, config: KernelConfig) -> KernelLoop:
        self.made.append(config)
        return KernelLoop(executor, config)


def test_all_workloads_leave_a_valid_summary_and_report(tmp_path: Path) -> None:
    text = StringIO()
    out = tmp_path / "new" / "out"
    made = run_bench(Recorder().rig, Options(tuple(Name), quick=True), out, Console(file=text, width=160))
    raw = (out / "summary.json").read_text()
    assert not {"NaN", "Infinity"} & set(raw.replace(",", " ").replace("\n", " ").split())
    assert Summary.model_validate_json(raw) == made
    data = json.loads(raw)
    assert [w["workload"] for w in data["workloads"]] == list(Name)
    for workload in data["workloads"]:
        for group in workload["groups"]:
            for arm in group["arms"]:
                assert arm["counts"]["stable"]
                assert arm["counts"]["same_outputs"] == arm["counts"]["requests"]
                assert len(arm["timings"]["mean_ttft_s"]["runs"]) == data["setup"]["runs"] == 1
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert all(w["title"] in text.getvalue() for w in data["workloads"])


def test_runs_are_interleaved_and_every_second_pass_goes_backwards(tmp_path: Path) -> None:
    recorder = Recorder()
    made = run_bench(
        recorder.rig, Options((Name.LATE_PAIR,), runs=2, quick=True), tmp_path, Console(file=StringIO())
    )
    pairs = [(c.publication, c.flight) for c in recorder.made[1:]]  # the first is the discarded run
    expected = [(a.publication, a.flight) for a in arms(Name.LATE_PAIR, quick=True)]
    assert pairs == [*expected, *reversed(expected)]
    timings = made.workloads[0].groups[0].arms[0].timings
    assert len(timings.mean_ttft_s.runs) == 2
    assert timings.mean_ttft_s.sd is not None


def test_every_run_gets_a_fresh_kernel_of_the_workloads_size(tmp_path: Path) -> None:
    recorder = Recorder()
    made = run_bench(recorder.rig, Options((Name.CHURN,), quick=True), tmp_path, Console(file=StringIO()))
    pages = [c.total_pages for c in recorder.made]
    assert pages[0] == PAGES
    assert set(pages[1:]) == {made.workloads[0].cache_pages}
    assert [c.prefix_cache for c in recorder.made[1:]] == [False, True, True]


def test_bad_arguments_are_refused_with_the_fix(tmp_path: Path) -> None:
    assert parse_names("all") == tuple(Name)
    assert parse_names("fan-out") == (Name.FAN_OUT,)
    with pytest.raises(InputError, match=r"workload 'brust': give one of overlap, .*or all"):
        parse_names("brust")
    with pytest.raises(InputError, match="runs=0"):
        run_bench(Recorder().rig, Options((Name.BURST,), runs=0), tmp_path, Console(file=StringIO()))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InputError, match="--out"):
        run_bench(Recorder().rig, Options((Name.BURST,)), blocked / "x", Console(file=StringIO()))
