"""Going on until claims are decided: the looks, the level they keep together, and how many seeds would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from hotprefix.definitions import Slo
from hotprefix.errors import InputError
from hotprefix.lab.experiment.assess import Compared, judge
from hotprefix.lab.experiment.collect import taken_looks
from hotprefix.lab.experiment.finished_runs import RunStore
from hotprefix.lab.experiment.load import Changes, load
from hotprefix.lab.experiment.looks import Look, looks
from hotprefix.lab.experiment.one_run import run as replay
from hotprefix.lab.experiment.run_plan import plan
from hotprefix.lab.experiment.sweep import Task, Watch, attempt
from hotprefix.lab.hypothesis import Hypothesis, Kind, Tolerance
from hotprefix.lab.interval import Paired, difference
from hotprefix.lab.power import MOST, sections_of, seeds_to_decide
from hotprefix.lab.stats import Comparison
from hotprefix.lab.verdict import Outcome, decide
from tests.support.experiments import in_this_process, tiny
from tests.support.tables import run

SLO = Slo(ttft_s=3.0)
QUIET = Console(quiet=True, stderr=True)
FASTER = Hypothesis(
    "faster", "c", Kind.MECHANISM, "arm", "base", "c", improves=(Tolerance("ttft_mean_s", 0.05),)
)


def test_looks_double_and_share_the_error_rate_by_the_seeds_they_add() -> None:
    assert looks(5, None) == (Look(5, 1.0),)
    assert looks(5, 40) == (Look(5, 0.125), Look(10, 0.125), Look(20, 0.25), Look(40, 0.5))
    assert [look.seeds for look in looks(3, 20)] == [3, 6, 12, 20]
    assert looks(7, 7) == (Look(7, 1.0),)
    for first, most in ((1, 2), (3, 20), (5, 200)):
        assert sum(look.spend for look in looks(first, most)) == pytest.approx(1.0)


def test_a_look_is_judged_at_the_level_it_may_use() -> None:
    assert FASTER.level_of(0.25) == pytest.approx(1 - 0.05 / 4)
    assert FASTER.level_of(1.0) == FASTER.level == 0.95


def alarms(grid: Sequence[Look], confidence: Callable[[Look], float], experiments: int) -> float:
    """Share of experiments with equal arms in which some look sees a difference."""
    found = 0
    for number in range(experiments):
        each = np.random.default_rng([number, 3]).standard_t(4, grid[-1].seeds)
        cut = np.stack([np.zeros_like(each), each], axis=1)
        for look in grid:
            some = cut[: look.seeds]
            low, high = difference(Paired(0.0, float(some[:, 1].mean()), some), confidence(look))
            if not low <= 0 <= high:
                found += 1
                break
    return found / experiments


def test_all_looks_together_err_no_more_often_than_stated() -> None:
    """2.4 standard errors are allowed; looking as often at the full level is what must not be done."""
    grid = looks(8, 64)
    assert alarms(grid, lambda look: FASTER.level_of(look.spend), 500) <= 0.05 + 0.024
    assert alarms(grid, lambda look: FASTER.level, 500) > 0.08


@pytest.mark.slow
@pytest.mark.parametrize(("first", "most"), [(8, 16), (8, 64), (8, 200), (16, 24)])
def test_the_level_is_kept_on_every_grid(first: int, most: int) -> None:
    assert alarms(looks(first, most), lambda look: FASTER.level_of(look.spend), 1500) <= 0.05 + 0.017


def test_what_a_look_has_decided_stays_decided() -> None:
    """Eight seeds with a large effect; what would come after them is not asked."""
    base = [run(seed, 0, sigma=0.3) for seed in range(1, 17)]
    arm = [
        run(seed, 1, sigma=0.3, effect=0.4 if seed <= 8 else 3.0, cold_effect=0.4) for seed in range(1, 17)
    ]
    compared = Compared({("c", "base"): base, ("c", "arm"): arm}, SLO, 30.0)
    found = judge(compared, FASTER, looks(8, 16))
    assert (found.outcome, found.seeds, found.level) == (Outcome.SUPPORTED, 8, FASTER.level_of(0.5))
    assert judge(compared, FASTER).outcome is not Outcome.SUPPORTED
    again = judge(compared, FASTER, (Look(2, 0.001), *looks(8, 16)))
    assert again.seeds in (2, 8)


def spread(seeds: int, change: float, noise: float) -> Comparison:
    """A section a seed, half of them above and half below the change by `noise`, shares of the baseline."""
    wobble = noise * np.where(np.arange(seeds) % 2, 1.0, -1.0)
    sections = tuple((1.0, 1.0 + change + w) for w in wobble)
    return Comparison("ttft_mean_s", 1.0, 1.0 + change, sections, seeds=seeds)


@pytest.mark.parametrize(("change", "noise"), [(-0.10, 0.2), (-0.06, 0.3), (0.01, 0.2), (-0.10, 0.9)])
def test_so_many_seeds_as_are_said_would_decide(change: float, noise: float) -> None:
    """If difference and spread stay as they are; and a fifth less would not."""
    now = {"ttft_mean_s": spread(10, change, noise)}
    verdict = decide(FASTER, now, [])
    assert verdict.outcome is Outcome.INCONCLUSIVE
    needed = seeds_to_decide(verdict, now)
    assert needed is not None

    def outcome(seeds: int) -> Outcome:
        return decide(FASTER, {"ttft_mean_s": spread(seeds // 2 * 2, change, noise)}, []).outcome

    assert outcome(needed + 1) is not Outcome.INCONCLUSIVE
    assert outcome(int(0.8 * needed)) is Outcome.INCONCLUSIVE


def test_what_more_seeds_cannot_decide_has_no_number() -> None:
    def needed(found: Comparison) -> tuple[bool, int | None]:
        now = {"ttft_mean_s": found}
        verdict = decide(FASTER, now, [])
        return verdict.settled, seeds_to_decide(verdict, now)

    assert needed(spread(10, -0.5, 0.1)) == (True, None)
    assert needed(spread(10, -0.05, 40.0)) == (False, None)
    beyond = Comparison("ttft_mean_s", None, None, beyond="both", reason="never served", seeds=10)
    assert needed(beyond) == (False, None)
    assert [sections_of(seeds) for seeds in (1, 2, 3, 5, 7, 8, 40)] == [8, 8, 9, 10, 14, 8, 40]
    assert MOST >= 1000


FILE = tiny("""
[[hypotheses]]
id = "equal"
claim = "They are equal."
kind = "null"
arm = "lfu"
condition = "all"
equal = [{ metric = "METRIC", amount = 0.0 }]
""")


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds of the runs done, in order; one process does them all."""
    seeds: list[int] = []

    def here(
        tasks: Sequence[Task], out: Path, *, jobs: int, watch: Watch, meanwhile: Callable[[], None] | None
    ) -> None:
        seeds.extend(task.seed for task in tasks)  # type: ignore[attr-defined]
        in_this_process(tasks, out, jobs=jobs, watch=watch, meanwhile=meanwhile)

    monkeypatch.setattr("hotprefix.lab.experiment.one_run.sweep", here)
    return seeds


def written(folder: Path, metric: str) -> Path:
    path = folder / "tiny.toml"
    path.write_text(FILE.replace("METRIC", metric))
    return path


def test_a_decided_experiment_stops_and_one_that_cannot_be_goes_on_to_the_last_seed(
    tmp_path: Path, ran: list[int]
) -> None:
    path = written(tmp_path, "requests")  # the trace's: nothing to wait for
    found = replay(load(str(path), Changes(until_decided=9)), tmp_path / "a", QUIET)
    assert set(ran) == {1, 2}
    assert found.seeds == (1, 2)
    assert found.looks == (Look(2, 2 / 9),)

    ran.clear()
    path = written(tmp_path, "oldest_wait_s")  # an extreme value: never an interval
    found = replay(load(str(path), Changes(until_decided=9)), tmp_path / "b", QUIET)
    assert ran == [1, 2, 1, 2, 3, 4, 3, 4, *range(5, 9), *range(5, 9), 9, 9]
    assert [look.seeds for look in found.looks] == [2, 4, 8, 9]
    assert (found.verdicts[0].outcome, found.verdicts[0].seeds) == (Outcome.INCONCLUSIVE, 9)
    assert found.metrics["seed"].max() == 9

    ran.clear()
    again = replay(load(str(path), Changes(until_decided=9)), tmp_path / "b", QUIET)
    assert ran == []
    assert again.metrics.equals(found.metrics)

    # Seeds that another experiment left in the folder are not looked at.
    fewer = load(str(written(tmp_path, "requests")), Changes(until_decided=9))
    assert replay(fewer, tmp_path / "b", QUIET, force=True).metrics["seed"].max() == 2


def test_an_interrupted_one_is_told_by_the_looks_it_has_taken(tmp_path: Path, ran: list[int]) -> None:
    path = written(tmp_path, "oldest_wait_s")
    planned = plan(load(str(path), Changes(until_decided=9)))
    store = RunStore(tmp_path / "out")
    store.runs.mkdir(parents=True)
    for task in planned.until(5):
        attempt(task, store.out, lambda done: None)
    assert [look.seeds for look in taken_looks(planned, store)] == [2, 4]


def test_where_no_seed_matters_there_is_one_look(tmp_path: Path) -> None:
    trace = tmp_path / "a.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n')
    found = plan(load(str(written(tmp_path, "requests")), Changes(trace=str(trace), until_decided=40)))
    assert found.looks == (Look(1, 1.0),)
    assert not found.seeded
    assert len(found.tasks) == 2


def test_more_than_the_first_seeds_must_be_allowed(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"until_decided=1: less than seeds=2, with which it begins; give at"
    ):
        load(str(written(tmp_path, "requests")), Changes(until_decided=1))
