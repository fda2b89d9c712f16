"""GGUF files turned into safetensors once. Owns: the conversion cache and its validity rules.

Rules: there is one weight file and one record for each pair of a GGUF file (with all its parts) and a dtype.
A weight file is used only if its SHA-256 is the recorded one, so neither a torn write nor a flipped bit is
ever loaded; otherwise it is made again. The record also says where the GGUF file keeps its quantised blocks;
their values are compared with the weights when they are packed. If the cache folder cannot be used, the model
is loaded straight from the GGUF file, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotprefix.engine.model import user_cache
from hotprefix.engine.model.config import ModelConfig
from hotprefix.engine.model.gguf_config import from_gguf
from hotprefix.engine.model.gguf_weights import GgufBlocks, GgufWeights
from hotprefix.engine.model.safetensors_weights import SafetensorsWeights, write_safetensors
from hotprefix.engine.model.weights import BlockSource, Weights
from hotprefix.engine.text.gguf_meta import parts, read_metadata
from hotprefix.errors import ModelLoadError
from hotprefix.userdir import default_cache_dir

log = logging.getLogger(__name__)
Progress = Callable[[str, float], None]
_FORMAT = 2  # raise it whenever the same file would be converted to other numbers
_NAMES = 1  # part of a record's name; it stays the same, so that a new format replaces an old one's files


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model's config, its tensors, the SHA-256 (hex) of their content, and its quantised blocks."""

    config: ModelConfig
    weights: Weights
    content: str
    blocks: BlockSource | None = None


def load_gguf(
    path: Path, dtype: torch.dtype, cache_dir: Path | None = None, progress: Progress | None = None
) -> Loaded:
    """Config and weights of a GGUF file, through the cache. Raises ModelLoadError."""
    if not path.is_file():
        raise ModelLoadError(f"no GGUF file at {path}")
    metadata = read_metadata(path)
    files = parts(path, metadata)
    record = _record(path, cache_dir, dtype)
    target = record.with_suffix(".safetensors")
    content = _valid_content(files, record, target)
    if content is None:
        source = GgufWeights(path)
        try:
            content = _convert(files, source, dtype, record, target, progress)
        except OSError as error:
            log.warning(
                "cannot cache the converted model in %s (%s): loading without it", target.parent, error
            )
            blocks = GgufBlocks(files, source.places())
            content = user_cache.digest([user_cache.file_sha256(file) for file in files])
            return Loaded(source.config, source, content, blocks)
    weights = SafetensorsWeights([target])
    blocks = GgufBlocks(files, (user_cache.read_json(record) or {}).get("blocks", {}))
    return Loaded(from_gguf(metadata, weights), weights, content, blocks)


def _record(path: Path, cache_dir: Path | None, dtype: torch.dtype) -> Path:
    """Where the record of a file is. Its name follows from the file's path, not from its content, so the
    conversion of a changed file replaces the old one."""
    folder = (cache_dir or default_cache_dir()) / "models"
    return folder / f"{user_cache.digest(_NAMES, str(path.resolve()), str(dtype))[:32]}.json"


def _valid_content(files: Sequence[Path], record: Path, target: Path) -> str | None:
    known = user_cache.read_json(record)
    if known is None or known.get("identity") != _identity(files):
        return None
    try:
        content = user_cache.file_sha256(target)
    except OSError:
        return None
    return content if content == known.get("sha256") else None


def _identity(files: Sequence[Path]) -> list[Any]:
    """Everything, except the dtype, that decides which numbers a conversion gives: the files and the
    format."""
    return [_FORMAT, *(user_cache.identity(file) for file in files)]


def _convert(
    files: Sequence[Path],
    source: GgufWeights,
    dtype: torch.dtype,
    record: Path,
    target: Path,
    progress: Progress | None,
) -> str:
    """Write target, then its record; returns the content's SHA-256. Raises OSError."""
    shapes = source.shapes()
    done = 0

    def get(name: str) -> torch.Tensor:
        nonlocal done
        done += 1
        if progress is not None:
            progress("converting", done / len(shapes))
        return source.get(name)

    with user_cache.atomic_write(target) as out:
        write_safetensors(out, shapes, dtype, get)
    content = user_cache.file_sha256(target)
    kept = {"identity": _identity(files), "sha256": content, "blocks": source.places()}
    user_cache.write_json(record, kept)
    return content
