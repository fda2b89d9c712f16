"""Duplication factor, driver and summary arithmetic, on scripted engines."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest

from hotprefix.bench.arms import DEFAULT, INDEPENDENT, Arm
from hotprefix.bench.bench_summary import Summary, WorkloadResult, summarise
from hotprefix.bench.drive import BenchError, CountingExecutor, run_workload
from hotprefix.bench.request_costs import Record, counts, required, timings
from hotprefix.bench.workloads import After, Name, Submission, Workload, burst, late_pair
from hotprefix.engine.executor import StepResult
from hotprefix.engine.messages import Delta, Generate, Usage
from hotprefix.engine.params import SamplingParams
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import Capabilities
from hotprefix.kernel.plan import Chunk, Finish, StepPlan
from tests.support.material import SyntheticMaterial

MATERIAL = SyntheticMaterial()


def submission(
    name: str, prompt: Sequence[int], *, follower: bool = True, after: After | None = None
) -> Submission:
    return Submission(name, "g", tuple(prompt), 2, follower, after)


def record(s: Submission, restored: int, ttft: float = 1.0, outputs: tuple[int, ...] = (7, 7)) -> Record:
    return Record(s, restored, len(s.prompt) - restored, outputs, ttft, ttft + 1, ttft + 2)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([range(32), range(32)], [32, 16]),  # a multiple of the page: one token must be computed
        ([range(33), range(33)], [33, 1]),
        ([range(532)] * 8, [532] + [4] * 7),
        ([range(40), [*range(20), 99, 98]], [40, 6]),  # only whole pages are shared
        ([range(10), range(10)], [10, 10]),  # shorter than a page
        ([[1] * 16 + [2] * 16 + [3], [9] * 16 + [2] * 16 + [3]], [33, 33]),  # equal page, other prefix
    ],
)
def test_required_tokens(prompts: list[Sequence[int]], expected: list[int]) -> None:
    asked = [submission(str(i), p) for i, p in enumerate(prompts)]
    assert list(required(asked, 16).values()) == expected


def test_counts_of_a_group() -> None:
    first, *rest = [submission(str(i), range(532), follower=i > 0) for i in range(8)]
    need = required([first, *rest], 16)
    perfect = counts([record(first, 0), *(record(s, 528) for s in rest)], need)
    assert (perfect.duplication, perfect.restored_per_follower) == (1.0, 528)
    assert perfect.computed == perfect.required == 532 + 7 * 4
    alone = counts([record(s, 0) for s in (first, *rest)], need)
    assert alone.duplication == pytest.approx(8 * 532 / 560)
    assert counts([record(first, 0)], need).restored_per_follower is None


def test_timings_of_a_group() -> None:
    s = submission("a", range(5))
    t = timings([record(s, 0, 1.0), record(s, 0, 3.0)])
    assert (t.mean_ttft, t.max_ttft, t.slowest_completion, t.makespan) == (2.0, 3.0, 4.0, 5.0)


class ScriptedLoop:
    """Gives each open request one token a step and ends it at its limit; notes the order of events."""

    def __init__(self, *, fail: str | None = None, lose: str | None = None) -> None:
        self.open: dict[str, tuple[Generate, int]] = {}
        self.log: list[tuple[int, str]] = []
        self.steps = 0
        self._fail, self._lose = fail, lose

    @property
    def has_work(self) -> bool:
        return bool(self.open)

    def submit(self, request: Generate) -> None:
        assert request.params.greedy
        assert request.params.ignore_eos
        self.log.append((self.steps, request.id))
        if request.id != self._lose:
            self.open[request.id] = (request, 0)

    def step(self) -> list[Delta]:
        self.steps += 1
        out = []
        for name, (request, given) in list(self.open.items()):
            done = given + 1 == request.params.max_tokens
            finish = Finish.ERROR if name == self._fail else Finish.LENGTH if done else None
            self.open[name] = (request, given + 1)
            if finish:
                del self.open[name]
            out.append(Delta(name, "", (given,), Usage(len(request.prompt), given + 1), finish))
        return out


class NullExecutor:
    capabilities = Capabilities()

    def start(self, request: str, prompt: Sequence[int], params: SamplingParams) -> None: ...
    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult({})

    def finish(self, request: str) -> None: ...


def run(workload: Workload, loop: ScriptedLoop) -> tuple[Record, ...]:
    return run_workload(loop, CountingExecutor(NullExecutor()), workload)


def test_a_wave_starts_at_one_barrier_and_the_next_after_its_end() -> None:
    loop = ScriptedLoop()
    records = run(burst(MATERIAL, (2, 3), 4, prompt=64), loop)
    assert [step for step, _ in loop.log] == [0, 0, 4, 4, 4]
    assert [len(r.outputs) for r in records] == [4] * 5
    assert all(0 < r.ttft <= r.completion <= r.ended for r in records)


def test_a_conditional_request_waits_for_its_leaders_outputs() -> None:
    loop = ScriptedLoop()
    records = run(late_pair(MATERIAL, 8, prompt=64), loop)
    assert loop.log == [(0, "late-pair/pair/0"), (2, "late-pair/pair/1")]
    assert records[1].completion < records[1].ended


def test_a_failed_request_ends_the_bench() -> None:
    with pytest.raises(BenchError, match="burst/x2/1 ended with error"):
        run(burst(MATERIAL, (2,), 4, prompt=64), ScriptedLoop(fail="burst/x2/1"))


def test_an_engine_that_does_nothing_ends_the_bench() -> None:
    with pytest.raises(BenchError, match="nothing with 1 of 2"):
        run(burst(MATERIAL, (2,), 4, prompt=64), ScriptedLoop(lose="burst/x2/1"))


def test_the_executor_counts_prefill_positions_only() -> None:
    executor = CountingExecutor(NullExecutor())
    chunks = [
        Chunk("a", 0, s, tk.encode(range(n)), 0, (0,), False, p) for s, n, p in ((0, 7, True), (7, 1, False))
    ]
    executor.execute(StepPlan(1, tuple(chunks)))
    executor.execute(StepPlan(2, tuple(chunks[:1])))
    assert executor.computed == {"a": 14}


def result(runs: dict[Arm, list[list[Record]]]) -> WorkloadResult:
    first = next(iter(runs.values()))[0]
    workload = Workload(Name.BURST, "t", "a", (tuple(r.submission for r in first),))
    return summarise(workload, runs, INDEPENDENT, 16, 64)


def test_summary_keeps_runs_spread_and_change() -> None:
    lead, second = submission("a", range(40), follower=False), submission("b", range(40))
    base = [[record(lead, 0, t), record(second, 0, t)] for t in (1.0, 3.0)]
    ours = [[record(lead, 0, 1.0), record(second, 32, 1.0, (7, 8))]] * 2
    one, two = result({INDEPENDENT: base, DEFAULT: ours}).groups[0].arms
    assert one.timings.mean_ttft_s.runs == (1.0, 3.0)
    assert one.timings.mean_ttft_s.sd == pytest.approx(math.sqrt(2))
    assert two.timings.mean_ttft_s.change == pytest.approx(-0.5)
    assert (two.counts.restored_tokens, two.counts.computed_tokens) == ((32, 32), (48, 48))
    assert (two.counts.required_tokens, two.counts.duplication_factor) == (48, 1.0)
    assert (one.counts.same_outputs, two.counts.same_outputs) == (2, 1)
    assert two.counts.stable


def test_counts_that_differ_between_runs_are_shown_unstable() -> None:
    lead, second = submission("a", range(40), follower=False), submission("b", range(40))
    runs = [[record(lead, 0), record(second, restored)] for restored in (0, 32)]
    counted = result({INDEPENDENT: runs}).groups[0].arms[0].counts
    assert not counted.stable
    assert counted.restored_tokens == (0, 32)


def test_missing_figures_are_null_in_json() -> None:
    lead = submission("a", range(40), follower=False)
    figures = json.loads(result({INDEPENDENT: [[record(lead, 0)]]}).model_dump_json())["groups"][0]["arms"][0]
    assert figures["timings"]["mean_ttft_s"]["sd"] is None
    assert figures["counts"]["restored_per_follower"] is None


def test_the_schema_describes_every_field() -> None:
    schema = Summary.model_json_schema()
    assert schema["properties"]["schema_version"]["default"] == 1
    for name in ("Figure", "CountFigures", "TimingFigures", "ArmResult", "GroupResult", "WorkloadResult"):
        assert schema["$defs"][name]["additionalProperties"] is False
