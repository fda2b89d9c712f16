"""Runs one workload on one engine loop. Owns: submission at the right moment, and the stopwatch.

Rules: decoding is greedy and end-of-sequence tokens are ignored, so every request gives exactly the outputs
it asks for. Everything happens in this thread, so the same policy gives the same steps each time. A request
that fails ends the bench with an error, never with a figure.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hotprefix.bench.request_costs import Record
from hotprefix.bench.workloads import Submission, Wave, Workload
from hotprefix.engine.executor import Executor, StepResult
from hotprefix.engine.messages import Delta, Generate
from hotprefix.engine.params import SamplingParams
from hotprefix.errors import HotprefixError
from hotprefix.kernel.config import Capabilities
from hotprefix.kernel.plan import Finish, StepPlan
from hotprefix.kernel.request import RequestId


class BenchError(HotprefixError):
    """A workload could not be run to its end."""


class Loop(Protocol):
    """The part of the engine loop the bench drives."""

    def submit(self, request: Generate) -> object: ...

    def step(self) -> Sequence[Delta]: ...

    @property
    def has_work(self) -> bool: ...


class CountingExecutor:
    """Passes plans on, and counts the prompt positions that they compute for each request. It is the bench's
    own count, independent of the kernel's."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.steps = 0
        self.computed: Counter[RequestId] = Counter()

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def start(self, request: RequestId, prompt: Sequence[int], params: SamplingParams) -> None:
        self._inner.start(request, prompt, params)

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        result = self._inner.execute(plan)
        for chunk in plan.chunks:
            if chunk.prefill:
                self.computed[chunk.request] += chunk.stop - chunk.start
        return result

    def finish(self, request: RequestId) -> None:
        self._inner.finish(request)


@dataclass(slots=True)
class _Open:
    submission: Submission
    submitted: float
    first: float | None = None
    outputs: list[int] = field(default_factory=list)


def run_workload(loop: Loop, executor: CountingExecutor, workload: Workload) -> tuple[Record, ...]:
    """Run the workload to its end. Returns the records in submission order. Raises BenchError."""
    records: list[Record] = []
    for wave in workload.waves:
        records += _run_wave(loop, executor, wave)
    return tuple(records)


def _run_wave(loop: Loop, executor: CountingExecutor, wave: Wave) -> list[Record]:
    barrier = time.perf_counter()
    opened: dict[str, _Open] = {}
    done: dict[str, Record] = {}
    pending = list(wave)

    def submit_due(now: float) -> None:
        for s in [s for s in pending if _due(s, opened)]:
            pending.remove(s)
            opened[s.id] = _Open(s, now)
            params = SamplingParams(max_tokens=s.outputs, temperature=0.0, ignore_eos=True)
            loop.submit(Generate(id=s.id, prompt=s.prompt, params=params))

    submit_due(barrier)
    while len(done) < len(wave):
        before = executor.steps
        deltas = loop.step() if loop.has_work else ()
        now = time.perf_counter()
        if not deltas and executor.steps == before:
            raise BenchError(
                f"the engine does nothing with {len(wave) - len(done)} of {len(wave)} requests open"
            )
        for delta in deltas:
            request = opened[delta.id]
            if delta.tokens and request.first is None:
                request.first = now
            request.outputs += delta.tokens
            if delta.finish is not None:
                done[delta.id] = _close(request, delta, executor.computed[delta.id], barrier, now)
        submit_due(now)
    return [done[s.id] for s in wave]


def _due(submission: Submission, opened: dict[str, _Open]) -> bool:
    after = submission.after
    return after is None or (after.request in opened and len(opened[after.request].outputs) >= after.outputs)


def _close(request: _Open, delta: Delta, computed: int, barrier: float, now: float) -> Record:
    s = request.submission
    if delta.finish is not Finish.LENGTH or len(request.outputs) != s.outputs or request.first is None:
        raise BenchError(
            f"request {s.id} ended with {delta.finish} after {len(request.outputs)} of {s.outputs} outputs"
            + (f": {delta.error}" if delta.error else "")
        )
    return Record(
        submission=s,
        restored=delta.usage.cached_tokens,
        computed=computed,
        outputs=tuple(request.outputs),
        ttft=request.first - request.submitted,
        completion=now - request.submitted,
        ended=now - barrier,
    )
