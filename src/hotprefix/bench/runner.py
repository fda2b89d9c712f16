"""`hotprefix bench`. Owns: which runs are made in which order, and the files that they leave.

Rules: the model is loaded once. Every run of an arm starts on a fresh kernel and engine loop, so no run warms
the next. One discarded run comes first. Runs are interleaved over the arms, and every second pass goes
backwards, so a slow minute of the machine does not fall on one arm. Progress and tables go to stderr, results
to `summary.json` and `report.html`.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hotprefix import __version__
from hotprefix.bench.arms import DEFAULT, Arm, arms, baseline
from hotprefix.bench.bench_prompts import Material
from hotprefix.bench.bench_summary import Setup, Summary, WorkloadResult, summarise
from hotprefix.bench.drive import CountingExecutor, Loop, run_workload
from hotprefix.bench.page import render
from hotprefix.bench.request_costs import Record
from hotprefix.bench.terminal_tables import print_workload
from hotprefix.bench.workloads import FULL, QUICK, Name, Workload, build, burst
from hotprefix.engine.executor import Executor
from hotprefix.errors import InputError
from hotprefix.kernel.config import KernelConfig

PAGE = 16
PAGES = 640  # the largest wave, 8 prompts of 927 with 128 outputs, fits without any sharing (8 x 66 pages)
MAX_RUNNING = 16


@dataclass(frozen=True, slots=True)
class Rig:
    """One loaded model, ready for any number of fresh engine loops over PAGES pages of PAGE tokens."""

    executor: Executor
    make_loop: Callable[[Executor, KernelConfig], Loop]
    material: Material
    model: str
    dtype: str
    device: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Options:
    """What to run.

    runs: for each arm; None = 3, or 1 if `quick`.
    every_arm: run all pairs of publication and flight for every workload, also if they make no difference.
    """

    names: tuple[Name, ...]
    runs: int | None = None
    quick: bool = False
    every_arm: bool = False

    @property
    def run_count(self) -> int:
        return self.runs if self.runs is not None else (1 if self.quick else 3)


def parse_names(workload: str) -> tuple[Name, ...]:
    """A workload's name or `all`. Raises InputError."""
    if workload == "all":
        return tuple(Name)
    try:
        return (Name(workload),)
    except ValueError:
        known = ", ".join(Name)
        raise InputError(f"workload {workload!r}: give one of {known}, or all", param="workload") from None


def kernel_config(arm: Arm, pages: int, *, max_batched_tokens: int = 2048) -> KernelConfig:
    """The arm's kernel with `pages` pages."""
    return KernelConfig(
        total_pages=pages,
        page_size=PAGE,
        max_running=MAX_RUNNING,
        max_batched_tokens=max_batched_tokens,
        prefix_cache=arm.prefix_cache,
        publication=arm.publication,
        flight=arm.flight,
    )


def run_arm(rig: Rig, workload: Workload, arm: Arm) -> tuple[Record, ...]:
    """One run of one arm on a fresh kernel and loop."""
    executor = CountingExecutor(rig.executor)
    loop = rig.make_loop(executor, kernel_config(arm, workload.pages or PAGES))
    gc.collect()
    return run_workload(loop, executor, workload)


def run_bench(rig: Rig, options: Options, out: Path, console: Console) -> Summary:
    """Run the workloads, print their tables, write `out/summary.json` and `out/report.html`.

    Raises InputError if `out` cannot be made or the run count is below 1, BenchError if a request fails.
    """
    if options.run_count < 1:
        raise InputError(f"runs={options.run_count}: give a whole number >= 1", param="runs")
    make_folder(out)
    started, clock, load = datetime.now(UTC), time.perf_counter(), load_average()
    workloads = build(options.names, rig.material, QUICK if options.quick else FULL)
    run_arm(rig, burst(rig.material, (2,), 4, prompt=64), DEFAULT)
    results = []
    for workload in workloads:
        result = _run_workload(rig, options, workload, console)
        print_workload(console, result)
        results.append(result)
    setup = setup_of(
        model=rig.model, dtype=rig.dtype, device=rig.device, versions=rig.versions, started=started,
        load=load, page_size=PAGE, max_batched_tokens=kernel_config(DEFAULT, PAGES).max_batched_tokens,
        runs=options.run_count, quick=options.quick, wall_s=time.perf_counter() - clock,
    )  # fmt: skip
    summary = Summary(setup=setup, workloads=tuple(results))
    (out / "summary.json").write_text(summary.model_dump_json(indent=1) + "\n", encoding="utf-8")
    (out / "report.html").write_text(render(summary), encoding="utf-8")
    return summary


def _run_workload(rig: Rig, options: Options, workload: Workload, console: Console) -> WorkloadResult:
    chosen = arms(workload.name, quick=options.quick, every=options.every_arm)
    runs: dict[Arm, list[Sequence[Record]]] = {arm: [] for arm in chosen}
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=console, transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task(workload.name, total=options.run_count * len(chosen))
        for turn in range(options.run_count):
            for arm in chosen if turn % 2 == 0 else reversed(chosen):
                progress.update(task, description=f"{workload.name}: {arm.name}, run {turn + 1}")
                runs[arm].append(run_arm(rig, workload, arm))
                progress.advance(task)
    return summarise(workload, runs, baseline(workload.name), PAGE, workload.pages or PAGES)


def make_folder(out: Path) -> None:
    """Make the folder of a report. Raises InputError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}; give a folder that can be written") from error


def load_average() -> float | None:
    """Of the last minute; None if the system does not tell it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def setup_of(*, versions: dict[str, str], started: datetime, load: float | None, **told: Any) -> Setup:
    """What was measured, on this machine. load: before the first run. told: the other fields of `Setup`."""
    return Setup(
        hotprefix=__version__,
        started=started.isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), **versions},
        machine=_machine(),
        cpus=os.cpu_count() or 1,
        load_before=load,
        **told,
    )


def _machine() -> str:
    """System, architecture and, if Linux tells it, the CPU's name; never the host's name."""
    names: list[str] = []
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")][:1]
    return ", ".join([f"{platform.system()} {platform.machine()}", *names])
