"""The executor contract. Owns: the one interface between the kernel's plans and what computes them.

Rules: an executor runs exactly the plan it is given and never decides about pages. The torch model and the
tests' fakes stand behind this protocol; the simulator has no executor (lab/sim/instance.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hotprefix.engine.params import SamplingParams
from hotprefix.kernel.config import Capabilities
from hotprefix.kernel.plan import StepPlan
from hotprefix.kernel.request import RequestId


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One position's log-probabilities.

    token, logprob: the token's own.
    rank: 1 = the most likely token.
    top: the most likely tokens as (token id, logprob), most likely first.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """What sampling gave one request in one step. ended: the request's grammar is complete with this token,
    so nothing may follow it."""

    token: int
    logprob: TokenLogprob | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Unsampled:
    """Why no token can be sampled for one request: its grammar has failed, or it allows no token. The other
    requests of the step have their tokens."""

    error: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave.

    sampled: for each chunk with `samples`, a token, or why there is none.
    prompt_logprobs: for requests that asked for them, the entries of the prompt positions whose logits this
    step computed, in order. The logits of position p score token p + 1, so the first prompt token has no
    entry.
    restore_s: seconds that the plan's copies from L2 took.
    """

    sampled: Mapping[RequestId, Sampled | Unsampled]
    prompt_logprobs: Mapping[RequestId, Sequence[TokenLogprob]] = field(default_factory=dict)
    restore_s: float = 0.0


class Executor(Protocol):
    """Runs step plans."""

    @property
    def capabilities(self) -> Capabilities: ...

    def start(self, request: RequestId, prompt: Sequence[int], params: SamplingParams) -> None:
        """Make the request's sampling settings known before its first chunk."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan's chunks. If it raises, the KV that the step has written so far is worthless."""
        ...

    def finish(self, request: RequestId) -> None:
        """Forget a request that has ended or was aborted. Unknown ids are ignored."""
        ...
