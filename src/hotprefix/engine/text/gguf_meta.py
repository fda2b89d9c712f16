"""Metadata of a GGUF file, quickly. Owns: reading its key-value head, and finding the files of a split one.

Rules: the file's head is parsed in one pass over a memory map, because the gguf package makes an object of
each string of a vocabulary, which takes seconds. Tensors are never touched. The layout is ggml's gguf.md,
versions 2 and 3, little-endian. Parts of a split file are named and numbered as by llama.cpp's gguf-split;
the first one has the metadata, so it is the one to give.
"""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from hotprefix.errors import ModelLoadError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_KEYS = 100_000
_SPLIT_NUMBER, _SPLIT_COUNT = "split.no", "split.count"
_SPLIT_NAME = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.gguf)", re.IGNORECASE)


def read_metadata(path: Path) -> dict[str, Any]:
    """Key -> number, bool, str or a list of these. path: a whole file, or the first part of a split one.
    Raises ModelLoadError."""
    metadata = _read(path)
    if number := _whole(metadata, _SPLIT_NUMBER):
        first = _part(path, 0, _whole(metadata, _SPLIT_COUNT))
        raise ModelLoadError(
            f"{path} is part {number + 1} of a split GGUF file: give its first part"
            f"{'' if first is None else f', {first}'}"
        )
    return metadata


def parts(path: Path, metadata: dict[str, Any]) -> list[Path]:
    """The files of a model, in order: `path` alone, or with the other parts of a split file beside it.
    metadata: that of `path`. Raises ModelLoadError if a part is missing or is another model's."""
    count = _whole(metadata, _SPLIT_COUNT)
    if count < 2:
        return [path]
    found = [_part(path, number, count) for number in range(count)]
    absent = [str(part or path) for part in found if part is None or not part.is_file()]
    if absent:
        raise ModelLoadError(
            f"{path} is split in {count} parts, named …-00001-of-{count:05}.gguf and so on; absent: "
            f"{', '.join(absent)}"
        )
    whole = [part for part in found if part is not None]
    for number, part in enumerate(whole):
        told = _read(part)
        if (told.get(_SPLIT_NUMBER), told.get(_SPLIT_COUNT)) != (number, count):
            raise ModelLoadError(
                f"{part} does not say that it is part {number + 1} of {count}: give the right file"
            )
    return whole


def _part(path: Path, number: int, count: int) -> Path | None:
    """The file of a part by llama.cpp's naming rule; None if `path` does not follow that rule."""
    name = _SPLIT_NAME.fullmatch(path.name)
    if name is None or int(name[2]) != count:
        return None
    return path.with_name(f"{name[1]}-{number + 1:05}-of-{count:05}{name[3]}")


def _whole(metadata: dict[str, Any], key: str) -> int:
    value = metadata.get(key)
    return value if isinstance(value, int) else 0


def _read(path: Path) -> dict[str, Any]:
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
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            if key in metadata:
                raise ValueError(f"key {key!r} occurs twice")
            metadata[key] = self._value(self._unpack("<I")[0])
        return metadata

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
