"""GGUF files: what a conversion keeps, split files, names that occur twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_models import GT, WIDE, write_gguf
from safetensors.torch import load_file
from tiny_models import Sequencer, executor_for, make_ops, one_thread, reference_model, run

from hotprefix.engine.model import convert
from hotprefix.engine.model.convert import load_gguf
from hotprefix.engine.model.files import ModelFiles
from hotprefix.engine.model.gguf_weights import ROPE_DIVISORS
from hotprefix.engine.model.loader import LoadedModel, load_model
from hotprefix.engine.model.ops import Ops
from hotprefix.engine.model.torch_ops import TorchOps
from hotprefix.engine.text.gguf_meta import read_metadata
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.errors import ModelLoadError

DIVISORS = np.array([1.0, 1.3331, 2.7779, 8.0, 1.0, 1.0, 1.0, 1.0], np.float32)


def load(path: Path, cache: Path, ops: Ops | None = None, **options: Any) -> LoadedModel:
    files = ModelFiles("m", "gguf", path)
    return load_model(files, "float32", "cpu", ops or TorchOps(), cache_dir=cache, **options)


def greedy(loaded: LoadedModel) -> list[int]:
    executor, _ = executor_for(loaded, 32, 4)
    with one_thread():
        return run(executor, Sequencer("a", 0, range(5, 25), range(32), 4), 12, chunk=99)


def test_a_bfloat16_conversion_keeps_vectors_exact(tmp_path: Path) -> None:
    """Rounded divisors of rotary frequencies would turn distant tokens by whole radians."""
    model = reference_model("Llama", **WIDE)
    path = write_gguf(model, tmp_path / "m.gguf", extra={"rope_freqs.weight": DIVISORS})
    loaded = load_gguf(path, torch.bfloat16, tmp_path / "cache")
    assert torch.equal(loaded.weights.get(ROPE_DIVISORS), torch.from_numpy(DIVISORS))
    norm = model.state_dict()["model.layers.1.input_layernorm.weight"]
    assert torch.equal(loaded.weights.get("model.layers.1.input_layernorm.weight"), norm)
    assert loaded.weights.get("model.layers.1.mlp.up_proj.weight").dtype == torch.bfloat16


def test_divisors_must_fit_the_heads(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.ones(4, np.float32)}
    path = write_gguf(reference_model("Llama", **WIDE), tmp_path / "m.gguf", extra=extra)
    with pytest.raises(ModelLoadError, match=r"rope_divisors.*\(4,\).*\(8,\)"):
        load(path, tmp_path / "cache")


def test_a_conversion_of_an_older_version_is_replaced(tmp_path: Path) -> None:
    path = write_gguf(reference_model("Llama", **WIDE), tmp_path / "m.gguf")
    expected = greedy(load(path, tmp_path))
    records = list((tmp_path / "models").glob("*.json"))
    record = json.loads(records[0].read_text())
    assert record["identity"][0] == convert._FORMAT
    record["identity"] = record["identity"][1]
    record["sha256"] = "what an older version wrote"
    records[0].write_text(json.dumps(record))
    assert greedy(load(path, tmp_path)) == expected
    assert list((tmp_path / "models").glob("*.json")) == records
    assert len(list((tmp_path / "models").glob("*.safetensors"))) == 1


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_a_split_file_equals_the_whole_one(kind: str, tmp_path: Path) -> None:
    """Native kernels read the quantised blocks themselves, each from its own part."""
    ops = make_ops(kind)
    whole = write_gguf(reference_model("Llama", **WIDE), tmp_path / "whole.gguf", kinds=(GT.Q8_0, GT.Q4_0))
    split = write_gguf(
        reference_model("Llama", **WIDE), tmp_path / "part.gguf", kinds=(GT.Q8_0, GT.Q4_0), split=7
    )
    assert len(list(tmp_path.glob("part-*-of-*.gguf"))) > 2
    first, second = load(whole, tmp_path / "a", ops), load(split, tmp_path / "b", ops)
    assert first.fingerprint == second.fingerprint
    assert first.decoder.quantised_linears == second.decoder.quantised_linears
    assert greedy(first) == greedy(second)
    again = load(split, tmp_path / "b", make_ops(kind))
    assert greedy(again) == greedy(first)


def test_a_changed_part_is_converted_anew(tmp_path: Path) -> None:
    path = write_gguf(reference_model("Llama", **WIDE), tmp_path / "m.gguf", split=7)
    first = load(path, tmp_path / "cache").fingerprint
    last = sorted(tmp_path.glob("m-*.gguf"))[-1]
    data = bytearray(last.read_bytes())
    data[-40] ^= 1
    last.unlink()
    last.write_bytes(data)
    assert load(path, tmp_path / "cache").fingerprint != first


def test_another_part_is_refused_for_its_tokenizer_too(tmp_path: Path) -> None:
    path = write_gguf(reference_model("Llama", **WIDE), tmp_path / "m.gguf", split=7)
    second = path.with_name(path.name.replace("-00001-", "-00002-"))
    with pytest.raises(
        ModelLoadError, match=rf"part 2 of a split GGUF file: give its first part, .*{path.name}"
    ):
        Tokenizer.load(second)


def test_parts_are_found_by_their_names(tmp_path: Path) -> None:
    path = write_gguf(reference_model("Llama", **WIDE), tmp_path / "m.gguf", split=7)
    renamed = path.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelLoadError, match=r"is split in \d parts, named …-00001-of"):
        load(renamed, tmp_path / "cache")
    renamed.rename(path)
    second = path.with_name(path.name.replace("-00001-", "-00002-"))
    second.write_bytes(path.read_bytes())
    with pytest.raises(ModelLoadError, match="does not say that it is part 2"):
        load(path, tmp_path / "cache")


def test_a_metadata_key_that_occurs_twice_is_an_error(tmp_path: Path) -> None:
    def string(text: str) -> bytes:
        return len(text).to_bytes(8, "little") + text.encode()

    entry = string("llama.rope.freq_base") + (4).to_bytes(4, "little") + (7).to_bytes(4, "little")
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (2).to_bytes(8, "little")
    (tmp_path / "m.gguf").write_bytes(head + entry + entry)
    with pytest.raises(ModelLoadError, match="freq_base' occurs twice"):
        read_metadata(tmp_path / "m.gguf")


def test_tensors_that_are_missing_from_the_parts_are_counted(tmp_path: Path) -> None:
    path = write_gguf(reference_model("Llama", **WIDE), tmp_path / "m.gguf", split=7)
    last = sorted(tmp_path.glob("m-*.gguf"))[-1]
    number = len(list(tmp_path.glob("m-*.gguf"))) - 1
    out = gguf.GGUFWriter(str(last), "llama")
    out.add_uint16("split.no", number)
    out.add_uint16("split.count", number + 1)
    out.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    with pytest.raises(ModelLoadError, match=r"and its other parts hold \d+ tensors of \d+"):
        load(path, tmp_path / "cache")


def test_norms_of_a_converted_model_are_used_as_they_are(tmp_path: Path) -> None:
    path = write_gguf(reference_model("Llama", **WIDE), tmp_path / "m.gguf")
    load_gguf(path, torch.bfloat16, tmp_path / "cache")
    stored = load_file(next((tmp_path / "cache" / "models").glob("*.safetensors")))
    assert {t.dtype for t in stored.values() if t.dim() == 1} == {torch.float32}
