"""Log-probabilities as numbers for people. Owns: turning logits into `TokenLogprob`.

Rules: they are taken from the model's own logits, before penalties, bias, masks and temperature (vLLM's
default). They are always finite (rule 49). Rank 1 is the most likely token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hotprefix.engine.executor import TokenLogprob

FLOOR = -9999.0


def token_logprob(row: npt.NDArray[np.float32], token: int, top: int) -> TokenLogprob:
    """The token's entry, with the `top` most likely tokens. row: logits [V]."""
    peak = float(row.max())
    norm = peak + float(np.log(np.exp(row - np.float32(peak)).sum(dtype=np.float64)))
    own = float(row[token])
    return TokenLogprob(
        token=token,
        logprob=_finite(own - norm),
        rank=int(np.count_nonzero(row > row[token])) + 1,
        top=tuple((i, _finite(float(row[i]) - norm)) for i in _most_likely(row, top)),
    )


def prompt_logprobs(logits: torch.Tensor, targets: Sequence[int], top: int) -> list[TokenLogprob]:
    """Entries of prompt positions. logits: float [T, V]; row i scores targets[i], the token after position
    i."""
    rows = logits.detach().to("cpu", torch.float32).numpy()
    return [token_logprob(row, token, top) for row, token in zip(rows, targets, strict=True)]


def _most_likely(row: npt.NDArray[np.float32], n: int) -> list[int]:
    """The ids of the n largest, most likely first; of equals the smaller id first."""
    n = min(n, row.size)
    if n <= 0:
        return []
    kth = np.partition(row, row.size - n)[row.size - n]
    ids = np.flatnonzero(row >= kth)
    order = np.argsort(-row[ids], kind="stable")[:n]
    return [int(i) for i in ids[order]]


def _finite(value: float) -> float:
    return max(value, FLOOR) if value == value else FLOOR
