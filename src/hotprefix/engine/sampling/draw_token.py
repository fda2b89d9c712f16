"""Choosing one token from one row of logits. Owns: truncation and the random draw.

Rules: pure functions on host arrays, one row at a time, so a row's result cannot depend on its neighbours.
The draw is inverse-CDF from one uniform number, which is a function of (seed, output index) alone. Order and
meanings are vLLM's: temperature, min_p, top_k (ids that tie with the k-th stay), then top_p over the ids that
are left.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Literal

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]

# A temperature below this is greedy: dividing by it would only overflow.
MIN_TEMPERATURE = 1e-5
_BLOCK = 256


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1), 53 random bits, for output `index` of the stream `seed` (64-bit, signed)."""
    digest = hashlib.blake2b(struct.pack("<qQ", seed, index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def draw(logits: Row, u: float, *, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """Draw one token id.

    logits: [V], not changed. -inf marks a forbidden token; at least one is finite.
    u: the uniform number, in [0, 1).
    temperature: >= MIN_TEMPERATURE.
    top_k, top_p, min_p: 0, 1 and 0 switch them off.
    """
    scaled = (logits - logits.max()) * np.float32(1.0 / temperature)
    if not top_k and top_p >= 1.0 and min_p <= 0.0:
        return _find(np.exp(scaled), u, "right")
    ids = _threshold(scaled, top_k, min_p)
    if top_p < 1.0:
        ids = _nucleus(scaled, ids, top_p)
    weights = np.exp(scaled if ids is None else scaled[ids])
    at = _find(weights, u, "right")
    return at if ids is None else int(ids[at])


def _threshold(scaled: Row, top_k: int, min_p: float) -> npt.NDArray[np.intp] | None:
    """The ids, ascending, that pass top_k and min_p; None: all do."""
    low = -np.inf
    if 0 < top_k < scaled.size:
        low = float(np.partition(scaled, scaled.size - top_k)[scaled.size - top_k])
    if min_p > 0.0:
        low = max(low, float(np.log(min_p)))
    if low == -np.inf:
        return None
    return np.flatnonzero(scaled >= low)


def _nucleus(scaled: Row, ids: npt.NDArray[np.intp] | None, top_p: float) -> npt.NDArray[np.intp]:
    """The smallest set of most likely `ids` that has the share top_p of their mass, in ascending order. Of
    ids with equal mass at the edge, the smaller ones stay."""
    values = scaled if ids is None else scaled[ids]
    falling = np.sort(values)[::-1]
    count = _find(np.exp(falling), top_p, "left") + 1
    edge = falling[count - 1]
    keep = values > edge
    equals = np.flatnonzero(values == edge)
    keep[equals[: count - int(np.count_nonzero(keep))]] = True
    kept = np.flatnonzero(keep)
    return kept if ids is None else ids[kept]


def _find(weights: Row, share: float, side: Literal["left", "right"]) -> int:
    """The first index up to which the non-negative weights sum to more than `share` of their total (side
    left: to at least that). share: in [0, 1). Never an index of weight 0. The sum is searched block by block
    and then inside one block: a running sum over all weights would cost ten times the rest of a draw."""
    starts = np.arange(0, weights.size, _BLOCK)
    sums = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = min(share * sums[-1], np.nextafter(sums[-1], 0.0))
    block = int(np.searchsorted(sums, target, side=side))
    part = weights[block * _BLOCK : (block + 1) * _BLOCK]
    inner = np.cumsum(part, dtype=np.float64)
    at = int(np.searchsorted(inner, target - (sums[block - 1] if block else 0.0), side=side))
    if at >= part.size or not part[at]:  # the block's sum and the running sum differ in their last bit
        at = int(np.flatnonzero(part)[-1])
    return block * _BLOCK + at
