"""One script of arrivals through the real loop and through the simulator: the same plans, to the last page
(rule 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotprefix.engine.executor import Sampled, StepResult
from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.messages import EngineInfo, Generate
from hotprefix.engine.params import SamplingParams
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import (
    Capabilities,
    Eviction,
    Flight,
    KernelConfig,
    Order,
    Publication,
    Refresh,
    TierConfig,
    Write,
)  # fmt: skip
from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.plan import StepPlan
from hotprefix.lab.sim.block_prompts import Prompt, PromptMaker
from hotprefix.lab.sim.replay import Replay
from hotprefix.lab.sim.simulate import simulate
from hotprefix.lab.sim.wires import Wire
from hotprefix.lab.trace.trace_request import TraceRequest
from tests.support.engine import Clock, LetterText
from tests.support.replays import BLOCK, price

COST = price()
PAGES, PAGE = 40, BLOCK


class PricedExecutor:
    """The engine's executor protocol at the cost model's prices. It says what the trace says was answered,
    and counts chunks and attended positions its own way, not with the simulator's code."""

    capabilities = Capabilities()

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.answers: dict[str, list[int]] = {}
        self.load = lambda: (0, 0)
        self._restore = Wire("l2-l1", COST.links.restore)  # type: ignore[arg-type]

    def start(self, request: str, prompt: Sequence[int], params: SamplingParams) -> None: ...

    def finish(self, request: str) -> None: ...

    def execute(self, plan: StepPlan) -> StepResult:
        begun = self._clock.now
        size = len(plan.restores) * PAGE * COST.kv_token_bytes
        restore = self._restore.send(size, begun) - begun if plan.restores else 0.0
        lengths = [(c.start, c.stop) for c in plan.chunks]
        prefill = [(a, b) for a, b in lengths if b - a > 1]
        decode = [b for a, b in lengths if b - a == 1]
        forward = 0.0
        if lengths:
            pairs = sum(sum(range(a + 1, b + 1)) for a, b in prefill)
            forward = COST.prices.step_s(sum(b - a for a, b in prefill), pairs, len(decode), sum(decode))
        self._clock.now = (begun + restore) + (COST.prices.scheduler_s(*self.load()) + forward)
        sampled = {c.request: Sampled(self.answers[c.request].pop(0)) for c in plan.chunks if c.samples}
        return StepResult(sampled, restore_s=restore)


def run_for_real(config: KernelConfig, trace: list[TraceRequest], prompts: list[Prompt]) -> None:
    """A trace through the engine's loop."""
    clock = Clock()
    executor = PricedExecutor(clock)
    info = EngineInfo("fake", 10**6, 2**31, PAGE, PAGES * PAGE)
    loop = EngineLoop(
        config, executor, info, fingerprint="fake", eos_ids=(), make_text=LetterText, clock=clock
    )
    executor.load = lambda: loop.kernel.load
    todo = sorted(zip(trace, prompts, strict=True), key=lambda pair: pair[0].arrival_s or 0.0)
    for serial, (item, prompt) in enumerate(todo):
        name = f"{serial + 1:07d}"
        while loop.has_work and clock.now < (item.arrival_s or 0.0):
            loop.step()
        clock.now = max(clock.now, item.arrival_s or 0.0)
        executor.answers[name] = tk.view(prompt.outputs).tolist()
        ids = tuple(tk.view(prompt.tokens).tolist())
        params = SamplingParams(max_tokens=item.output_length)
        loop.submit(Generate(id=name, prompt=ids, params=params, priority=item.priority))
    while loop.has_work:
        loop.step()


RECORDED: list[tuple[float, StepPlan]] = []


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Kernel.plan

    def plan(kernel: Kernel, now: float) -> StepPlan:
        made = original(kernel, now)
        if not made.empty:
            RECORDED.append((now, made))
        return made

    monkeypatch.setattr(Kernel, "plan", plan)


CONFIGS = st.fixed_dictionaries(
    {
        "publication": st.sampled_from(Publication),
        "flight": st.sampled_from(Flight),
        "order": st.sampled_from(Order),
        "eviction": st.sampled_from(Eviction),
        "refresh": st.sampled_from(Refresh),
        "max_running": st.integers(1, 6),
        "max_batched_tokens": st.sampled_from([8, 13, 64]),
        "preemption": st.booleans(),
        "tiers": st.sampled_from([None, None, TierConfig(60), TierConfig(20, write=Write.BACK)]),
    }
)
SCRIPT = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.01, 0.05, 0.3]), st.integers(0, 2), st.integers(0, 12),
        st.integers(1, 5), st.integers(1, 20), st.integers(0, 1),
    ),
    min_size=1,
    max_size=10,
)  # fmt: skip


def trace_of(script: list[tuple[float, int, int, int, int, int]]) -> list[TraceRequest]:
    trace, now = [], 0.0
    for i, (gap, base, blocks, tail, outputs, priority) in enumerate(script):
        now += gap
        ids = np.array([100 * base + b for b in range(blocks)], dtype=np.int32)
        trace.append(
            TraceRequest(
                f"t{i}", blocks * BLOCK + tail, outputs, ids, arrival_s=now, namespace="fake",
                priority=priority,
            )
        )  # fmt: skip
    return trace


@given(config=CONFIGS, script=SCRIPT)
def test_engine_and_simulator_make_the_same_plans(
    config: dict[str, Any], script: list[tuple[float, int, int, int, int, int]]
) -> None:
    kernel = replace(KernelConfig(total_pages=PAGES, page_size=PAGE), **config)
    trace = [r for r in trace_of(script) if r.input_length + r.output_length <= PAGES * PAGE]
    RECORDED.clear()
    simulate(Replay(kernel, COST, repeats=1), trace, block_size=BLOCK)
    simulated = list(RECORDED)
    RECORDED.clear()
    maker = PromptMaker(BLOCK)
    run_for_real(kernel, trace, [maker.make(r) for r in trace])
    assert simulated == RECORDED, "the same plans, at the same moments"
    assert RECORDED or not trace
