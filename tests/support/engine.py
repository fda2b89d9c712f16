"""An engine loop over the fake executor. Owns: `fake_loop` and its one-character-per-token text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hotprefix.definitions import Slo
from hotprefix.engine.executor import Sampled, StepResult, Unsampled
from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.messages import Delta, EngineInfo
from hotprefix.engine.observe import Observer
from hotprefix.engine.params import SamplingParams
from hotprefix.kernel.config import Capabilities, KernelConfig
from hotprefix.kernel.plan import StepPlan
from tests.support.fake import VOCAB, FakeExecutor


class FakeEngineExecutor:
    """The kernel tests' executor behind the engine's protocol. raise_next: steps that raise."""

    def __init__(self, config: KernelConfig) -> None:
        self.fake = FakeExecutor(config.total_pages, config.page_size, config.max_running)
        self.capabilities = Capabilities()
        self.started: dict[str, SamplingParams] = {}
        self.raise_next = 0
        self.poison: set[str] = set()

    def start(self, request: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self.started[request] = params

    def execute(self, plan: StepPlan) -> StepResult:
        if self.raise_next:
            self.raise_next -= 1
            raise RuntimeError("the device is gone")
        bad = [c.request for c in plan.chunks if c.request in self.poison]
        outcome = self.fake.run(plan)
        if bad:
            raise ValueError(f"request {bad[0]} is poisonous")
        failed = {r: Unsampled(error) for r, error in outcome.failed.items()}
        return StepResult({r: Sampled(t) for r, t in outcome.sampled.items()} | failed)

    def finish(self, request: str) -> None:
        self.started.pop(request, None)


class LetterText:
    """Token t reads as one letter; a stop string is a match at the end of the text so far."""

    def __init__(self, params: SamplingParams) -> None:
        self._stop = params.stop
        self._text = ""

    def push(self, token: int) -> tuple[str, bool, str | None]:
        letter = chr(32 + token % 94)
        self._text += letter
        for stop in self._stop:
            if self._text.endswith(stop):
                return "", True, stop
        return letter, False, None

    def flush(self) -> str:
        return ""


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fake_loop(
    eos: Sequence[int] = (),
    max_model_len: int = 200,
    observer: Observer | None = None,
    slo: Slo | None = None,
    **config: object,
) -> tuple[EngineLoop, FakeEngineExecutor, Clock]:
    kernel = replace(KernelConfig(total_pages=64, page_size=4, max_running=16), **config)  # type: ignore[arg-type]
    executor = FakeEngineExecutor(kernel)
    info = EngineInfo("fake", max_model_len, VOCAB, kernel.page_size, kernel.total_pages * kernel.page_size)
    clock = Clock()
    loop = EngineLoop(
        kernel, executor, info, fingerprint="fake", eos_ids=eos, make_text=LetterText, clock=clock,
        observer=observer, slo=slo,
    )  # fmt: skip
    return loop, executor, clock


def drain(loop: EngineLoop, limit: int = 2000) -> Mapping[str, list[Delta]]:
    """All deltas by request, until the loop is idle."""
    found: dict[str, list[Delta]] = {}
    for _ in range(limit):
        if not loop.has_work:
            return found
        for delta in loop.step():
            found.setdefault(delta.id, []).append(delta)
    raise AssertionError(f"not idle after {limit} steps")
