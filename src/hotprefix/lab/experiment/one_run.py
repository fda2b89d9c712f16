"""An experiment from file to result. Owns: `run`, and the progress that is shown meanwhile.

Rules:
1. A run that is finished in the output folder is not done again.
2. If an experiment goes on until its claims are decided, they are judged after each look.
3. A folder holds one experiment; another one is refused before anything runs.
4. Progress goes to stderr.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hotprefix.errors import InputError
from hotprefix.lab.experiment.collect import collect, undecided, write_requests
from hotprefix.lab.experiment.finished_runs import Failure, RunStore
from hotprefix.lab.experiment.ray_sweep import ray_sweep
from hotprefix.lab.experiment.result import ExperimentResult
from hotprefix.lab.experiment.run_plan import plan
from hotprefix.lab.experiment.spec import Experiment
from hotprefix.lab.experiment.sweep import Task, sweep
from hotprefix.lab.experiment.task import ReplayTask


def run(
    experiment: Experiment,
    out: Path,
    console: Console,
    *,
    jobs: int | None = None,
    ray: str | None = None,
    force: bool = False,
    command: str = "",
    meanwhile: Callable[[], None] | None = None,
) -> ExperimentResult:
    """Do the runs that are missing, write OUT/requests.parquet, and return what was found. Raises InputError
    if the file, the trace or the folder is no good.

    jobs: how many runs at a time; None = one for each core.
    ray: the address of a cluster; None = processes here.
    force: see `RunStore.claim`.
    command: the command line that repeats this.
    meanwhile: see `sweep.sweep`.
    """
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs {jobs}: give a whole number >= 1", param="jobs")
    with console.status(f"{experiment.name}: reading the trace"):
        planned = plan(experiment)
    store = RunStore(out)
    with store.alone():
        store.claim(planned.identity, experiment.name, force=force)
        store.tidy()
        for look in planned.looks:
            tasks = planned.until(look.seeds)
            _sweep(tasks, experiment.name, store, console, jobs or os.cpu_count() or 1, ray, meanwhile)
            if look is not planned.looks[-1] and not undecided(planned, store, look):
                break
            meanwhile = None
        found = collect(planned, store, command=command)
        write_requests(planned, store, out / "requests.parquet", seeds=max(found.seeds))
        return found


def _sweep(
    tasks: Sequence[ReplayTask], name: str, store: RunStore, console: Console, jobs: int, ray: str | None,
    meanwhile: Callable[[], None] | None,
) -> None:  # fmt: skip
    left = [task for task in tasks if not store.finished(task.key)]
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[requests]}"), console=console, transient=True,
    )  # fmt: skip
    with bar:
        watch = _Bar(bar, name, total=len(tasks), done=len(tasks) - len(left))
        if ray is None:
            sweep(left, store.out, jobs=jobs, watch=watch, meanwhile=meanwhile)
        elif left:
            ray_sweep(left, store.out, address=ray, jobs=jobs, watch=watch)


class _Bar:
    """Shows a sweep: runs ended, and requests replayed in those under way."""

    def __init__(self, bar: Progress, name: str, *, total: int, done: int) -> None:
        self._bar = bar
        self._task = bar.add_task(name, total=total, completed=done, requests="")

    def ended(self, task: Task, failure: Failure | None) -> None:
        self._bar.advance(self._task)
        if failure is not None:
            self._bar.console.print(f"a run failed: {failure.error}", style="red", markup=False)

    def moved(self, requests: int) -> None:
        self._bar.update(self._task, requests=f"{requests} requests in runs under way" if requests else "")
