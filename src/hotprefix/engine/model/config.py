"""What is computed. Owns: `ModelConfig`, the shape of a decoder, and `RopeConfig`, its rotary embedding.

Rules: frozen. Every value that the forward pass depends on is here and is checked, whichever file it comes
from (`hf_config.py`, `gguf_config.py`). A model that cannot be computed exactly is refused with
ModelLoadError, never approximated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hotprefix.engine.model.ops import HeadShape
from hotprefix.errors import ModelLoadError

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding. Fields that are not listed here mean what the kind's paper means by them (rope.py).

    kind: one of ROPE_KINDS.
    original_positions: tokens.
    truncate: whether yarn rounds the borders of its ramp to whole dimensions.
    attention_factor: multiplies cos and sin.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            why = _REFUSED_ROPES.get(self.kind, "")
            raise ModelLoadError(
                f"rope scaling {self.kind!r} is not supported{why}; supported: {', '.join(ROPE_KINDS)}"
            )
        if self.theta <= 0 or self.factor <= 0:
            raise ModelLoadError(
                f"rope scaling {self.kind!r}: rope_theta={self.theta:g}, factor={self.factor:g}: give "
                "numbers greater than 0"
            )
        if self.kind in ("llama3", "yarn") and self.original_positions < 1:
            raise ModelLoadError(
                f"rope scaling {self.kind!r} lacks original_max_position_embeddings: add it, at least 1"
            )
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ModelLoadError(
                f"rope scaling 'llama3': low_freq_factor={self.low_freq_factor:g} must be less than "
                f"high_freq_factor={self.high_freq_factor:g}"
            )
        if self.kind == "yarn" and not 0 < self.beta_slow <= self.beta_fast:
            raise ModelLoadError(
                f"rope scaling 'yarn': beta_slow={self.beta_slow:g} must be greater than 0 and at most "
                f"beta_fast={self.beta_fast:g}"
            )


_REFUSED_ROPES = {
    "dynamic": " (it turns a key differently as the text grows, so a cached prefix would not fit)",
    "longrope": " (it turns keys differently in long texts than in short ones, so a cached prefix would "
    "not fit)",
}
_REFUSED_ROPES["su"] = _REFUSED_ROPES["longrope"]


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """The factor by which yarn multiplies cos and sin if a model gives none (arXiv 2309.00071, section
    3.4)."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one decoder.

    max_positions: longest context, tokens.
    windows[i]: attention window of layer i in tokens; None: full attention.
    rope_layers[i]: whether layer i rotates q and k.
    tied_embeddings: what the files say. If the weights hold a head it is used, whatever the files say.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    rope_layers: tuple[bool, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim",
                 "max_positions")  # fmt: skip
        for name in sizes:
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ModelLoadError(
                    f"model config: {name}={getattr(self, name)!r} is not a positive whole number"
                )
        if self.heads % self.kv_heads:
            raise ModelLoadError(
                f"model config: {self.heads} heads are not a multiple of {self.kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise ModelLoadError(
                f"model config: head_dim={self.head_dim} is odd, rotary embedding needs pairs"
            )
        if len(self.windows) != self.layers or len(self.rope_layers) != self.layers:
            raise ModelLoadError(f"model config: per-layer lists do not have {self.layers} entries")
        if any(window is not None and window < 1 for window in self.windows):
            raise ModelLoadError(f"model config: attention window {self.windows}: give at least 1 token")

    @property
    def shape(self) -> HeadShape:
        return HeadShape(self.heads, self.kv_heads, self.head_dim)
