"""Hugging Face's `config.json`, old and new spellings. Owns: `from_hf`, and the keys that change no number.

Rules: the file is read through `Fields`, so a key that is neither read here nor stands in a table below is
refused. A missing key means the default of the family's configuration class in `transformers`; a test
compares the two. If two keys give different values for the same thing, the file is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotprefix.engine.model.config import ModelConfig
from hotprefix.engine.model.hf_rope import read_rope
from hotprefix.engine.model.strict_fields import Fields, shown
from hotprefix.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Family:
    """What a family computes if `config.json` does not say it.

    kv_heads: None means as many as heads.
    head_dim: None means hidden_size / heads.
    tied: whether the output head is the embedding.
    attention_bias, mlp_bias: whether the keys of these names are read.
    """

    name: str
    kv_heads: int | None
    max_positions: int
    head_dim: int | None = None
    rope_theta: float = 10000.0
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False


HF_FAMILIES = {
    "LlamaForCausalLM": Family("llama", None, 2048, attention_bias=True, mlp_bias=True),
    "MistralForCausalLM": Family("mistral", 8, 131072),
    "Qwen2ForCausalLM": Family("qwen2", 32, 32768),
    "Qwen3ForCausalLM": Family("qwen3", 32, 32768, head_dim=128, attention_bias=True),
    "SmolLM3ForCausalLM": Family(
        "smollm3", 4, 32768, rope_theta=2000000.0, tied=True, attention_bias=True, mlp_bias=True
    ),
}
SLIDING, FULL = "sliding_attention", "full_attention"
_WINDOW_DEFAULT, _FIRST_WINDOW_DEFAULT, _NO_ROPE_INTERVAL = 4096, 28, 4

# Keys about how the model was made, named and saved (its quantisation is read by quantised.py), about
# training and ways to run it, and about default sampling.
_MADE_AND_NAMED = """
    _name_or_path name_or_path architectures model_type transformers_version transformers.js_config
    _commit_hash torch_dtype dtype is_llama_config unsloth_* pretraining_tp quantization_config
    compression_config tokenizer_class model_max_length max_sequence_length bos_token_id eos_token_id
    pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id"""
_TRAINING_AND_RUNNING = """
    initializer_range attention_dropout attn_dropout hidden_dropout embd_pdrop resid_pdrop attn_pdrop
    gradient_checkpointing use_cache _attn_implementation _attn_implementation_autoset
    _attn_implementation_internal attn_implementation _flash_attn_2_enabled use_flash_attn
    use_flash_attention_2 id2label label2id num_labels problem_type finetuning_task task_specific_params
    is_decoder prefix return_dict return_dict_in_generate output_attentions output_hidden_states
    output_scores torchscript tf_legacy_loss use_bfloat16 chunk_size_feed_forward"""
_SAMPLING = """
    do_sample early_stopping temperature top_k top_p typical_p repetition_penalty length_penalty
    diversity_penalty num_beams num_beam_groups num_return_sequences no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens remove_invalid_values max_length min_length max_new_tokens"""
HARMLESS = frozenset(f"{_MADE_AND_NAMED} {_TRAINING_AND_RUNNING} {_SAMPLING}".split())
# Keys that change the computation, except at these values.
HARMLESS_AT: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0, 1),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "num_nextn_predict_layers": (0,),
    "logit_scale": (1.0, 1),
    "logits_scaling": (1.0, 1),
    "embedding_multiplier": (1.0, 1),
    "residual_multiplier": (1.0, 1),
}
_FAMILY_HARMLESS: Mapping[str, frozenset[str]] = {
    "llama": frozenset({"max_window_layers"}),
    "mistral": frozenset({"max_window_layers"}),
    "qwen2": frozenset({"attention_bias"}),  # it always has biases, which the weights must hold
    "smollm3": frozenset({"max_window_layers"}),
}
_FAMILY_HARMLESS_AT: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "llama": {"use_sliding_window": (False,)},
}


def from_hf(raw: Any) -> ModelConfig:
    """ModelConfig of a parsed `config.json`. Raises ModelLoadError."""
    fields = Fields(raw, "config.json")
    family = _family(fields)
    if (act := fields.text("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelLoadError(f"activation {act!r} is not supported; supported: silu")
    layers, heads = fields.whole("num_hidden_layers"), fields.whole("num_attention_heads")
    hidden = fields.whole("hidden_size")
    if heads < 1:
        raise fields.wrong("num_attention_heads", "at least 1")
    positions = fields.whole("max_position_embeddings", family.max_positions)
    rope_layers = _rope_layers(fields, family, layers)
    bias = family.attention_bias and fields.flag("attention_bias", False)
    config = ModelConfig(
        family=family.name,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=_absent_or_null(fields, "num_key_value_heads", family.kv_heads, heads),
        head_dim=_absent_or_null(fields, "head_dim", family.head_dim, hidden // heads),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=positions,
        rope=read_rope(fields, family.rope_theta, positions),
        windows=_windows(fields, family, layers, rope_layers, positions),
        rope_layers=rope_layers,
        qkv_bias=family.name == "qwen2" or bias,
        output_bias=bias,
        mlp_bias=family.mlp_bias and fields.flag("mlp_bias", False),
        qk_norm=family.name == "qwen3",
        tied_embeddings=fields.flag("tie_word_embeddings", family.tied),
    )
    fields.finish(
        HARMLESS | _FAMILY_HARMLESS.get(family.name, frozenset()),
        {**HARMLESS_AT, **_FAMILY_HARMLESS_AT.get(family.name, {})},
    )
    return config


def _family(fields: Fields) -> Family:
    names = fields.items("architectures") or [None]
    family = HF_FAMILIES.get(str(names[0]))
    if family is None or len(names) > 1:
        raise ModelLoadError(
            f"architecture {shown(names[0] if len(names) == 1 else names)} is not supported; supported: "
            f"{', '.join(HF_FAMILIES)}"
        )
    if (kind := fields.text("model_type", family.name)) != family.name:
        raise ModelLoadError(
            f"config.json: architectures says {names[0]!r} and model_type {kind!r}: give both of one family "
            f"(model_type {family.name!r})"
        )
    return family


def _absent_or_null(fields: Fields, key: str, absent: int | None, null: int) -> int:
    """A size for which a missing key means `absent`, and a key whose value is null means `null`."""
    return fields.whole(key, null if key in fields or absent is None else absent)


# -- which layers rotate, and what they see --------------------------------------------------------------


def _rope_layers(fields: Fields, family: Family, layers: int) -> tuple[bool, ...]:
    if family.name != "smollm3":
        return (True,) * layers
    interval = fields.whole("no_rope_layer_interval", _NO_ROPE_INTERVAL)
    given = fields.items("no_rope_layers")
    if given is None:
        if interval < 1:
            raise fields.wrong("no_rope_layer_interval", "at least 1")
        return tuple((i + 1) % interval != 0 for i in range(layers))
    if len(given) < layers or any(uses not in (0, 1) for uses in given):
        raise fields.wrong("no_rope_layers", f"a 0 or 1 for each of {layers} layers")
    return tuple(bool(uses) for uses in given[:layers])


def _windows(
    fields: Fields, family: Family, layers: int, rope_layers: tuple[bool, ...], positions: int
) -> tuple[int | None, ...]:
    """The window of each layer. Llama has none. Mistral's holds in every layer. Qwen and SmolLM3 have a
    window if it is switched on, in the layers that the file or the family's rule names."""
    kinds = _layer_kinds(fields, layers)
    window = _window(fields, family)
    if family.name == "llama":
        if (window is not None and window < positions) or (kinds is not None and SLIDING in kinds):
            raise ModelLoadError(
                f"config.json: sliding_window={window} with architecture LlamaForCausalLM, which has "
                "no attention window: set it to null, or name the model's own architecture "
                "(MistralForCausalLM has one)"
            )
        return (None,) * layers
    own = _own_kinds(fields, family, layers, window, rope_layers)
    if family.name == "mistral" and kinds not in (None, own):
        raise ModelLoadError(
            f"config.json: layer_types={shown(kinds)} with sliding_window={window}: "
            "MistralForCausalLM has its window in every layer; give layer_types that say so, or "
            "remove the key"
        )
    kinds = kinds or own
    if SLIDING in kinds and window is None:
        raise ModelLoadError(
            f"config.json: layer_types has {SLIDING!r} but no window is switched on: set sliding_window (and "
            "use_sliding_window to true), or make every layer full_attention"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _layer_kinds(fields: Fields, layers: int) -> list[str] | None:
    kinds = fields.items("layer_types")
    if kinds is None:
        return None
    unknown = {repr(kind) for kind in kinds if kind not in (FULL, SLIDING)}
    if unknown:
        raise ModelLoadError(
            f"config.json: layer_types has {', '.join(sorted(unknown))}; supported: {FULL}, {SLIDING}"
        )
    if len(kinds) != layers:
        raise ModelLoadError(
            f"config.json: layer_types has {len(kinds)} entries for num_hidden_layers={layers}: give one each"
        )
    return kinds


def _window(fields: Fields, family: Family) -> int | None:
    """The window in tokens; None if there is none or it is not switched on."""
    absent = "sliding_window" not in fields and family.name in ("mistral", "qwen2", "qwen3")
    given = absent or fields.get("sliding_window") is not None
    window = fields.whole("sliding_window", _WINDOW_DEFAULT) if given else None
    if family.name in ("llama", "mistral"):
        return window
    return window if fields.flag("use_sliding_window", False) else None


def _own_kinds(
    fields: Fields, family: Family, layers: int, window: int | None, rope_layers: tuple[bool, ...]
) -> list[str]:
    """The kind of each layer by the family's own rule, for files without `layer_types`."""
    if family.name == "mistral":
        slides = [True] * layers
    elif family.name == "smollm3":
        slides = [not rotates for rotates in rope_layers]
    else:
        first = fields.whole("max_window_layers", _FIRST_WINDOW_DEFAULT)
        slides = [i >= first for i in range(layers)]
    return [SLIDING if window is not None and slide else FULL for slide in slides]
