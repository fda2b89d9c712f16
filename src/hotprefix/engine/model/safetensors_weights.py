"""Tensors of safetensors files. Owns: reading one file or a sharded set, and writing one file.

Rules: reading maps the files, nothing is copied; writing streams one tensor at a time, so converting
needs the memory of the largest tensor only. A damaged file is a ModelLoadError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hotprefix.errors import ModelLoadError

_INDEX = "model.safetensors.index.json"
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


class SafetensorsWeights:
    """`Weights` over the given files."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._where: dict[str, Any] = {}
        for path in files:
            try:
                handle: Any = safe_open(str(path), framework="pt")
                self._where.update(dict.fromkeys(handle.keys(), handle))
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"cannot read weights {path}: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def get(self, name: str) -> Tensor:
        if name not in self._where:
            raise ModelLoadError(f"the weights lack tensor {name!r}")
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor


def directory_files(directory: Path) -> list[Path]:
    """Weight files of a Hugging Face directory, single or sharded. Raises ModelLoadError."""
    index = directory / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"cannot read {index}: {error}") from error
        files = [directory / name for name in names]
    else:
        files = sorted(directory.glob("*.safetensors"))
    missing = [str(path) for path in files if not path.is_file()]
    if missing or not files:
        raise ModelLoadError(f"{directory} lacks weight files: {', '.join(missing) or '*.safetensors'}")
    return files


def write_safetensors(
    out: BinaryIO,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    get: Callable[[str], Tensor],
) -> None:
    """Write tensors of the given names and shapes, all in `dtype`, calling `get` for each in turn."""
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    for name, shape in shapes.items():
        tensor = get(name).to(dtype).contiguous()
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(f"tensor {name!r} has shape {tuple(tensor.shape)}, not {shape}")
        out.write(tensor.view(torch.uint8).numpy().data)
