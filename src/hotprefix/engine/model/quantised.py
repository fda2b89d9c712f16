"""Checkpoints with quantised weights. Owns: `Scheme`, how a config says that they are quantised, and
`QuantisedWeights`, which gives them as numbers.

Rules: a weight is value times scale, in float32. A method that needs more (zero points, packed values,
rotations) is refused by its name. Only weights are affected: activations and KV keep the compute dtype,
whatever the checkpoint would allow. Formats: block FP8 as DeepSeek-V3 and Qwen3-FP8 publish it
(`weight_scale_inv` multiplies, in spite of its name), and compressed-tensors' int-quantized and
float-quantized.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotprefix.engine.model.safetensors_weights import FLOATS, SafetensorsWeights
from hotprefix.engine.model.strict_fields import Fields, shown
from hotprefix.errors import ModelLoadError

_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")
_VALUE_DTYPES = {"float": "F8_E4M3", "int": "I8"}
_SCALES = ("weight_scale_inv", "weight_scale")
_SCALE_DTYPES = (*FLOATS, "F8_E8M0")
# Scales of activations and of KV. Both stay unquantised here, so these are not used.
_UNUSED = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale")
_INSTEAD = (
    "hotprefix reads 8-bit weights of fp8 and compressed-tensors; give such a checkpoint, an "
    "unquantised one, or a GGUF file"
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights are quantised.

    method: the method's name.
    value_dtype: the dtype of the quantised values, as safetensors calls it.
    block: how many rows and columns share a scale; None: each row has a scale, or there is one for all.
    """

    method: str
    value_dtype: str
    block: tuple[int, int] | None = None


def read_scheme(directory: Path, raw: Mapping[str, Any]) -> Scheme | None:
    """How the weights of a directory are quantised by its parsed `config.json`; None: they are not. Raises
    ModelLoadError."""
    if (directory / "hf_quant_config.json").is_file():
        raise _refused("modelopt", "hf_quant_config.json")
    if raw.get("quantization") is not None:
        raise _refused("mlx", "quantization")
    key = next((k for k in ("quantization_config", "compression_config") if raw.get(k) is not None), None)
    if key is None:
        return None
    fields = Fields(raw[key], f"config.json, {key}")
    method = fields.text("quant_method", "bitsandbytes" if "load_in_4bit" in fields else "unnamed")
    if method == "fp8":
        return _fp8(fields)
    if method == "compressed-tensors":
        return _compressed_tensors(fields)
    raise _refused(method, key)


def _refused(method: str, key: str, more: str = "") -> ModelLoadError:
    return ModelLoadError(f"quantisation {method!r} ({key}){more} is not supported: {_INSTEAD}")


def _fp8(fields: Fields) -> Scheme:
    if (form := fields.text("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _refused("fp8", f"fmt={form}")
    block = _block(fields, "weight_block_size")
    fields.finish(
        {"activation_scheme", "modules_to_not_convert", "ignored_layers", "scale_fmt", "dequantize"},
        {"modules_to_convert": ([],), "expert_dtype": ("fp8",)},
    )
    return Scheme("fp8", "F8_E4M3", block)


def _block(fields: Fields, key: str) -> tuple[int, int] | None:
    sizes = fields.items(key)
    if sizes is None:
        return None
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise fields.wrong(key, "two whole numbers of at least 1: rows and columns")
    return sizes[0], sizes[1]


def _compressed_tensors(fields: Fields) -> Scheme:
    form = fields.text("format", "unnamed")
    groups = fields.get("config_groups", {})
    if form not in _FORMATS or not isinstance(groups, Mapping) or not groups:
        raise _refused("compressed-tensors", f"format={form}")
    schemes = {_group(Fields(group, f"{fields.where}, {name}")) for name, group in groups.items()}
    if len(schemes) > 1:
        raise _refused(
            "compressed-tensors", f"config_groups={', '.join(groups)}", " with several kinds of weights"
        )
    sparsity = fields.get("sparsity_config", {})
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        raise _refused("compressed-tensors", f"sparsity_config={shown(sparsity)}")
    fields.finish(
        {"ignore", "kv_cache_scheme", "global_compression_ratio", "version"},
        {"quantization_status": ("compressed",), "transform_config": ({},)},
    )
    return schemes.pop()


def _group(group: Fields) -> Scheme:
    """The scheme of one of `config_groups`. The modules that it targets need not be read: a weight is
    quantised if it has a scale."""
    weights = Fields(group.get("weights", {}), f"{group.where}, weights")
    kind, bits, strategy = weights.text("type", "int"), weights.whole("num_bits", 8), weights.text("strategy")
    symmetric = weights.flag("symmetric", True)
    if (
        kind not in _VALUE_DTYPES
        or bits != 8
        or strategy not in ("tensor", "channel", "block")
        or not symmetric
    ):
        said = f"{bits}-bit {kind} weights, strategy {strategy}, symmetric {str(symmetric).lower()}"
        raise _refused("compressed-tensors", group.where, f" with {said}")
    block = _block(weights, "block_structure")
    if (block is None) is (strategy == "block"):
        raise weights.wrong("block_structure", "rows and columns with strategy 'block', and only with it")
    weights.finish({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}, {"dynamic": (False,)})
    group.finish({"targets", "input_activations", "output_activations"}, {"format": _FORMATS})
    return Scheme("compressed-tensors", _VALUE_DTYPES[kind], block)


class QuantisedWeights:
    """`Weights` over files whose matrices may be quantised by `scheme`."""

    def __init__(self, files: SafetensorsWeights, scheme: Scheme) -> None:
        self._files, self._scheme = files, scheme
        self._scales = {}
        for name in files.names():
            if name.endswith(".weight") and files.dtype(name) == scheme.value_dtype:
                self._scales[name] = self._scale_of(name)
        used = set(self._scales.values())
        self._names = [n for n in files.names() if n not in used and not n.endswith(_UNUSED)]

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def names(self) -> Collection[str]:
        return self._names

    def get(self, name: str) -> Tensor:
        scale = self._scales.get(name)
        if scale is None:
            return self._files.get(name)
        values = self._files.raw(name).to(torch.float32)
        return values.mul_(self._spread(scale, tuple(values.shape)))

    def _scale_of(self, name: str) -> str:
        found = [s for s in (f"{name.removesuffix('weight')}{end}" for end in _SCALES) if s in self._files]
        if len(found) != 1:
            raise ModelLoadError(
                f"tensor {name!r} is quantised ({self._scheme.value_dtype}) and has {len(found)} scales "
                f"({' or '.join(_SCALES)}): it must have one"
            )
        if (dtype := self._files.dtype(found[0])) not in _SCALE_DTYPES:
            raise ModelLoadError(
                f"tensor {found[0]!r} has dtype {dtype}: scales must be {', '.join(_SCALE_DTYPES)}"
            )
        return found[0]

    def _spread(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The scale as float32 that broadcasts over a weight of `shape` [rows, columns]."""
        scale = self._files.raw(name).to(torch.float32)
        block = self._scheme.block
        if block is None and scale.numel() == 1:
            return scale.reshape(())
        if block is None and tuple(scale.shape) in ((shape[0],), (shape[0], 1)):
            return scale.reshape(-1, 1)
        if block is not None and tuple(scale.shape) == (-(-shape[0] // block[0]), -(-shape[-1] // block[1])):
            rows = scale.repeat_interleave(block[0], 0)[: shape[0]]
            return rows.repeat_interleave(block[1], 1)[:, : shape[1]]
        how = "one for the weight or one for each row" if block is None else f"one for each block of {block}"
        raise ModelLoadError(
            f"tensor {name!r} has shape {tuple(scale.shape)}, but {self._scheme.method} scales of a "
            f"weight of {shape} are {how}"
        )
