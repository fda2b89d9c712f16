"""Tensors of a GGUF file, as numbers or as quantised blocks. Owns: its names and row order turned into
Hugging Face's.

Rules: dequantised to float32 exactly as the format defines. llama.cpp stores the query and key rows
of llama-type models so that rotary pairs are neighbours; we undo that, because our rotation pairs the
two halves of a head as Hugging Face does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from hotprefix.engine.model.config import ModelConfig, from_gguf
from hotprefix.engine.model.weights import Blocks
from hotprefix.engine.text.gguf_meta import read_metadata
from hotprefix.errors import ModelLoadError

ROPE_DIVISORS = "rope_divisors"
_INTERLEAVED = ("llama", "smollm3")
_GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    ROPE_DIVISORS: "rope_freqs.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GgufWeights:
    """`Weights` over one GGUF file; dequantises at each `get`. Raises ModelLoadError."""

    def __init__(self, path: Path) -> None:
        metadata = read_metadata(path)
        try:
            reader = gguf.GGUFReader(str(path))
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ModelLoadError(f"cannot read GGUF file {path}: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        names = _name_map(int(metadata.get(f"{metadata.get('general.architecture')}.block_count", 0)))
        self._names = {ours: theirs for ours, theirs in names.items() if theirs in self._tensors}
        self.config: ModelConfig = from_gguf(metadata, self._names)
        self._interleaved = metadata["general.architecture"] in _INTERLEAVED

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor the decoder may want, by Hugging Face name."""
        return {
            name: tuple(int(n) for n in reversed(self._tensors[raw].shape))
            for name, raw in self._names.items()
        }

    def get(self, name: str) -> Tensor:
        if name not in self._names:
            raise ModelLoadError(f"the weights lack tensor {name!r}")
        raw = self._tensors[self._names[name]]
        try:
            values = gguf.dequantize(raw.data, raw.tensor_type)
        except NotImplementedError as error:
            raise ModelLoadError(f"GGUF tensor type {raw.tensor_type.name} is not supported") from error
        tensor = torch.from_numpy(np.array(values, dtype=np.float32, copy=True))
        heads = self._heads(name)
        return _pair_halves(tensor, heads) if heads else tensor

    def places(self) -> dict[str, list[Any]]:
        """Where quantised tensors lie in the file, for `GgufBlocks`; JSON-able."""
        found = ((name, self._tensors[raw]) for name, raw in self._names.items())
        return {
            name: [raw.tensor_type.name, raw.data_offset, list(raw.data.shape), self._heads(name)]
            for name, raw in found
            if raw.data.dtype == np.uint8
        }

    def _heads(self, name: str) -> int:
        """Heads whose rows the file interleaves; 0: none."""
        if self._interleaved and ".q_proj." in name:
            return self.config.heads
        return self.config.kv_heads if self._interleaved and ".k_proj." in name else 0


class GgufBlocks:
    """`BlockSource` over the `places` of one GGUF file, without reading its header again."""

    def __init__(self, path: Path, places: Mapping[str, list[Any]]) -> None:
        self._path, self._places = path, places

    def blocks(self, name: str) -> Blocks | None:
        """See `BlockSource`. Raises ModelLoadError."""
        if name not in self._places:
            return None
        form, offset, shape, heads = self._places[name]
        try:
            rows = np.fromfile(self._path, np.uint8, shape[0] * shape[1], offset=offset).reshape(shape)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot read tensor {name!r} of {self._path}: {error}") from error
        tensor = torch.from_numpy(rows)
        return Blocks(form, _pair_halves(tensor, heads) if heads else tensor)


def _name_map(layers: int) -> dict[str, str]:
    """Hugging Face's name -> GGUF's, of every tensor that could be there."""
    names = dict(_GLOBAL)
    for i in range(layers):
        for ours, theirs in _LAYER.items():
            for part in ("weight", "bias"):
                names[f"model.layers.{i}.{ours}.{part}"] = f"blk.{i}.{theirs}.{part}"
    return names


def _pair_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads * D, ...] with rotary pairs as neighbours -> pairs D/2 apart."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
