"""Rotary position tables. Owns: the inverse frequencies of every supported rope scaling.

Rules: float32 throughout, since positions times frequencies lose whole radians in bfloat16. Sources:
rotary embedding, arXiv 2104.09864; linear scaling, arXiv 2306.15595; yarn, arXiv 2309.00071; llama3,
the Llama 3.1 release (wavelength bands, interpolated between the two factors).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hotprefix.engine.model.config import RopeConfig


class RopeTable:
    """Gives cos and sin for positions. divisors: float32[head_dim / 2], which a GGUF file may contain; they
    divide the frequencies."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, device: torch.device, divisors: Tensor | None
    ) -> None:
        inverse = _inverse_frequencies(rope, head_dim)
        if divisors is not None:
            inverse = inverse / divisors.float().cpu()
        self._inverse = inverse.to(device)
        self._scale = rope.attention_factor

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int32[T] -> (cos, sin), both float32[T, head_dim / 2]."""
        angles = positions.float()[:, None] * self._inverse
        if self._scale == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * self._scale, angles.sin() * self._scale


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(inverse, rope)
    if rope.kind == "yarn":
        return _yarn(inverse, rope, head_dim)
    return inverse


def _llama3(inverse: Tensor, rope: RopeConfig) -> Tensor:
    """Short waves stay as they are, long ones are stretched by `factor`, and those between are a blend of
    both."""
    turns = rope.original_positions * inverse / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * inverse + (1 - keep) * inverse / rope.factor


def _yarn(inverse: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Dimensions that turn more than beta_fast times within the original context stay as they are; those that
    turn fewer than beta_slow times are stretched by `factor`; those between are a blend of both."""

    def dimension(turns: float) -> float:
        return (
            head_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # makes the ramp a step, and avoids a division by zero
    stretch = ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0.0, 1.0)
    return stretch * inverse / rope.factor + (1 - stretch) * inverse
