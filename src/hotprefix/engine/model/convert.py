"""GGUF files turned into safetensors once. Owns: the conversion cache and its validity rules.

Rules: two small records and one weight file per (GGUF file, dtype). A weight file counts only if its
SHA-256 is the recorded one, so neither a torn write nor a flipped bit is ever loaded; anything else is
rebuilt. Without a usable cache folder the model loads straight from the GGUF file, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotprefix.engine.model import store
from hotprefix.engine.model.config import ModelConfig, from_gguf
from hotprefix.engine.model.gguf_weights import GgufWeights
from hotprefix.engine.model.safetensors_weights import SafetensorsWeights, write_safetensors
from hotprefix.engine.model.weights import Weights
from hotprefix.errors import ModelLoadError

log = logging.getLogger(__name__)
Progress = Callable[[str, float], None]
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model's config, its tensors and the SHA-256 (hex) of their content."""

    config: ModelConfig
    weights: Weights
    content: str


def gguf_metadata(path: Path, cache_dir: Path | None = None) -> dict[str, Any]:
    """The key/value metadata of a GGUF file (tokenizer and chat template included) as plain Python,
    plus the tensor names under "tensors". Parsing takes seconds, so it is cached. Raises ModelLoadError."""
    record = _record(path, cache_dir, "meta")
    cached = store.read_json(record)
    if cached is not None and cached.get("identity") == store.identity(path) and "metadata" in cached:
        return dict(cached["metadata"])
    return _keep_metadata(path, record, GgufWeights(path))


def load_gguf(
    path: Path, dtype: torch.dtype, cache_dir: Path | None = None, progress: Progress | None = None
) -> Loaded:
    """Config and weights of a GGUF file, through the cache. Raises ModelLoadError."""
    record = _record(path, cache_dir, str(dtype).removeprefix("torch."))
    target = record.with_suffix(".safetensors")
    content = _valid_content(path, record, target)
    if content is None:
        source = GgufWeights(path)
        _keep_metadata(path, _record(path, cache_dir, "meta"), source)
        try:
            content = _convert(path, source, dtype, record, target, progress)
        except OSError as error:
            log.warning(
                "cannot cache the converted model in %s (%s): loading without it", target.parent, error
            )
            return Loaded(source.config, source, store.file_sha256(path))
    metadata = gguf_metadata(path, cache_dir)
    config = from_gguf(metadata, frozenset(metadata["tensors"]))
    return Loaded(config, SafetensorsWeights([target]), content)


def _record(path: Path, cache_dir: Path | None, kind: str) -> Path:
    """The key is the file's place, not its state: a changed file replaces its old conversion."""
    if not path.is_file():
        raise ModelLoadError(f"no GGUF file at {path}")
    folder = (cache_dir or store.default_cache_dir()) / "models"
    return folder / f"{store.digest(_FORMAT, str(path.resolve()))[:32]}.{kind}.json"


def _keep_metadata(path: Path, record: Path, source: GgufWeights) -> dict[str, Any]:
    metadata = {**source.metadata, "tensors": sorted(source.tensor_names)}
    try:
        store.write_json(record, {"identity": store.identity(path), "metadata": metadata})
    except OSError as error:
        log.warning("cannot cache model metadata in %s: %s", record.parent, error)
    return metadata


def _valid_content(path: Path, record: Path, target: Path) -> str | None:
    known = store.read_json(record)
    if known is None or known.get("identity") != store.identity(path):
        return None
    try:
        content = store.file_sha256(target)
    except OSError:
        return None
    return content if content == known.get("sha256") else None


def _convert(
    path: Path,
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

    with store.atomic_write(target) as out:
        write_safetensors(out, shapes, dtype, get)
    content = store.file_sha256(target)
    store.write_json(record, {"identity": store.identity(path), "sha256": content})
    return content
