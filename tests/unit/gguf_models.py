"""GGUF files of small transformers models, written with the gguf package. Not a test itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

GT = gguf.GGMLQuantizationType
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_K_BYTES = {GT.Q4_K: (144, slice(0, 4)), GT.Q6_K: (210, slice(208, 210))}  # of a block; where its scales are


def interleave(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row order of llama-type GGUF files: the two rows of each rotary pair as neighbours."""
    half = rows.shape[0] // heads // 2
    order = [h * 2 * half + part * half + i for h in range(heads) for i in range(half) for part in (0, 1)]
    return rows[order]


def write_gguf(
    model: Any,
    path: Path,
    architecture: str = "llama",
    kinds: tuple[Any, ...] = (GT.Q8_0,),
    keys: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
    split: int = 0,
) -> Path:
    """A GGUF file of a model, matrices quantised as `kinds` in turn; the model itself gets the rounded
    weights. keys: more metadata of the architecture. extra: more tensors by GGUF name. split: tensors in a
    part, 0 = one file. Returns the file to give."""
    config = model.config
    options = {"split_max_tensors": split} if split else {}
    out = gguf.GGUFWriter(str(path), architecture, **options)
    out.add_vocab_size(config.vocab_size)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if (head_dim := getattr(config, "head_dim", None)) is not None:
        out.add_key_length(head_dim)
        out.add_value_length(head_dim)
    for key, value in (keys or {}).items():
        add = {str: out.add_string, float: out.add_float32, int: out.add_uint32, bool: out.add_bool}[
            type(value)
        ]
        add(f"{architecture}.{key}", value)
    out.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for i in range(config.num_hidden_layers):
        names |= {f"model.layers.{i}.{a}": f"blk.{i}.{b}" for a, b in _LAYER.items()}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    matrices = 0
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stem, part = name.rsplit(".", 1)
        turned = next((heads[h] for h in heads if f".{h}" in stem), 0)
        turned = turned if architecture in ("llama", "smollm3") else 0
        values = tensor.numpy().copy()
        if values.ndim == 1:
            out.add_tensor(f"{names[stem]}.{part}", interleave(values, turned) if turned else values)
            continue
        kind = kinds[matrices % len(kinds)]
        matrices += 1
        packed = _packed(values, kind, matrices)
        tensor.copy_(torch.from_numpy(gguf.dequantize(packed, kind).astype(np.float32).reshape(values.shape)))
        out.add_tensor(
            f"{names[stem]}.{part}", interleave(packed, turned) if turned else packed, raw_dtype=kind
        )
    for name, values in (extra or {}).items():
        out.add_tensor(name, values)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    if not split:
        return path
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def _packed(values: np.ndarray[Any, Any], kind: Any, seed: int) -> np.ndarray[Any, Any]:
    """The values as blocks of a kind; of kinds that gguf cannot write: random blocks with sane scales."""
    if kind not in _K_BYTES:
        return gguf.quantize(values, kind)
    size, scales = _K_BYTES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (values.size // 256, size), np.uint8)
    width = (scales.stop - scales.start) // 2
    blocks[:, scales] = np.full((len(blocks), width), 1e-4, np.float16).view(np.uint8)
    return blocks.reshape(values.shape[0], -1)
