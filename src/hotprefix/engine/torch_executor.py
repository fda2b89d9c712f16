"""Runs step plans on the model. Owns: `TorchExecutor` and the page tables that it keeps for each row.

Rules:
1. It does exactly what a plan says, and decides nothing about pages.
2. A batch is built by numpy on whole arrays: nothing loops over tokens, and for each chunk only the plan's
   deltas are copied.
3. Tables are updated before anything can fail, so a failed step leaves nothing half done and the next plan
   runs.
4. NaN never becomes text: a step whose states or logits are not finite fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotprefix.engine.batch import Batch
from hotprefix.engine.executor import Sampled, StepResult, TokenLogprob, Unsampled
from hotprefix.engine.hostpool import HostPool
from hotprefix.engine.kvpool import KVPool
from hotprefix.engine.model.forward import Decoder
from hotprefix.engine.params import SamplingParams
from hotprefix.errors import HotprefixError
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import Capabilities
from hotprefix.kernel.plan import Chunk, StepPlan
from hotprefix.kernel.request import RequestId

_LOGPROB_ROWS = 128
Ints = npt.NDArray[np.int32]


class Sampler(Protocol):
    """What the executor needs of a sampler."""

    def start(self, request: RequestId, prompt: Sequence[int], params: SamplingParams) -> None: ...

    def sample(self, rows: list[RequestId], logits: Tensor) -> list[Sampled | Unsampled]:
        """One token for each row of logits float32[L, V], or why that row has none."""
        ...

    def finish(self, request: RequestId) -> None: ...


@dataclass(slots=True)
class _PromptScores:
    """A request that wants prompt logprobs. done: the next position whose logits are to be scored."""

    prompt: Tensor
    top: int
    done: int = 0


class TorchExecutor:
    """`Executor` over a decoder, a KV pool, a sampler and, if there is an L2, its pool. Not thread-safe."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, sampler: Sampler, host: HostPool | None = None
    ) -> None:
        self._decoder, self._pool, self._sampler, self._host = decoder, pool, sampler, host
        self._tables: Ints = np.zeros((1, 64), dtype=np.int32)
        self._frames: list[Ints] = [np.zeros(pool.pages, dtype=np.int32) for _ in pool.groups]
        self._scores: dict[RequestId, _PromptScores] = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(same_step_reads=True)

    def start(self, request: RequestId, prompt: Sequence[int], params: SamplingParams) -> None:
        self._sampler.start(request, prompt, params)
        if params.prompt_logprobs is not None:
            tokens = torch.tensor(list(prompt), dtype=torch.int64, device=self._decoder.device)
            self._scores[request] = _PromptScores(tokens, params.prompt_logprobs)

    def finish(self, request: RequestId) -> None:
        self._scores.pop(request, None)
        self._sampler.finish(request)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan. Raises HotprefixError if the plan cannot be run or the numbers are not finite; its
        cause is the error met on the way."""
        for given in plan.frames:
            self._frames[given.group][given.page] = given.frame
        for chunk in plan.chunks:
            self._update_table(chunk)
        try:
            restore_s = 0.0 if self._host is None else self._host.carry(plan)
            return self._run(plan.chunks, restore_s) if plan.chunks else StepResult({})
        except Exception as error:
            raise HotprefixError(f"step {plan.step} ({len(plan.chunks)} chunks) failed: {error}") from error

    def _update_table(self, chunk: Chunk) -> None:
        end = chunk.table_from + len(chunk.table)
        rows, columns = self._tables.shape
        if chunk.row >= rows or end > columns:
            grown = np.zeros(
                (max(rows, 2 * chunk.row, chunk.row + 1), columns if end <= columns else 2 * end), np.int32
            )
            grown[:rows, :columns] = self._tables
            self._tables = grown
        self._tables[chunk.row, chunk.table_from : end] = chunk.table

    def _run(self, chunks: Sequence[Chunk], restore_s: float) -> StepResult:
        batch = self._batch(chunks)
        scoring = any(chunk.request in self._scores for chunk in chunks)
        # The last row of each chunk is the one that samples, and it shows whether anything before it in the
        # chunk was not finite.
        last = batch.query_starts[1:].long() - 1
        states = self._decoder.hidden(batch, self._pool, None if scoring else last)
        _require_finite(states, "hidden states")
        sampled: Mapping[RequestId, Sampled | Unsampled] = {}
        rows = [chunk.request for chunk in chunks if chunk.samples]
        if rows:
            samples = torch.tensor([chunk.samples for chunk in chunks], device=states.device)
            logits = self._decoder.logits(states[batch.logit_rows] if scoring else states[samples])
            _require_finite(logits, "logits")
        scores = self._score_prompts(chunks, states, batch)
        if rows:  # last, so that a failed step moves no request's sampling state
            sampled = dict(zip(rows, self._sampler.sample(rows, logits), strict=True))
        return StepResult(sampled, scores, restore_s)

    def _batch(self, chunks: Sequence[Chunk]) -> Batch:
        page_size = self._pool.page_size
        tokens = tk.view(b"".join(chunk.tokens for chunk in chunks))
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        stops = np.array([chunk.stop for chunk in chunks], dtype=np.int32)
        batch_rows = np.array([chunk.row for chunk in chunks], dtype=np.int64)
        bounds = np.zeros(len(chunks) + 1, dtype=np.int32)
        lens = stops - starts
        np.cumsum(lens, out=bounds[1:])
        positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(starts - bounds[:-1], lens)
        table = self._tables[batch_rows, : -(-int(stops.max()) // page_size)]
        rows = np.repeat(np.arange(len(chunks)), lens)
        pages = table[rows, positions // page_size].astype(np.int64)
        self._check(tokens, positions, pages)
        samples = np.array([chunk.samples for chunk in chunks], dtype=bool)
        batch = Batch(
            token_ids=self._put(tokens),
            positions=self._put(positions),
            slots=self._put(pages * page_size + positions % page_size),
            query_starts=self._put(bounds),
            context_lens=self._put(stops),
            page_table=self._put(table),
            logit_rows=self._put((bounds[1:] - 1)[samples].astype(np.int64)),
            page_size=page_size,
            max_query_len=int(lens.max()),
            max_context_len=int(stops.max()),
        )
        if not self._frames:
            return batch
        views = []
        for group, frame_of in zip(self._pool.groups, self._frames, strict=True):
            first = np.maximum(starts - group.lookback, 0) // page_size
            passed = np.arange(table.shape[1]) < first[:, None]
            frames = np.where(passed, np.int32(group.frames), frame_of[table])
            places = frames[rows, positions // page_size].astype(np.int64)
            written = self._put(places * page_size + positions % page_size)
            views.append(replace(batch, slots=written, page_table=self._put(frames)))
        return replace(batch, windows=tuple(views))

    def _put(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array.copy()).to(self._decoder.device)

    def _check(self, tokens: Ints, positions: Ints, pages: npt.NDArray[np.int64]) -> None:
        """Check the plan's numbers, because native kernels check no bounds and a wrong plan must not become a
        wild write."""
        config = self._decoder.config
        if tokens.min() < 0 or tokens.max() >= config.vocab_size:
            raise HotprefixError(f"token id outside the model's 0 to {config.vocab_size - 1}")
        if positions.max() >= config.max_positions:
            raise HotprefixError(f"position {positions.max()} is past the model's {config.max_positions}")
        if pages.min() < 0 or pages.max() >= self._pool.pages:
            raise HotprefixError(f"page {pages.max()} is outside the pool of {self._pool.pages}")

    def _score_prompts(
        self, chunks: Sequence[Chunk], states: Tensor, batch: Batch
    ) -> dict[RequestId, Sequence[TokenLogprob]]:
        found: dict[RequestId, Sequence[TokenLogprob]] = {}
        for chunk, row in zip(chunks, batch.query_bounds, strict=False):
            score = self._scores.get(chunk.request)
            if score is None or not chunk.prefill:
                continue
            first, last = max(chunk.start, score.done), min(chunk.stop, len(score.prompt) - 1)
            if first < last:
                part = states[row + first - chunk.start : row + last - chunk.start]
                found[chunk.request] = self._logprobs(part, score.prompt[first + 1 : last + 1], score.top)
                score.done = last
        return found

    @torch.inference_mode()
    def _logprobs(self, states: Tensor, targets: Tensor, top: int) -> list[TokenLogprob]:
        """Entries of targets int64[n], given states [n, hidden]. A block of rows at a time, so that the
        logits of a long prompt never exist all at once."""
        entries: list[TokenLogprob] = []
        for at in range(0, len(targets), _LOGPROB_ROWS):
            wanted = targets[at : at + _LOGPROB_ROWS]
            logits = self._decoder.logits(states[at : at + _LOGPROB_ROWS])
            _require_finite(logits, "prompt logits")
            entries += _entries(logits, wanted, top)
        return entries


def _entries(logits: Tensor, wanted: Tensor, top: int) -> list[TokenLogprob]:
    total = logits.logsumexp(-1)
    own = logits.gather(1, wanted[:, None])
    ranks = ((logits > own).sum(-1) + 1).tolist()
    best = logits.topk(top, dim=-1) if top else None
    ids = best.indices.tolist() if best is not None else [[]] * len(wanted)
    values = (best.values - total[:, None]).tolist() if best is not None else [[]] * len(wanted)
    scores = (own[:, 0] - total).tolist()
    return [
        TokenLogprob(token, score, rank, tuple(zip(row_ids, row_values, strict=True)))
        for token, score, rank, row_ids, row_values in zip(
            wanted.tolist(), scores, ranks, ids, values, strict=True
        )
    ]


def _require_finite(values: Tensor, what: str) -> None:
    """Raises HotprefixError unless all values are finite. A sum is finite only if every addend is, so this
    takes one pass and no temporary."""
    if not bool(torch.isfinite(values.sum(dtype=torch.float32))):
        raise HotprefixError(f"the model's {what} are not finite: this step's results are worthless")
