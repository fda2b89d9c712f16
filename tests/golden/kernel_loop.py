"""A kernel with nothing behind it: the bench's workloads run through the real kernel, no model.

The fake executor's next token is a function of the request's prompt and how many it has given, so that
equal prompts get equal outputs, as greedy decoding does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import sha256

from hotprefix.bench.arms import Arm
from hotprefix.bench.drive import CountingExecutor, run_workload
from hotprefix.bench.request_costs import Counts, Record, counts, required
from hotprefix.bench.runner import PAGE, PAGES, kernel_config
from hotprefix.bench.workloads import Workload
from hotprefix.engine.executor import Executor, Sampled, StepResult
from hotprefix.engine.messages import Delta, Generate, Usage
from hotprefix.engine.params import SamplingParams
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import Capabilities, KernelConfig
from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.plan import StepOutcome, StepPlan
from hotprefix.kernel.request import Request


class FakeExecutor:
    """See the module. `same_step_reads` as a real executor would claim it."""

    def __init__(self, same_step_reads: bool = True) -> None:
        self.capabilities = Capabilities(same_step_reads=same_step_reads)
        self._prompts: dict[str, Sequence[int]] = {}
        self._given: Counter[str] = Counter()

    def start(self, request: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self._prompts[request] = tuple(prompt)
        self._given[request] = 0

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult({c.request: Sampled(self._next(c.request)) for c in plan.chunks if c.samples})

    def _next(self, request: str) -> int:
        self._given[request] += 1
        seed = repr((self._prompts[request], self._given[request])).encode()
        return int.from_bytes(sha256(seed).digest()[:3], "big")

    def finish(self, request: str) -> None:
        del self._prompts[request]


class KernelLoop:
    """Drives a kernel as an engine loop does. Time is the step number. After every step pages are
    checked for conservation."""

    def __init__(self, executor: Executor, config: KernelConfig) -> None:
        self.kernel = Kernel(config, executor.capabilities)
        self._executor = executor
        self._now = 0.0
        self._asked: dict[str, tuple[int, int]] = {}

    @property
    def has_work(self) -> bool:
        return self.kernel.has_work

    def submit(self, request: Generate) -> None:
        outputs = request.params.max_tokens
        assert outputs is not None
        self.kernel.submit(Request(request.id, tk.encode(request.prompt), outputs), self._now)
        self._executor.start(request.id, request.prompt, request.params)
        self._asked[request.id] = (len(request.prompt), 0)

    def step(self) -> list[Delta]:
        self._now += 1
        plan = self.kernel.plan(self._now)
        assert plan.chunks, f"stalled: {plan.stall}"
        result = self._executor.execute(plan)
        outcome = StepOutcome(sampled={r: s.token for r, s in result.sampled.items()})
        deltas = []
        for p in self.kernel.commit(plan, outcome, self._now):
            prompt, given = self._asked[p.request]
            given += p.token is not None
            self._asked[p.request] = (prompt, given)
            tokens = () if p.token is None else (p.token,)
            deltas.append(Delta(p.request, "", tokens, Usage(prompt, given, p.cached), p.finish))
            if p.finish is not None:
                self._executor.finish(p.request)
        self.kernel.check()
        return deltas


def drive(
    workload: Workload, arm: Arm, *, budget: int = 2048, same_step_reads: bool = True
) -> tuple[tuple[Record, ...], Kernel]:
    """One workload, one arm, one fresh kernel."""
    executor = CountingExecutor(FakeExecutor(same_step_reads))
    config = kernel_config(arm, workload.pages or PAGES, max_batched_tokens=budget)
    loop = KernelLoop(executor, config)
    return run_workload(loop, executor, workload), loop.kernel


def group_counts(workload: Workload, records: Sequence[Record]) -> dict[str, Counts]:
    """Counts by group."""
    need = required(workload.submissions, PAGE)
    return {
        group: counts([r for r in records if r.submission.group == group], need) for group in workload.groups
    }
