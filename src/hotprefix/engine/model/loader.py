"""From a model name to a running decoder. Owns: `load_model`, and the choice of dtype, device and ops.

Rules: a fingerprint covers everything that KV depends on: weight content, config (rope included) and dtype
(rule 41). The content digest of a Hugging Face directory is remembered by the files' identity (size, times,
inode), so only the first start reads the files twice.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

import torch

from hotprefix.engine.model import user_cache
from hotprefix.engine.model.convert import Loaded, Progress, load_gguf
from hotprefix.engine.model.files import ModelFiles
from hotprefix.engine.model.forward import Decoder
from hotprefix.engine.model.hf_config import from_hf
from hotprefix.engine.model.ops import BlockOps, Ops
from hotprefix.engine.model.quantised import QuantisedWeights, read_scheme
from hotprefix.engine.model.safetensors_weights import SafetensorsWeights, directory_files
from hotprefix.engine.model.torch_ops import TorchOps
from hotprefix.engine.model.weights import BlockSource
from hotprefix.engine.native import compile_c
from hotprefix.engine.native.native_ops import NativeOps
from hotprefix.errors import ConfigError, ModelLoadError
from hotprefix.userdir import default_cache_dir

log = logging.getLogger(__name__)
DECODE_WEIGHTS = ("auto", "dense", "quantised")
_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder and the fingerprint (hex) that names its KV in the cache."""

    decoder: Decoder
    fingerprint: str


def load_model(
    files: ModelFiles,
    dtype: str = "auto",
    device: str = "auto",
    ops: Ops | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    decode_weights: str = "auto",
) -> LoadedModel:
    """Load a model. Raises ModelLoadError for the files, ConfigError for the settings.

    dtype: auto, float32 or bfloat16.
    device: auto, or a torch device.
    ops: the arithmetic; None chooses by the device.
    cache_dir: where conversions and digests are kept; None: the user's cache folder.
    progress: called now and then as progress(stage, share done).
    decode_weights: what small steps read: auto, dense or quantised. The numbers are the same; auto takes the
    quantised copy if that is faster.
    """
    started = time.monotonic()
    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    if files.kind == "gguf":
        loaded = load_gguf(files.path, kind, cache_dir, progress)
    else:
        loaded = _load_directory(files.path, cache_dir or default_cache_dir())
    if progress is not None:
        progress("loading", 0.0)
    ops = ops or choose_ops(place)
    blocks = choose_blocks(decode_weights, loaded.blocks, ops, kind)
    decoder = Decoder(loaded.config, loaded.weights, ops, kind, place, blocks)
    if decode_weights == "quantised" and not decoder.quantised_linears:
        raise ConfigError(
            f"decode_weights='quantised': no weight of {files.name} is quantised as Q4_0, Q4_1 or Q8_0; "
            "give a GGUF file that has such, or decode_weights='dense'",
            param="decode_weights",
        )
    if progress is not None:
        progress("loading", 1.0)
    log.info("loaded %s as %s on %s in %.1f s", files.name, kind, place, time.monotonic() - started)
    fingerprint = user_cache.digest(loaded.content, dataclasses.asdict(loaded.config), str(kind))
    return LoadedModel(decoder, fingerprint)


def choose_device(name: str) -> torch.device:
    """auto: CUDA if there is a CUDA device, else the CPU. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r}: give auto, cpu or cuda", param="device") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device={name!r} is not available here: give auto or cpu", param="device")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 if the device multiplies it natively, else float32. Raises ConfigError."""
    if name == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
        flags = torch.cpu.get_capabilities()
        fast = flags.get("avx512_bf16") or flags.get("amx_bf16") or flags.get("bf16")
        return torch.bfloat16 if fast else torch.float32
    if name not in _DTYPES:
        raise ConfigError(f"dtype={name!r}: give auto, float32 or bfloat16", param="dtype")
    return _DTYPES[name]


def choose_ops(device: torch.device) -> Ops:
    """Native kernels on a CPU if they can be built, else torch."""
    library = compile_c.load() if device.type == "cpu" else None
    return TorchOps() if library is None else NativeOps(library)


def choose_blocks(
    choice: str, blocks: BlockSource | None, ops: Ops, dtype: torch.dtype
) -> BlockSource | None:
    """The blocks that small steps are to read; None: they read the dense weights. Raises ConfigError."""
    if choice not in DECODE_WEIGHTS:
        raise ConfigError(
            f"decode_weights={choice!r}: give {', '.join(DECODE_WEIGHTS)}", param="decode_weights"
        )
    if choice == "auto":
        return blocks if isinstance(ops, BlockOps) and ops.gains_from_blocks(dtype) else None
    if choice == "quantised" and not (isinstance(ops, BlockOps) and ops.reads_blocks("Q8_0", dtype)):
        raise ConfigError(
            f"decode_weights='quantised' needs native kernels for {dtype}, which this machine has not: give "
            "dtype='float32' on a CPU with a C compiler, or decode_weights='dense'",
            param="decode_weights",
        )
    return blocks if choice == "quantised" else None


def _load_directory(path: Path, cache_dir: Path) -> Loaded:
    try:
        raw = json.loads((path / "config.json").read_text("utf-8"), object_pairs_hook=_without_repeats)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot read {path / 'config.json'}: {error}") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{path / 'config.json'} is not an object with named values")
    scheme = read_scheme(path, raw)
    config = from_hf(raw)
    files = directory_files(path)
    content, weights = _content(files, cache_dir), SafetensorsWeights(files)
    if scheme is None:
        return Loaded(config, weights, content)
    content = user_cache.digest(content, dataclasses.asdict(scheme))
    return Loaded(config, QuantisedWeights(weights, scheme), content)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in values if names.count(key) > 1)
        raise ValueError(f"key {twice!r} occurs twice: remove the wrong one")
    return values


def _content(files: list[Path], cache_dir: Path) -> str:
    identities = [user_cache.identity(file) for file in files]
    record = (
        cache_dir / "models" / f"{user_cache.digest([str(f.resolve()) for f in files])[:32]}.content.json"
    )
    known = user_cache.read_json(record)
    if known is not None and known.get("identity") == identities:
        return str(known["sha256"])
    content = user_cache.digest([user_cache.file_sha256(file) for file in files])
    try:
        user_cache.write_json(record, {"identity": identities, "sha256": content})
    except OSError as error:
        log.warning("cannot keep the weights' digest in %s: %s", record.parent, error)
    return content
