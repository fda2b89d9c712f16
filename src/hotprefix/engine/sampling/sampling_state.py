"""What sampling remembers of one request. Owns: its counters and the changes they make to its logits.

Rules: the state is built from the prompt's ids and the sampled tokens, never from what a step computed, so it
is the same after a prefix-cache hit or a retraction. Meanings are vLLM's: the repetition penalty counts
prompt and outputs, the presence and frequency penalties count outputs only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from hotprefix.engine.params import SamplingParams
from hotprefix.engine.sampling.draw_token import MIN_TEMPERATURE, Row
from hotprefix.engine.sampling.structured import Constraint


class TokenCounts:
    """How often each token was sampled; the prompt's tokens are in it, with count 0 until they are sampled.
    The three arrays grow by doubling, so adding one token is O(1) on average."""

    def __init__(self, prompt: Iterable[int]) -> None:
        first = np.unique(np.fromiter(prompt, dtype=np.int64))
        self._used = first.size
        self._ids = np.empty(2 * first.size + 64, dtype=np.int64)
        self._ids[: first.size] = first
        self._counts = np.zeros(self._ids.size, dtype=np.float32)
        self._at = {int(token): i for i, token in enumerate(first)}

    def add(self, token: int) -> None:
        at = self._at.get(token)
        if at is None:
            if self._used == self._ids.size:
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            at = self._at[token] = self._used
            self._ids[at] = token
            self._used += 1
        self._counts[at] += 1.0

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._ids[: self._used]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return self._counts[: self._used]


class RequestState:
    """One request's sampling state. seed: decides its draws. ends: the ids that min_tokens forbids at
    first."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        ends: Iterable[int],
        constraint: Constraint | None,
    ) -> None:
        self.params = params
        self.seed = seed
        self.outputs = 0
        self.constraint = constraint
        self.greedy = params.temperature < MIN_TEMPERATURE
        self._ends = np.fromiter(ends, dtype=np.int64)
        self._bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        self._bias = np.fromiter(params.logit_bias.values(), dtype=np.float32)
        self._repetition = np.float32(params.repetition_penalty)
        penalised = params.repetition_penalty != 1.0
        self._counts: TokenCounts | None = None
        if penalised or params.presence_penalty or params.frequency_penalty:
            self._counts = TokenCounts(prompt if penalised else ())
        self._adjusts = self._counts is not None or self._bias.size > 0 or constraint is not None

    @property
    def _holds_ends(self) -> bool:
        return self.outputs < self.params.min_tokens and self._ends.size > 0

    @property
    def adjusts(self) -> bool:
        """Whether `adjusted` would differ from the logits themselves now."""
        return self._adjusts or self._holds_ends

    def adjusted(self, logits: Row) -> Row:
        """A copy of the logits [V] with grammar, bias, min_tokens and penalties applied; -inf forbids a
        token. If the grammar allows nothing but an end, min_tokens does not forbid it, so at least one token
        stays."""
        row = logits.copy()
        if self.constraint is not None:
            row[~self.constraint.allowed()] = -np.inf
        if self._bias.size:
            row[self._bias_ids] += self._bias
        if self._holds_ends:
            kept = row[self._ends]
            row[self._ends] = -np.inf
            if row.max() == -np.inf:
                row[self._ends] = kept
        if self._counts is not None:
            self._penalise(row, self._counts)
        return row

    def _penalise(self, row: Row, seen: TokenCounts) -> None:
        values = row[seen.ids]
        values = np.where(values > 0, values / self._repetition, values * self._repetition)
        counts = seen.counts
        values -= np.float32(self.params.frequency_penalty) * counts
        values -= np.float32(self.params.presence_penalty) * (counts > 0)
        row[seen.ids] = values

    def add(self, token: int) -> bool:
        """Append a sampled token. True if the grammar ends with it."""
        self._count(token)
        return self.constraint is not None and self.constraint.advance(token)

    def replay(self, tokens: Sequence[int]) -> bool:
        """Append tokens that were sampled elsewhere. True if the grammar ends with the last one. Raises
        InputError if the grammar does not allow them."""
        for token in tokens:
            self._count(token)
        return self.constraint is not None and self.constraint.replay(tokens)

    def _count(self, token: int) -> None:
        self.outputs += 1
        if self._counts is not None:
            self._counts.add(token)
