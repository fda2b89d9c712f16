"""One token for each row of logits. Owns: `Sampler`, the sampling state of every live request.

Rules: a request's token depends on its own logits, settings, ids and seed only, never on its batch
mates or its row. A call samples every row or, when it raises, none: no state has changed then. State
lives from `start` to `finish` and survives retractions. The mathematics runs on the host, a row at a
time; rows that want plain greedy cost their share of one argmax and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from hotprefix.engine.executor import Sampled
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.sampling.draw import Row, draw, uniform
from hotprefix.engine.sampling.logprobs import token_logprob
from hotprefix.engine.sampling.state import RequestState
from hotprefix.engine.sampling.structured import Compiler
from hotprefix.errors import HotprefixError, InputError, ProtocolError
from hotprefix.kernel.request import RequestId


class SamplingError(HotprefixError):
    """No token can be sampled for `request`; the others of its batch are unaffected and unchanged."""

    def __init__(self, request: RequestId, problem: str) -> None:
        super().__init__(request, problem)
        self.request = request
        self.problem = problem

    def __str__(self) -> str:
        return f"request {self.request}: {self.problem}"


def system_seed() -> int:
    """A fresh 63-bit seed from the operating system."""
    return int.from_bytes(os.urandom(8), "little") >> 1


class Sampler:
    """Samples for all running requests.

    vocab_size: V, the width of the logits. device: where the logits will be. eos_ids: end-of-sequence
    tokens. compiler: builds grammars; without one, structured requests are refused. fresh_seed: gives
    requests without a seed theirs.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        eos_ids: Collection[int] = (),
        compiler: Compiler | None = None,
        fresh_seed: Callable[[], int] = system_seed,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._compiler = compiler
        self._fresh_seed = fresh_seed
        self._states: dict[RequestId, RequestState] = {}

    def start(self, request_id: RequestId, prompt: Sequence[int], params: SamplingParams) -> None:
        """Begin a request. prompt: all its ids, cached or not. Raises InputError for ids outside the
        vocabulary or a grammar that does not compile, ProtocolError for an id that is live."""
        if request_id in self._states:
            raise ProtocolError(f"sampler: request {request_id} was started twice")
        params.check_vocab(self._vocab_size)
        constraint = None
        if params.structured is not None:
            if self._compiler is None:
                raise InputError("structured output is not available in this engine", param="response_format")
            constraint = self._compiler.compile(params.structured)
        eos = frozenset() if params.ignore_eos else self._eos_ids
        self._states[request_id] = RequestState(
            prompt,
            params,
            seed=self._fresh_seed() if params.seed is None else params.seed,
            ends=sorted(eos.union(params.stop_token_ids)),
            constraint=constraint,
        )

    def sample(self, rows: Sequence[RequestId], logits: torch.Tensor) -> list[Sampled]:
        """One token per row, appended to its request's state. logits: float32 [L, V], row i is that of
        rows[i]. Raises SamplingError for a row with NaN, +inf or nothing finite, and for a grammar that
        has failed; ProtocolError for an unknown id or a wrong shape."""
        if tuple(logits.shape) != (len(rows), self._vocab_size):
            raise ProtocolError(
                f"sampler: logits {tuple(logits.shape)} for {len(rows)} rows of {self._vocab_size}"
            )
        states = [self._state(r) for r in rows]
        best, table = self._to_host(rows, states, logits.detach())
        tokens = [
            int(best[i]) if state.greedy and not state.adjusts else _choose(rows[i], state, table[i])
            for i, state in enumerate(states)
        ]
        sampled = []
        for i, (state, token) in enumerate(zip(states, tokens, strict=True)):
            top = state.params.logprobs
            logprob = None if top is None else token_logprob(table[i], token, top)
            sampled.append(Sampled(token, logprob, ended=state.add(token)))
        return sampled

    def finish(self, request_id: RequestId) -> None:
        """Forget a request; unknown ids are ignored."""
        self._states.pop(request_id, None)

    def _state(self, request_id: RequestId) -> RequestState:
        try:
            return self._states[request_id]
        except KeyError:
            raise ProtocolError(f"sampler: request {request_id} was never started") from None

    def _to_host(
        self, rows: Sequence[RequestId], states: Sequence[RequestState], logits: torch.Tensor
    ) -> tuple[npt.NDArray[np.int64], Mapping[int, Row]]:
        """(argmax of every row, the logits of those rows that need more than that). Checks every row."""
        busy = [i for i, s in enumerate(states) if s.adjusts or not s.greedy or s.params.logprobs is not None]
        if logits.device.type == "cpu":
            host = logits.to(torch.float32).numpy()
            best: npt.NDArray[np.int64] = host.argmax(axis=1)
            peaks = host[np.arange(len(rows)), best]
            table = {i: host[i] for i in busy}
        else:
            found = logits.max(dim=1)
            best, peaks = found.indices.cpu().numpy(), found.values.float().cpu().numpy()
            copied = logits[busy].to("cpu", torch.float32).numpy()
            table = {i: copied[at] for at, i in enumerate(busy)}
        for i in map(int, np.flatnonzero(~np.isfinite(peaks))):  # an argmax stops at the first NaN
            raise SamplingError(rows[i], f"the model's logits peak at {peaks[i]}: not a number to sample by")
        return best, table


def _choose(request: RequestId, state: RequestState, logits: Row) -> int:
    """The token of a row that takes more than an argmax of the model's logits."""
    try:
        row = state.adjusted(logits) if state.adjusts else logits
    except HotprefixError as error:  # its grammar
        raise SamplingError(request, str(error)) from error
    best = int(row.argmax())
    if not np.isfinite(row[best]):
        raise SamplingError(request, "no token is allowed: grammar, bias and logits exclude all of them")
    if state.greedy:
        return best
    p = state.params
    u = uniform(state.seed, state.outputs)
    return draw(row, u, temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p)
