"""Times designed batches on a live engine. Owns: `Sample`, the stopwatch around the executor, and the order
in which batches are run.

Rules: every batch goes through the real loop (kernel, executor, sampler, commit). What is recorded is the
plan that the kernel made, not the one that was intended. Batches are interleaved and repeated in rounds, so
that a slow minute of the machine affects all of them alike. There is at least one round, and more while the
time lasts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from hotprefix.cost.features import Features, features
from hotprefix.engine.executor import Executor, StepResult
from hotprefix.engine.messages import Generate
from hotprefix.engine.params import SamplingParams
from hotprefix.kernel.config import Capabilities
from hotprefix.kernel.plan import StepPlan
from hotprefix.kernel.request import RequestId
from hotprefix.lab.cost.design import Decodes, Design

if TYPE_CHECKING:
    from hotprefix.engine.loop import EngineLoop

DECODE_STEPS = 4
WAITING = (0, 32, 128, 512)
WAITING_TOKENS = 64
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Sample:
    """One step.

    point: the name of the batch that it was made for; equal batches have equal names.
    features: what its forward pass computed.
    seconds: the time of its forward pass.
    outside_s: the time of the rest of the loop's step.
    running, waiting: how many requests ran and waited after it was planned.
    touched: prefixes that waiting-prefix refresh touched in it.
    """

    point: str
    features: Features
    seconds: float
    outside_s: float
    running: int
    waiting: int
    touched: int = 0


@dataclass
class StopwatchExecutor:
    """Passes plans on to `inner` and times them.

    seconds: the time of the last plan's forward pass.
    spent_s: the time of the whole last call of `execute`, its own work included.
    plan: the last plan.
    """

    inner: Executor
    clock: Clock = time.perf_counter
    seconds: float = 0.0
    spent_s: float = 0.0
    plan: StepPlan | None = None

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def start(self, request: RequestId, prompt: Sequence[int], params: SamplingParams) -> None:
        self.inner.start(request, prompt, params)

    def execute(self, plan: StepPlan) -> StepResult:
        begun = self.clock()
        result = self.inner.execute(plan)
        self.seconds = self.clock() - begun
        self.plan = plan
        self.spent_s = self.clock() - begun
        return result

    def finish(self, request: RequestId) -> None:
        self.inner.finish(request)


@dataclass
class Bench:
    """Runs batches on one loop, whose executor is `watch`. vocab_size: token ids are drawn below it."""

    loop: EngineLoop
    watch: StopwatchExecutor
    vocab_size: int
    seed: int = 0
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._serial = count()
        self._texts: list[tuple[int, ...]] = []

    # -- what batches are made of -----------------------------------------------------------------

    def text(self, index: int, length: int) -> tuple[int, ...]:
        """The first `length` ids of text `index`, which are the same at every call."""
        while len(self._texts) <= index:
            self._texts.append(())
        if len(self._texts[index]) < length:
            self._texts[index] += self.fresh(length - len(self._texts[index]))
        return self._texts[index][:length]

    def fresh(self, length: int) -> tuple[int, ...]:
        """`length` ids that no earlier text begins with."""
        return tuple(self._random.choices(range(self.vocab_size), k=length))

    def submit(self, prompt: tuple[int, ...], outputs: int) -> RequestId:
        name = f"m{next(self._serial)}"
        params = SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)
        self.loop.submit(Generate(name, prompt, params))
        return name

    def step(self, point: str) -> Sample | None:
        """Run one step of the loop and record it under `point`; None if nothing ran."""
        self.watch.plan, self.watch.spent_s = None, 0.0
        touched = self.loop.kernel.counters.refresh_touches
        begun = self.watch.clock()
        self.loop.step()
        outside = self.watch.clock() - begun - self.watch.spent_s
        plan = self.watch.plan
        if plan is None or not plan.chunks:
            return None
        status = self.loop.kernel.status()
        sample = Sample(
            point, features(plan.chunks), self.watch.seconds, outside, len(plan.chunks), status.waiting,
            self.loop.kernel.counters.refresh_touches - touched,
        )  # fmt: skip
        self.samples.append(sample)
        return sample

    def drain(self, point: str) -> None:
        while self.loop.has_work:
            self.step(point)

    def drop(self, requests: Sequence[RequestId]) -> None:
        """Abort requests."""
        for request in requests:
            self.loop.abort(request)
        while self.loop.has_work:
            self.loop.step()

    # -- batches ----------------------------------------------------------------------------------

    def prefill(self, prefix: int, chunk: int) -> None:
        """Compute a chunk of `chunk` tokens after a cached prefix of `prefix` tokens."""
        self.submit(self.text(0, prefix) + self.fresh(chunk), 1)
        self.drain(f"prefill {chunk} after {prefix}")

    def decode(self, scene: Decodes) -> None:
        """Run sequences that decode, alone and beside prefill chunks."""
        most = 2 * DECODE_STEPS + len(scene.chunks) + scene.count
        open_ = [self.submit(self.text(i, scene.context), most) for i in range(scene.count)]
        name = f"decode {scene.count} of {scene.context}"
        self._until_decoding(scene.count, f"start {name}")
        for _ in range(DECODE_STEPS):
            self.step(name)
        for chunk in scene.chunks:
            self.submit(self.fresh(chunk), 1)
            self.step(f"{name} with {chunk}")
        self.drop(open_)

    def _until_decoding(self, count: int, point: str) -> None:
        """Step until `count` sequences decode together, or until nothing runs because the cache is too
        small."""
        while (made := self.step(point)) is not None and made.features.decodes < count:
            pass

    def queue(self, waiting: int, slots: int) -> None:
        """Let sequences in all slots decode while `waiting` others, whose beginnings are cached, wait."""
        outputs = slots + 2 * DECODE_STEPS
        running = [self.submit(self.text(i, WAITING_TOKENS), outputs) for i in range(slots)]
        self._until_decoding(slots, "start queue")
        waits = [self.submit(self.text(i % slots, WAITING_TOKENS), 1) for i in range(waiting)]
        for _ in range(DECODE_STEPS):
            self.step(f"queue {waiting}")
        self.drop([*waits, *running])


def seconds_per_token(bench: Bench, tokens: int) -> float:
    """About how long a prefilled token takes here, by the wall clock. This also warms the engine up."""
    for length in (16, tokens, tokens):
        prompt, begun = bench.fresh(length), time.perf_counter()
        bench.submit(prompt, 1)
        bench.drain("warm-up")
        took = time.perf_counter() - begun
    bench.samples.clear()
    return took / tokens


def run_rounds(bench: Bench, plan: Design, deadline: float, told: Callable[[int, int, int], None]) -> int:
    """Run rounds over the design until `deadline` (of `time.perf_counter`); returns how many. The texts are
    computed first and give no samples: each is computed once, so a slow moment could not be averaged out.
    told: called as told(round, batch, batches) to show progress."""
    for index, length in enumerate(plan.texts):
        bench.submit(bench.text(index, length), 1)
        bench.drain("text")
    bench.samples.clear()
    batches: list[Callable[[], None]] = [
        *(partial(bench.prefill, prefix, chunk) for prefix in plan.prefixes for chunk in plan.chunks),
        *(partial(bench.decode, scene) for scene in plan.decodes),
    ]
    order = random.Random(bench.seed)
    done = 0
    while not done or time.perf_counter() < deadline:
        order.shuffle(batches)
        for at, batch in enumerate(batches):
            if done and time.perf_counter() >= deadline:
                break
            told(done + 1, at + 1, len(batches))
            batch()
        done += 1
    return done
