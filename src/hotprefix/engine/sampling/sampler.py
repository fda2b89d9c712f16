"""One token for each row of logits. Owns: `Sampler`, the sampling state of every live request.

Rules:
1. A request's token depends only on its own logits, settings, ids and seed, never on its row or on the other
   requests in the batch (rule 51).
2. If a row cannot be sampled, its result says why and its request's state is unchanged; the other rows get
   their tokens.
3. `sample` raises only if it is called wrongly, and then no state has changed.
4. A request's state lives from `start` to `finish`, and survives retractions.
5. The arithmetic runs on the host, one row at a time. A row that is plain greedy costs its share of one
   argmax and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from hotprefix.engine.executor import Sampled, Unsampled
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.sampling.draw_token import Row, draw, uniform
from hotprefix.engine.sampling.sampling_state import RequestState
from hotprefix.engine.sampling.structured import Compiler
from hotprefix.engine.sampling.token_logprobs import token_logprob
from hotprefix.errors import HotprefixError, InputError, ProtocolError
from hotprefix.kernel.request import RequestId


def system_seed() -> int:
    """A fresh 63-bit seed from the operating system."""
    return int.from_bytes(os.urandom(8), "little") >> 1


class Sampler:
    """Samples for all running requests.

    vocab_size: V, the width of the logits.
    device: where the logits will be.
    eos_ids: end-of-sequence tokens.
    compiler: compiles grammars; if it is None, structured requests are refused.
    fresh_seed: returns the seed for a request that has none.
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
        vocabulary or a grammar that does not compile, ProtocolError if a request with this id has not
        finished."""
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

    def replay(self, request_id: RequestId, outputs: Sequence[int]) -> bool:
        """Take outputs that were sampled elsewhere into a request that has none yet. True if its grammar ends
        with the last one. outputs: ids of the vocabulary. Raises InputError if the grammar does not allow
        them, ProtocolError for an unknown id."""
        return self._state(request_id).replay(outputs)

    def sample(self, rows: Sequence[RequestId], logits: torch.Tensor) -> list[Sampled | Unsampled]:
        """One result for each row: a token, which is appended to its request's state, or why there is none.

        There is none if the row has NaN, +inf or no finite logit, if its grammar and settings allow no token,
        or if its grammar has exceeded its limits. logits: float32 [L, V]; row i belongs to rows[i]. Raises
        ProtocolError for an unknown id or a wrong shape.
        """
        if tuple(logits.shape) != (len(rows), self._vocab_size):
            raise ProtocolError(
                f"sampler: logits {tuple(logits.shape)} for {len(rows)} rows of {self._vocab_size}"
            )
        states = [self._state(r) for r in rows]
        best, peaks, table = _to_host(states, logits.detach())
        return [
            _sampled(state, int(best[i]), float(peaks[i]), table.get(i)) for i, state in enumerate(states)
        ]

    def finish(self, request_id: RequestId) -> None:
        """Forget a request; unknown ids are ignored."""
        self._states.pop(request_id, None)

    def _state(self, request_id: RequestId) -> RequestState:
        try:
            return self._states[request_id]
        except KeyError:
            raise ProtocolError(f"sampler: request {request_id} was never started") from None


def _to_host(
    states: Sequence[RequestState], logits: torch.Tensor
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], Mapping[int, Row]]:
    """(argmax of every row, the logit there, the logits of those rows that need more than their argmax)."""
    busy = [i for i, s in enumerate(states) if s.adjusts or not s.greedy or s.params.logprobs is not None]
    if logits.device.type == "cpu":
        host = logits.to(torch.float32).numpy()
        best: npt.NDArray[np.int64] = host.argmax(axis=1)
        return best, host[np.arange(len(states)), best], {i: host[i] for i in busy}
    found = logits.max(dim=1)
    copied = logits[busy].to("cpu", torch.float32).numpy()
    table = {i: copied[at] for at, i in enumerate(busy)}
    return found.indices.cpu().numpy(), found.values.float().cpu().numpy(), table


def _sampled(state: RequestState, best: int, peak: float, row: Row | None) -> Sampled | Unsampled:
    """One row's result.

    best, peak: the row's argmax and the logit there.
    row: its logits; None if the argmax is all that it needs.
    """
    if not np.isfinite(peak):  # an argmax stops at the first NaN
        return Unsampled(f"the model's logits peak at {peak}: not a number to sample by")
    try:
        token = best if row is None or (state.greedy and not state.adjusts) else _choose(state, row)
        top = state.params.logprobs
        logprob = None if top is None or row is None else token_logprob(row, token, top)
        return Sampled(token, logprob, ended=state.add(token))
    except Exception as error:  # whatever is wrong with one row must not affect the others
        return Unsampled(str(error) or type(error).__name__)


def _choose(state: RequestState, logits: Row) -> int:
    """The token of a row that needs more than an argmax of the model's logits."""
    row = state.adjusted(logits) if state.adjusts else logits
    best = int(row.argmax())
    if not np.isfinite(row[best]):
        raise HotprefixError("no token is allowed: grammar, bias and logits exclude all of them")
    if state.greedy:
        return best
    p = state.params
    u = uniform(state.seed, state.outputs)
    return draw(row, u, temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p)
