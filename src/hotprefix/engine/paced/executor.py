"""Runs step plans by waiting. Owns: `PacedExecutor` and `PacedHost`.

Rules:
1. A step takes what the cost model says: its restores, the scheduler's time and the forward pass. The
   executor sleeps for that and computes nothing. There are no weights and no KV.
2. Saves to L2 go on beside the steps, as in the simulator; a step waits for its restores.
3. What would need logits is refused: grammars and log-probabilities. Penalties, biases and the shape of the
   distribution change nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hotprefix.cost.features import features
from hotprefix.cost.model import CostModel
from hotprefix.engine.executor import Sampled, StepResult
from hotprefix.engine.link_totals import Copied
from hotprefix.engine.paced.answers import Answer, Words
from hotprefix.engine.paced.pace import Pace
from hotprefix.engine.params import SamplingParams
from hotprefix.errors import ConfigError, InputError
from hotprefix.kernel.config import Capabilities
from hotprefix.kernel.plan import StepPlan
from hotprefix.kernel.request import RequestId


class PacedHost:
    """The links of an L2 that holds nothing. Raises ConfigError if the cost model knows none.

    page_bytes: of one page.
    """

    def __init__(self, cost: CostModel, page_bytes: int) -> None:
        save, restore = cost.links.save, cost.links.restore
        if save is None or restore is None:
            raise ConfigError(
                f"the cost model {cost.name!r} knows no links to L2: leave out l2_tokens", param="l2_tokens"
            )
        self.links = Copied()
        self._save, self._restore, self._page_bytes = save, restore, page_bytes

    def carry(self, plan: StepPlan) -> float:
        """Count the plan's copies. Returns the seconds that its restores take."""
        if plan.saves:
            size = len(plan.saves) * self._page_bytes
            self.links.saved_bytes += size
            self.links.saved_s += self._save.seconds(size)
        if not plan.restores:
            return 0.0
        size = len(plan.restores) * self._page_bytes
        took = self._restore.seconds(size)
        self.links.restored_bytes += size
        self.links.restored_s += took
        return took

    def write(self, page: int, payload: bytes) -> None:
        """Nothing comes from L3, because there is none."""


class PacedExecutor:
    """See the module's rules. clock, sleep: seconds, monotonic."""

    def __init__(
        self, cost: CostModel, words: Words, host: PacedHost | None = None, *,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._prices, self._words, self._host = cost.prices, words, host
        self._clock, self._sleep = clock, sleep
        self.pace = Pace()
        self._answers: dict[RequestId, Answer] = {}
        self._came: dict[RequestId, float] = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(same_step_reads=True)

    def start(self, request: RequestId, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raises InputError for a request that needs logits."""
        for wants, param in (
            (params.structured is not None, "response_format"),
            (params.logprobs is not None, "logprobs"),
            (params.prompt_logprobs is not None, "prompt_logprobs"),
        ):
            if wants:
                raise InputError(
                    f"{param}: this engine is paced, it has no model whose logits could tell; leave it out",
                    param=param,
                )
        self._answers[request] = Answer(self._words, prompt, params)
        self._came[request] = self._clock()

    def replay(self, request: RequestId, outputs: Sequence[int]) -> bool:
        """Take up outputs that came with a request. No grammar is complete with them, for there is none."""
        self._answers[request].replay(outputs)
        return False

    def execute(self, plan: StepPlan) -> StepResult:
        restore_s = 0.0 if self._host is None else self._host.carry(plan)
        since = next(iter(self._came.values()), None)
        due = self.pace.step(self._clock() if since is None else since, restore_s + self._forward_s(plan))
        sampled = {
            chunk.request: Sampled(self._answers[chunk.request].after(chunk))
            for chunk in plan.chunks
            if chunk.samples
        }
        left = due - self._clock()
        if left > 0:
            self._sleep(left)
        self.pace.ended(self._clock())
        return StepResult(sampled, restore_s=restore_s)

    def _forward_s(self, plan: StepPlan) -> float:
        running = len(plan.chunks)
        if not running:
            return 0.0
        waiting = len(self._came) - running
        return self._prices.scheduler_s(running, waiting) + self._prices.step_s(*features(plan.chunks))

    def finish(self, request: RequestId) -> None:
        self._answers.pop(request, None)
        self._came.pop(request, None)
