"""Tensors of a GGUF file, as numbers or as quantised blocks. Owns: turning the file's tensor names and row
order into Hugging Face's.

Rules: values are dequantised to float32 exactly as the format defines. llama.cpp stores the query and key
rows of llama-type models so that rotary pairs are neighbours. That is undone here, because our rotation, as
Hugging Face's, pairs the two halves of a head.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from hotprefix.engine.model.config import ModelConfig
from hotprefix.engine.model.gguf_config import INTERLEAVED, from_gguf
from hotprefix.engine.model.weights import Blocks
from hotprefix.engine.text.gguf_meta import parts, read_metadata
from hotprefix.errors import ModelLoadError

ROPE_DIVISORS = "rope_divisors"
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
_BLOCK = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)")


class GgufWeights:
    """`Weights` over a GGUF file of one or several parts; dequantises at each `get`. Raises
    ModelLoadError."""

    def __init__(self, path: Path) -> None:
        metadata = read_metadata(path)
        self._tensors: dict[str, tuple[int, Any]] = {}
        for number, part in enumerate(parts(path, metadata)):
            self._open(part, number)
        stated = metadata.get("split.tensors.count", len(self._tensors))
        if stated != len(self._tensors):
            raise ModelLoadError(f"{path} and its other parts hold {len(self._tensors)} tensors of {stated}")
        self._names = _name_map(self._tensors)
        self.config: ModelConfig = from_gguf(metadata, self._names)
        unknown = sorted(self._tensors.keys() - set(self._names.values()))
        if unknown:
            raise ModelLoadError(
                f"{path} holds {len(unknown)} tensors that architecture {self.config.family!r} does not have "
                f"({', '.join(unknown[:3])}): hotprefix would compute another model; give another file"
            )
        self._interleaved = self.config.family in INTERLEAVED

    def _open(self, part: Path, number: int) -> None:
        try:
            tensors = gguf.GGUFReader(str(part)).tensors
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ModelLoadError(f"cannot read GGUF file {part}: {error}") from error
        for tensor in tensors:
            if tensor.name in self._tensors:
                raise ModelLoadError(f"tensor {tensor.name!r} occurs twice, the second time in {part}")
            self._tensors[tensor.name] = (number, tensor)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def names(self) -> Collection[str]:
        return self._names.keys()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that the decoder may ask for, by Hugging Face name."""
        return {
            name: tuple(int(n) for n in reversed(self._tensors[raw][1].shape))
            for name, raw in self._names.items()
        }

    def get(self, name: str) -> Tensor:
        if name not in self._names:
            raise ModelLoadError(f"the weights lack tensor {name!r}")
        _, raw = self._tensors[self._names[name]]
        try:
            values = gguf.dequantize(raw.data, raw.tensor_type)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"tensor {raw.name!r} has GGUF type {raw.tensor_type.name}, which is not supported: "
                "give a file quantised otherwise, for example Q4_K_M or Q8_0"
            ) from error
        tensor = torch.from_numpy(np.array(values, dtype=np.float32, copy=True))
        heads = self._heads(name)
        return _pair_halves(tensor, heads) if heads else tensor

    def places(self) -> dict[str, list[Any]]:
        """Where quantised tensors lie in the file, for `GgufBlocks`; JSON-able."""
        found = ((name, *self._tensors[raw]) for name, raw in self._names.items())
        return {
            name: [part, raw.tensor_type.name, raw.data_offset, list(raw.data.shape), self._heads(name)]
            for name, part, raw in found
            if raw.data.dtype == np.uint8
        }

    def _heads(self, name: str) -> int:
        """The number of heads whose rows the file interleaves in this tensor; 0 if it interleaves none."""
        if self._interleaved and ".q_proj." in name:
            return self.config.heads
        return self.config.kv_heads if self._interleaved and ".k_proj." in name else 0


class GgufBlocks:
    """`BlockSource` over the `places` of a GGUF file's parts, without reading their headers again."""

    def __init__(self, parts: Sequence[Path], places: Mapping[str, list[Any]]) -> None:
        self._parts, self._places = parts, places

    def blocks(self, name: str) -> Blocks | None:
        """See `BlockSource`. Raises ModelLoadError."""
        if name not in self._places:
            return None
        part, form, offset, shape, heads = self._places[name]
        path = self._parts[part]
        try:
            rows = np.fromfile(path, np.uint8, shape[0] * shape[1], offset=offset).reshape(shape)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot read tensor {name!r} of {path}: {error}") from error
        tensor = torch.from_numpy(rows)
        return Blocks(form, _pair_halves(tensor, heads) if heads else tensor)


def _name_map(theirs: Collection[str]) -> dict[str, str]:
    """Hugging Face's name -> GGUF's name, for each tensor of the file that Hugging Face has a name for."""
    known = {gguf_name: name for name, gguf_name in _GLOBAL.items()}
    layer = {gguf_name: name for name, gguf_name in _LAYER.items()}
    names = {}
    for name in theirs:
        block = _BLOCK.fullmatch(name)
        if name in known:
            names[known[name]] = name
        elif block is not None and block[2] in layer:
            names[f"model.layers.{block[1]}.{layer[block[2]]}.{block[3]}"] = name
    return names


def _pair_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads * D, ...] with rotary pairs as neighbours -> pairs D/2 apart."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
