"""The same runs through Ray, on one machine or many. Owns: handing tasks over and saving what comes back.

Rules:
1. Ray schedules; nothing here does.
2. A run's tables come back as values and are saved here. So the machines share no output folder, and a saved
   run has the bytes of a local one.
3. Each machine needs hotprefix and, for a trace file, the file at the same path. This needs `hotprefix[ray]`.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotprefix.errors import ConfigError, HotprefixError
from hotprefix.lab.experiment.finished_runs import Failure, Output, RunStore
from hotprefix.lab.experiment.sweep import Task, Watch

LOCAL = "local"
REACH_S = 5.0


def ray_sweep(tasks: Sequence[Task], out: Path, *, address: str, jobs: int, watch: Watch) -> None:
    """As `sweep.sweep`. address: that of a running cluster, or `auto`, or `local` = start one here with
    `jobs` CPUs and end it afterwards. Raises ConfigError if Ray is not installed or the cluster is not
    reached."""
    ray = _connected(address, jobs)
    try:
        work = ray.remote(num_cpus=1, max_retries=1)(_work)
        refs = {work.remote(task): task for task in tasks}
        while refs:
            (ref, *_), _ = ray.wait(list(refs), num_returns=1)
            task = refs.pop(ref)
            watch.ended(task, _keep(RunStore(out), task, _result(ray, ref)))
    finally:
        ray.shutdown()


def _connected(address: str, jobs: int) -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs Ray: pip install 'hotprefix[ray]'", param="ray") from None
    try:
        _reach(address)
        if address == LOCAL:
            ray.init(num_cpus=jobs, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--ray {address}: no cluster there ({error}); give its address, auto or local", param="ray"
        ) from error
    return ray


def _reach(address: str) -> None:
    """Check that an address can be reached, because Ray itself tries for minutes. Raises OSError,
    ValueError."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()


def _work(task: Task) -> Output | Failure:
    try:
        return task.run(_silent)
    except Exception as error:
        return Failure.of(error)


def _silent(requests: int) -> None:
    """Drop the progress inside a run; it is not sent from machine to machine."""


def _result(ray: Any, ref: Any) -> Output | Failure:
    """What the task returned. The death of its worker or machine is a failure of this run alone."""
    try:
        found: Output | Failure = ray.get(ref)
    except ray.exceptions.RayError as error:
        return Failure(f"Ray lost the run: {str(error).splitlines()[0]}", str(error))
    return found


def _keep(store: RunStore, task: Task, found: Output | Failure) -> Failure | None:
    try:
        if isinstance(found, Output):
            store.save(task.key, found)
            return None
    except (OSError, HotprefixError) as error:
        found = Failure.of(error)
    store.fail(task.key, found)
    return found
