"""Tensors of safetensors files. Owns: reading one file or a sharded set, and writing one file.

Rules: reading maps the files and copies nothing. Writing streams one tensor at a time, so a conversion needs
only the memory of the largest tensor. A damaged file is a ModelLoadError. So is a tensor that two files hold,
because nothing says which of the two is the model's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hotprefix.errors import ModelLoadError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
FLOATS = ("F32", "F16", "BF16")
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


class SafetensorsWeights:
    """`Weights` over the given files."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._where: dict[str, tuple[Path, Any]] = {}
        for path in files:
            try:
                handle: Any = safe_open(str(path), framework="pt")
                names = list(handle.keys())
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"cannot read weights {path}: {error}") from error
            for name in names:
                if name in self._where:
                    raise ModelLoadError(
                        f"tensor {name!r} is in {self._where[name][0].name} and in {path.name}: keep "
                        f"the files of one model in {path.parent}"
                    )
                self._where[name] = (path, handle)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def names(self) -> Collection[str]:
        return self._where.keys()

    def dtype(self, name: str) -> str:
        """The dtype, by the file's name for it. Raises ModelLoadError."""
        return str(self._handle(name).get_slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ModelLoadError."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def get(self, name: str) -> Tensor:
        if (dtype := self.dtype(name)) not in FLOATS:
            raise ModelLoadError(
                f"tensor {name!r} has dtype {dtype}: weights must be {', '.join(FLOATS)}, unless "
                "config.json says with a supported quantization_config how they are quantised"
            )
        return self.raw(name)

    def raw(self, name: str) -> Tensor:
        """The tensor as it is in the file, of whatever dtype. Raises ModelLoadError."""
        tensor: Tensor = self._handle(name).get_tensor(name)
        return tensor

    def _handle(self, name: str) -> Any:
        if name not in self._where:
            raise ModelLoadError(f"the weights lack tensor {name!r}")
        return self._where[name][1]


def directory_files(directory: Path) -> list[Path]:
    """Weight files of a Hugging Face directory: the files that its index names. Without an index, only
    model.safetensors; if that is absent too, all safetensors files. Raises ModelLoadError."""
    index, single = directory / _INDEX, directory / _SINGLE
    if index.is_file():
        files = _indexed(index)
        if single.is_file() and single not in files:
            raise ModelLoadError(
                f"{directory} has {_SINGLE} and also {_INDEX}, which names other files: remove the "
                "one that is not the model's"
            )
    else:
        files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    missing = [str(path) for path in files if not path.is_file()]
    if missing or not files:
        raise ModelLoadError(
            f"{directory} lacks weight files: {', '.join(missing) or '*.safetensors'} (other formats "
            "are not read)"
        )
    return files


def _indexed(index: Path) -> list[Path]:
    """The files that an index names. Raises ModelLoadError."""
    try:
        where: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        files = [index.parent / name for name in sorted(set(where.values()))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"cannot read {index}: {error!r}") from error
    return files


def write_safetensors(
    out: BinaryIO,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    get: Callable[[str], Tensor],
) -> None:
    """Write the tensors of the given names and shapes; `get` is called for each in turn. Matrices are written
    in `dtype`, vectors (norms, biases, divisors of rotary frequencies) in float32."""
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        kind = _dtype_of(shape, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[kind], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    for name, shape in shapes.items():
        tensor = get(name).to(_dtype_of(shape, dtype)).contiguous()
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(f"tensor {name!r} has shape {tuple(tensor.shape)}, not {shape}")
        out.write(tensor.view(torch.uint8).numpy().data)


def _dtype_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if len(shape) == 1 else dtype
