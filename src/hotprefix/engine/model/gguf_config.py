"""GGUF metadata as a model's shape. Owns: `from_gguf`, and the metadata keys that change no number.

Rules: every key under the architecture's own name (`llama.…`) is read here or stands in a table below; any
other is refused. Keys under other names are ignored, because llama.cpp does not compute by them. A key means
what llama.cpp takes it for, and so does a missing key. GGUF has no key for some parts of a model (such as
biases and QK norms): the model has them if their tensors are there.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from hotprefix.engine.model.config import ModelConfig, RopeConfig, yarn_attention_factor
from hotprefix.engine.model.strict_fields import Fields, shown
from hotprefix.errors import ModelLoadError

GGUF_FAMILIES = ("llama", "qwen2", "qwen3", "smollm3")
INTERLEAVED = ("llama", "smollm3")
_NO_ROPE_INTERVAL = 4

HARMLESS = frozenset({"rope.scaling.finetuned", "attention.layer_norm_epsilon", "pooling_type"})
# Keys that change the computation, except at these values.
HARMLESS_AT: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (1.0,),
    "residual_scale": (1.0,),
    "logit_scale": (1.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "nextn_predict_layers": (0,),
    "use_parallel_residual": (False,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),  # files use it in two different meanings
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_BETAS = (("fast", 32.0), ("slow", 1.0))
_PTH_ORDER = "Meta AI original pth"  # rotary pairs are neighbours, as in every llama-type file


def from_gguf(meta: Mapping[str, Any], tensors: Container[str]) -> ModelConfig:
    """ModelConfig of GGUF metadata (`text.gguf_meta.read_metadata`). tensors: the Hugging Face names of the
    tensors in the file. Raises ModelLoadError."""
    family = _family(meta)
    own = {
        key.removeprefix(f"{family}."): value for key, value in meta.items() if key.startswith(f"{family}.")
    }
    fields = Fields({key: _one_value(family, key, value) for key, value in own.items()}, "GGUF metadata")
    heads, hidden, layers = (
        fields.whole(key) for key in ("attention.head_count", "embedding_length", "block_count")
    )
    if heads < 1:
        raise fields.wrong("attention.head_count", "at least 1")
    config = ModelConfig(
        family=family,
        vocab_size=fields.whole("vocab_size", len(meta.get("tokenizer.ggml.tokens", ())) or None),
        hidden_size=hidden,
        intermediate_size=fields.whole("feed_forward_length"),
        layers=layers,
        heads=heads,
        kv_heads=fields.whole("attention.head_count_kv", heads),
        head_dim=_head_dim(fields, hidden // heads),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_positions=fields.whole("context_length"),
        rope=_rope(fields),
        windows=_windows(fields, family, layers),
        rope_layers=tuple(family != "smollm3" or (i + 1) % _NO_ROPE_INTERVAL != 0 for i in range(layers)),
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in tensors,
        output_bias="model.layers.0.self_attn.o_proj.bias" in tensors,
        mlp_bias="model.layers.0.mlp.down_proj.bias" in tensors,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in tensors,
        tied_embeddings="lm_head.weight" not in tensors,
    )
    layout = {"tensor_data_layout": (_PTH_ORDER,)} if family in INTERLEAVED else {}
    fields.finish(HARMLESS, {**HARMLESS_AT, **layout})
    return config


def _family(meta: Mapping[str, Any]) -> str:
    family = str(meta.get("general.architecture"))
    if family not in GGUF_FAMILIES:
        raise ModelLoadError(
            f"GGUF architecture {family!r} is not supported; supported: {', '.join(GGUF_FAMILIES)}"
        )
    if (kind := meta.get("general.type", "model")) != "model":
        raise ModelLoadError(
            f"GGUF general.type={kind!r} is no model by itself: give the file of a whole model"
        )
    return family


def _one_value(family: str, key: str, value: Any) -> Any:
    """The value for all layers. A list with one value for each layer is accepted if all are equal."""
    if not isinstance(value, list):
        return value
    if not value or any(item != value[0] for item in value):
        raise ModelLoadError(f"GGUF metadata {family}.{key}={shown(value)} varies by layer: not supported")
    return value[0]


def _head_dim(fields: Fields, default: int) -> int:
    size = fields.whole("attention.key_length", default)
    for key, what in (("attention.value_length", "values"), ("rope.dimension_count", "rotated dimensions")):
        if (other := fields.whole(key, size)) != size:
            raise ModelLoadError(
                f"GGUF metadata: {key}={other} {what} for keys of {size}: not supported, all must be of "
                "one size"
            )
    return size


def _windows(fields: Fields, family: str, layers: int) -> tuple[int | None, ...]:
    """The window of each layer. Mistral's holds in every layer. For other families a file does not say in
    which layers it holds, so a window is refused."""
    window = fields.whole("attention.sliding_window", 0) or None
    if window is not None and family != "llama":
        raise ModelLoadError(
            f"GGUF metadata: attention.sliding_window={window} of architecture {family!r} does not "
            "say in which layers it holds: give the model as a Hugging Face directory"
        )
    return (window,) * layers


def _rope(fields: Fields) -> RopeConfig:
    """The rotary embedding. As in llama.cpp, a factor without a type means linear scaling, and a factor of 0
    is no factor."""
    legacy = fields.number("rope.scale_linear", 0.0)
    factor = fields.number("rope.scaling.factor", legacy) or 1.0
    kind = fields.text("rope.scaling.type", "linear" if factor != 1.0 else "none")
    original = fields.whole("rope.scaling.original_context_length", fields.whole("context_length"))
    attention = fields.number("rope.scaling.attn_factor", 1.0)
    theta = fields.number("rope.freq_base", 10000.0, above=0)
    betas = [fields.number(f"rope.scaling.yarn_beta_{name}", value) for name, value in _BETAS]
    if kind == "none":
        return RopeConfig(theta=theta, attention_factor=attention)
    if kind != "yarn":
        return RopeConfig(theta=theta, kind=kind, factor=factor, attention_factor=attention)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_positions=original,
        beta_fast=betas[0],
        beta_slow=betas[1],
        attention_factor=yarn_attention_factor(factor) * attention,
    )
