"""Metadata of a GGUF file, quickly. Owns: reading its key-value head and nothing else.

Rules: the file's head is parsed in one pass over a memory map (the gguf package makes an object of each
string of a vocabulary, which takes seconds); tensors are never touched. Layout: ggml's gguf.md,
versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from hotprefix.errors import ModelLoadError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_KEYS = 100_000


def read_metadata(path: Path) -> dict[str, Any]:
    """Key -> number, bool, str or list of them. Raises ModelLoadError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).head()
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ModelLoadError(f"cannot read GGUF file {path}: {error}") from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def head(self) -> dict[str, Any]:
        magic, version, _tensors, keys = self._unpack("<4sIQQ")
        if magic != b"GGUF" or version not in (2, 3) or keys > _MAX_KEYS:
            raise ValueError(f"not a little-endian GGUF file of version 2 or 3 (starts {magic!r}, {version})")
        return {self._string(): self._value(self._unpack("<I")[0]) for _ in range(keys)}

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (size,) = self._unpack("<Q")
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError("the file ends inside a string")
        return self._data[start : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack("<" + _SCALARS[kind])[0]
        item, size = self._unpack("<IQ")
        if item == _STRING:
            return [self._string() for _ in range(size)]
        if item == _ARRAY:
            return [self._value(_ARRAY) for _ in range(size)]
        dtype = np.dtype("<" + _SCALARS[item] if item != 7 else "?")
        values = np.frombuffer(self._data, dtype, size, self._at)
        self._at += values.nbytes
        return values.tolist()
