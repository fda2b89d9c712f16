"""What a model's files say about its shape. Owns: `ModelConfig` and its two readers.

Rules: frozen; every value the forward pass depends on is here and checked when read; what we cannot
compute exactly is refused with ModelLoadError, never approximated. Hugging Face's `config.json` (old
and new spelling of rope settings) and GGUF metadata give equal configs for the same model.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from hotprefix.engine.model.ops import HeadShape
from hotprefix.errors import ModelLoadError

HF_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}
GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "smollm3": "smollm3"}
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_NO_ROPE_INTERVAL = 4


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: kind is one of ROPE_KINDS; factor, original_positions and the rest mean what
    the kind's paper calls them. attention_factor None = the kind's own formula."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one decoder. windows[i]: attention window of layer i in tokens (None = full).
    rope_layers[i]: whether layer i rotates q and k. max_positions: longest context, tokens."""

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
    eos_token_ids: tuple[int, ...] = field(default=())

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
        if self.rope.kind not in ROPE_KINDS:
            raise ModelLoadError(
                f"rope scaling {self.rope.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
            )
        if self.rope.kind in ("llama3", "yarn") and self.rope.original_positions < 1:
            raise ModelLoadError(f"rope scaling {self.rope.kind!r} lacks original_max_position_embeddings")

    @property
    def shape(self) -> HeadShape:
        return HeadShape(self.heads, self.kv_heads, self.head_dim)


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a parsed `config.json`. Raises ModelLoadError."""
    architecture = next(iter(raw.get("architectures") or []), None)
    family = HF_FAMILIES.get(str(architecture))
    if family is None:
        raise ModelLoadError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(HF_FAMILIES)}"
        )
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise ModelLoadError(f"activation {act!r} is not supported; supported: silu")
    layers, heads = int(_need(raw, "num_hidden_layers")), int(_need(raw, "num_attention_heads"))
    hidden = int(_need(raw, "hidden_size"))
    bias = bool(raw.get("attention_bias", False))
    eos = raw.get("eos_token_id")
    return ModelConfig(
        family=family,
        vocab_size=int(_need(raw, "vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(_need(raw, "intermediate_size")),
        layers=layers,
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_positions=int(raw.get("max_position_embeddings", 2048)),
        rope=_hf_rope(raw),
        windows=_hf_windows(raw, family, layers),
        rope_layers=_hf_rope_layers(raw, family, layers),
        qkv_bias=family == "qwen2" or bias,
        output_bias=family != "qwen2" and bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        tied_embeddings=bool(raw.get("tie_word_embeddings", family == "smollm3")),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
    )


def _need(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise ModelLoadError(f"model config lacks {key!r}")
    return raw[key]


def _hf_rope(raw: Mapping[str, Any]) -> RopeConfig:
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "yarn" and (scaling.get("mscale") or scaling.get("mscale_all_dim")):
        raise ModelLoadError("rope scaling 'yarn' with mscale is not supported")
    if float(raw.get("partial_rotary_factor") or scaling.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelLoadError("partial rotary embedding is not supported")
    attention = scaling.get("attention_factor")
    return RopeConfig(
        theta=float(theta),
        kind=kind,
        factor=float(scaling.get("factor") or 1.0),
        original_positions=int(
            scaling.get("original_max_position_embeddings") or raw.get("max_position_embeddings") or 0
        ),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=None if attention is None else float(attention),
    )


def _hf_windows(raw: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    """Mistral's window holds in every layer; Qwen's and SmolLM3's only where switched on."""
    window = raw.get("sliding_window")
    if family == "llama" or window is None:
        return (None,) * layers
    if family != "mistral" and not raw.get("use_sliding_window", False):
        return (None,) * layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = 0 if family == "mistral" else int(raw.get("max_window_layers") or 0)
        kinds = ["full_attention"] * min(first, layers) + ["sliding_attention"] * max(layers - first, 0)
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelLoadError(f"layer types {sorted(unknown)} are not supported")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _hf_rope_layers(raw: Mapping[str, Any], family: str, layers: int) -> tuple[bool, ...]:
    if family != "smollm3":
        return (True,) * layers
    given = raw.get("no_rope_layers")
    if given is not None:
        return tuple(bool(uses_rope) for uses_rope in given)
    interval = int(raw.get("no_rope_layer_interval") or _NO_ROPE_INTERVAL)
    return tuple((i + 1) % interval != 0 for i in range(layers))


def from_gguf(meta: Mapping[str, Any], tensors: Container[str]) -> ModelConfig:
    """ModelConfig of GGUF metadata (`text.gguf_meta.read_metadata`) and the tensors there are, by Hugging
    Face name: GGUF does not say in words which parts a model has. Raises ModelLoadError."""
    architecture = str(meta.get("general.architecture"))
    family = GGUF_FAMILIES.get(architecture)
    if family is None:
        raise ModelLoadError(
            f"GGUF architecture {architecture!r} is not supported; supported: {', '.join(GGUF_FAMILIES)}"
        )

    def value(key: str, default: Any = None) -> Any:
        found = meta.get(f"{architecture}.{key}", default)
        if found is None:
            raise ModelLoadError(f"GGUF metadata lacks '{architecture}.{key}'")
        if isinstance(found, list):
            raise ModelLoadError(f"GGUF metadata '{architecture}.{key}' varies by layer: not supported")
        return found

    heads, hidden, layers = value("attention.head_count"), value("embedding_length"), value("block_count")
    head_dim = value("attention.key_length", hidden // heads)
    if value("rope.dimension_count", head_dim) != head_dim:
        raise ModelLoadError("partial rotary embedding is not supported")
    window = value("attention.sliding_window", 0) or None
    eos = meta.get("tokenizer.ggml.eos_token_id")
    return ModelConfig(
        family=family,
        vocab_size=value("vocab_size", len(meta.get("tokenizer.ggml.tokens", ()))),
        hidden_size=hidden,
        intermediate_size=value("feed_forward_length"),
        layers=layers,
        heads=heads,
        kv_heads=value("attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=float(value("attention.layer_norm_rms_epsilon")),
        max_positions=value("context_length"),
        rope=_gguf_rope(value),
        windows=(window,) * layers,
        rope_layers=tuple(family != "smollm3" or (i + 1) % _NO_ROPE_INTERVAL != 0 for i in range(layers)),
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in tensors,
        output_bias="model.layers.0.self_attn.o_proj.bias" in tensors,
        mlp_bias="model.layers.0.mlp.down_proj.bias" in tensors,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in tensors,
        tied_embeddings="lm_head.weight" not in tensors,
        eos_token_ids=() if eos is None else (int(eos),),
    )


def _gguf_rope(value: Any) -> RopeConfig:
    kind = str(value("rope.scaling.type", "none"))
    return RopeConfig(
        theta=float(value("rope.freq_base", 10000.0)),
        kind="default" if kind == "none" else kind,
        factor=float(value("rope.scaling.factor", 1.0)),
        original_positions=int(value("rope.scaling.original_context_length", value("context_length"))),
    )
