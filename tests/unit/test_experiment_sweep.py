"""Runs over processes and through Ray: what is kept, what is done again, what a dying run costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from hotprefix.errors import ConfigError, InputError
from hotprefix.lab.experiment.finished_runs import Failure, Output, RunStore
from hotprefix.lab.experiment.load import load
from hotprefix.lab.experiment.ray_sweep import ray_sweep
from hotprefix.lab.experiment.run_plan import plan
from hotprefix.lab.experiment.sweep import Task, attempt, sweep

HERE = Path(__file__)


@dataclass(frozen=True)
class Numbers:
    """A run whose table says the seed, and that leaves a mark each time it is done."""

    key: str
    seed: int
    marks: Path
    fault: str = ""

    def run(self, progress: Callable[[int], None]) -> Output:
        with (self.marks / self.key).open("a") as file:
            file.write("x")
        if self.fault == "raises":
            raise ValueError("three is right out")
        if self.fault == "input":
            raise InputError("trace: no such file")
        if self.fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "stopped":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.fault == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
        if self.fault == "slow":
            time.sleep(60)
        progress(self.seed)
        return Output({"requests": pl.DataFrame({"seed": [self.seed] * 3})}, {"seed": self.seed})


@dataclass(frozen=True)
class Early(Numbers):
    """Interrupted while its process still starts."""

    def __reduce__(self) -> Any:
        return _interrupted, (self.key, self.seed, self.marks)


def _interrupted(key: str, seed: int, marks: Path) -> Numbers:
    os.kill(os.getpid(), signal.SIGINT)
    return Numbers(key, seed, marks)


class Told:
    def __init__(self) -> None:
        self.ends: dict[str, Failure | None] = {}

    def ended(self, task: Task, failure: Failure | None) -> None:
        assert task.key not in self.ends
        self.ends[task.key] = failure

    def moved(self, requests: int) -> None:
        assert requests >= 0


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    (tmp_path / "marks").mkdir()
    return tmp_path / "marks"


def files(store: RunStore) -> dict[str, bytes]:
    return {
        str(p.relative_to(store.runs)): p.read_bytes() for p in sorted(store.runs.rglob("*")) if p.is_file()
    }


def test_failing_runs_cost_only_their_own_result(tmp_path: Path, marks: Path) -> None:
    store, told = RunStore(tmp_path / "out"), Told()
    store.claim("h" * 64, "numbers", force=False)
    tasks = [
        Numbers("a", 1, marks), Numbers("b", 2, marks, "raises"), Numbers("c", 3, marks, "dies"),
        Numbers("d", 4, marks, "input"), Numbers("e", 5, marks),
    ]  # fmt: skip
    sweep(tasks, store.out, jobs=2, watch=told)

    errors = {key: failure.error if failure else None for key, failure in told.ends.items()}
    assert errors == {
        "a": None,
        "b": "ValueError: three is right out",
        "c": "the run's process ended without a result: killed by SIGKILL (out of memory?)",
        "d": "trace: no such file",
        "e": None,
    }
    assert [store.finished(key) for key in "abcde"] == [True, False, False, False, True]
    assert store.failure("b") == told.ends["b"]
    assert "in run" in store.failure("b").trace  # type: ignore[union-attr]
    assert store.scan("e", "requests").collect()["seed"].to_list() == [5, 5, 5]
    assert store.facts("e") == {"seed": 5}

    sweep([Numbers("b", 2, marks)], store.out, jobs=1, watch=Told())
    assert store.finished("b")


def test_an_interrupt_is_the_sweeps_and_only_a_sigkill_looks_like_memory(tmp_path: Path, marks: Path) -> None:
    store, told = RunStore(tmp_path / "out"), Told()
    store.claim("h" * 64, "numbers", force=False)
    tasks = [Numbers("a", 1, marks, "interrupted"), Numbers("b", 2, marks, "stopped"), Early("c", 3, marks)]
    sweep(tasks, store.out, jobs=2, watch=told)
    assert (told.ends["a"], told.ends["c"]) == (None, None)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert told.ends["b"] == Failure("the run's process ended without a result: killed by SIGTERM")


def test_what_can_be_done_meanwhile_is_done_once_before_the_first_run_ends(
    tmp_path: Path, marks: Path
) -> None:
    store, told, ends = RunStore(tmp_path / "out"), Told(), list[int]()
    store.claim("h" * 64, "numbers", force=False)
    tasks = [Numbers(key, 1, marks) for key in "abc"]
    sweep(tasks, store.out, jobs=1, watch=told, meanwhile=lambda: ends.append(len(told.ends)))
    assert ends == [0]
    assert [store.finished(key) for key in "abc"] == [True] * 3
    assert store.failure("b") is None


@pytest.mark.parametrize("damage", ["cut", "missing", "no-facts", "bad-json"])
def test_a_damaged_run_is_not_taken_for_finished(tmp_path: Path, marks: Path, damage: str) -> None:
    store = RunStore(tmp_path / "out")
    store.save("a", Numbers("a", 1, marks).run(lambda n: None))
    assert store.finished("a")
    table, facts = store.runs / "a/requests.parquet", store.runs / "a/run.json"
    if damage == "cut":
        table.write_bytes(table.read_bytes()[:-1])
    elif damage == "missing":
        table.unlink()
    elif damage == "no-facts":
        facts.unlink()
    else:
        facts.write_text("{")
    assert not store.finished("a")
    store.save("a", Numbers("a", 1, marks).run(lambda n: None))
    assert store.finished("a")


def test_another_experiments_folder_is_refused_and_named(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "out")
    store.claim("a" * 64, "first", force=False)
    store.claim("a" * 64, "first", force=False)
    with pytest.raises(InputError, match=r"holds first aaaaaaaaaaaa, this is second bbbbbbbbbbbb; .*--force"):
        store.claim("b" * 64, "second", force=False)
    store.claim("b" * 64, "second", force=True)
    assert json.loads((store.out / "experiment.json").read_text()) == {"name": "second", "hash": "b" * 64}


def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--out .*file/out: Not a directory; give a folder"):
        RunStore(tmp_path / "file" / "out").claim("a" * 64, "x", force=False)


def test_a_folder_in_which_another_process_works_is_refused_until_it_has_ended(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hotprefix.lab.experiment.finished_runs import RunStore\n"
        "with RunStore(Path(sys.argv[1])).alone(): print('in', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"in\n"
        refused = pytest.raises(
            InputError, match=r"--out .*: another replay is writing there; .*another folder"
        )
        with refused, RunStore(tmp_path).alone():
            pass
    finally:
        other.kill()
        other.communicate()
    with RunStore(tmp_path).alone():  # a killed process leaves no lock
        pass


SCRIPT = """
import sys
from pathlib import Path
from tests.unit.test_experiment_sweep import Numbers, Told
from hotprefix.lab.experiment.sweep import sweep
if __name__ == "__main__":
    out, marks = Path(sys.argv[1]), Path(sys.argv[2])
    sweep([Numbers("a", 1, marks), Numbers("b", 2, marks, "slow")], out, jobs=2, watch=Told())
"""


def test_an_interrupt_ends_the_runs_and_keeps_what_is_finished(tmp_path: Path, marks: Path) -> None:
    store = RunStore(tmp_path / "out")
    store.claim("h" * 64, "numbers", force=False)
    parent = _started(tmp_path, store, marks)
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.wait(20) != 0
    while _group_alive(parent.pid):  # the runs' process is gone already, its helper follows the parent
        time.sleep(0.05)
    assert store.finished("a")
    assert not store.finished("b")
    assert not list(store.runs.glob(".*"))


def test_runs_end_with_a_sweep_that_is_killed(tmp_path: Path, marks: Path) -> None:
    store = RunStore(tmp_path / "out")
    store.claim("h" * 64, "numbers", force=False)
    parent = _started(tmp_path, store, marks)
    parent.kill()
    parent.communicate()  # returns when the last process that has this pipe is gone
    assert not store.finished("b")  # nor after the minute it would have taken


def _started(tmp_path: Path, store: RunStore, marks: Path) -> subprocess.Popen[bytes]:
    """A sweep in a process group of its own, whose first run is finished and whose second is under way."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), *sys.path])}
    parent = subprocess.Popen(
        [sys.executable, str(script), str(store.out), str(marks)], env=env, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    while not (store.finished("a") and (marks / "b").exists()):
        assert parent.poll() is None
        time.sleep(0.05)
    return parent


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_ray_gives_the_bytes_of_a_local_sweep(tmp_path: Path, marks: Path) -> None:
    ray = pytest.importorskip("ray")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker knows hotprefix, not tests
    tasks = [Numbers("a", 1, marks), Numbers("b", 2, marks), Numbers("c", 3, marks, "raises")]
    here, there, told = RunStore(tmp_path / "here"), RunStore(tmp_path / "there"), Told()
    for store in (here, there):
        store.claim("h" * 64, "numbers", force=False)
    sweep(tasks, here.out, jobs=2, watch=Told())
    ray_sweep(tasks, there.out, address="local", jobs=2, watch=told)

    local, remote = files(here), files(there)
    assert sorted(local) == [
        "a/requests.parquet",
        "a/run.json",
        "b/requests.parquet",
        "b/run.json",
        "c.failed.json",
    ]
    assert {k: v for k, v in remote.items() if k != "c.failed.json"} == {
        k: v for k, v in local.items() if k != "c.failed.json"
    }
    assert told.ends["c"] is not None
    assert told.ends["c"].error == "ValueError: three is right out"


def test_an_unreachable_ray_cluster_is_bad_input(tmp_path: Path, marks: Path) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=r"--ray 127.0.0.1:1: no cluster there"):
        ray_sweep([Numbers("a", 1, marks)], tmp_path, address="127.0.0.1:1", jobs=1, watch=Told())


REAL = """
name = "real"
question = "Are the bytes the same?"
baseline = "lru"
seeds = 1
cost = "llama-3.1-8b.1xh100.fp8"
trace = { generate = "churn", params = { prompts = 5, rounds = 2, prompt = 256, output = 4 } }
capacity = { size = 1024 }
factors = { "kernel.eviction" = ["lru", "lfu"] }
"""


def test_a_replay_gives_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "real.toml").write_text(REAL)
    tasks = plan(load(str(tmp_path / "real.toml"))).tasks
    here, there, apart = (RunStore(tmp_path / name) for name in ("here", "there", "apart"))
    for store in (here, there, apart):
        store.claim("h" * 64, "real", force=False)
    for task in tasks:
        assert attempt(task, here.out, lambda done: None) is None
    sweep(tasks, there.out, jobs=2, watch=Told())
    ray_sweep(tasks, apart.out, address="local", jobs=2, watch=Told())
    tables = [
        {k: v for k, v in files(store).items() if k.endswith(".parquet")} for store in (here, there, apart)
    ]
    assert len(tables[0]) == 2 * 5
    assert tables[1] == tables[0]
    assert tables[2] == tables[0]
