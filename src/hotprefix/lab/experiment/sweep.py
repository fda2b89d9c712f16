"""Many runs, some at a time. Owns: one process per run, and what happens when one of them dies.

Rules:
1. A run has a process of its own (spawned, so nothing is inherited), and its result comes back as files. A
   run that raises, is killed or runs out of memory costs its own result and no other's.
2. Finished runs are not done again.
3. An interrupt ends the processes and leaves a folder that the same command continues; so does the sweep's
   own death, however it came about.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, cast

from hotprefix.lab.experiment.finished_runs import Failure, Output, RunStore

POLL_S = 0.25


class Task(Protocol):
    """One run: its key, and how to do it. It is sent to another process, so it can be pickled."""

    @property
    def key(self) -> str: ...
    def run(self, progress: Callable[[int], None]) -> Output:
        """Do it. progress: told the number of requests that have ended."""


class Watch(Protocol):
    """Something that is told how far a sweep is."""

    def ended(self, task: Task, failure: Failure | None) -> None: ...
    def moved(self, requests: int) -> None:
        """requests: ended so far in the runs under way."""


def attempt(task: Task, out: Path, progress: Callable[[int], None]) -> Failure | None:
    """Do one run. If it raises, that becomes a record beside the finished runs."""
    store = RunStore(out)
    try:
        store.save(task.key, task.run(progress))
    except Exception as error:
        failure = Failure.of(error)
        store.fail(task.key, failure)
        return failure
    return None


@dataclass(slots=True)
class _RunningTask:
    task: Task
    process: BaseProcess
    done: Any = field(repr=False)  # shared count of ended requests


def sweep(
    tasks: Sequence[Task], out: Path, *, jobs: int, watch: Watch, meanwhile: Callable[[], None] | None = None
) -> None:
    """Do the tasks, `jobs` at a time, in the order given. Returns when each has a result or a failure.
    meanwhile: called once, while the first runs go and there is nothing to do here."""
    context = mp.get_context("spawn")
    waiting, live = list(reversed(tasks)), dict[int, _RunningTask]()
    try:
        while waiting or live:
            while waiting and len(live) < jobs:
                task, done = waiting.pop(), context.Value("q", 0, lock=False)
                process = context.Process(target=_child, args=(task, out, done), daemon=True)
                _start(process)
                live[process.sentinel] = _RunningTask(task, process, done)
            if meanwhile is not None:
                meanwhile()
                meanwhile = None
            for sentinel in wait(list(live), timeout=POLL_S):
                one = live.pop(cast(int, sentinel))
                one.process.join()
                watch.ended(one.task, _verdict(one, RunStore(out)))
            watch.moved(sum(one.done.value for one in live.values()))
    finally:
        for one in live.values():
            one.process.terminate()
        for one in live.values():
            one.process.join()
        RunStore(out).tidy()


def _start(process: BaseProcess) -> None:
    """Start a run's process with interrupts blocked from its first instruction on. The parent handles
    interrupts, and one that came while the process imports would be a traceback on the terminal. A blocked
    signal stays blocked in the new process; here it is delivered at the end."""
    resource_tracker.ensure_running()  # starting it unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(task: Task, out: Path, done: Any) -> None:
    """The body of a run's process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def progress(requests: int) -> None:
        done.value = requests

    attempt(task, out, progress)
    os._exit(0)  # what is kept is on disk: taking apart what a replay built would last a quarter of a second


def _end_with_parent() -> None:
    """End this process when its parent has died. A parent that is killed ends no child, and the runs would go
    on in a folder in which the next sweep works."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _verdict(one: _RunningTask, store: RunStore) -> Failure | None:
    code = one.process.exitcode
    if code == 0:
        return store.failure(one.task.key)
    how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit {code}"
    how += " (out of memory?)" if code == -signal.SIGKILL else ""
    failure = Failure(f"the run's process ended without a result: {how}")
    store.fail(one.task.key, failure)
    return failure
