"""Quantised weights as numbers: equal to other libraries' readers, to the bit; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_cases import RECORDED, change, changed_tensors
from safetensors.torch import load_file, save_file
from tiny_models import reference_model, save

from hotprefix.engine.model.files import ModelFiles
from hotprefix.engine.model.loader import load_model
from hotprefix.engine.model.quantised import QuantisedWeights, Scheme, read_scheme
from hotprefix.engine.model.safetensors_weights import SafetensorsWeights
from hotprefix.engine.model.torch_ops import TorchOps
from hotprefix.errors import ModelLoadError

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
NAME = "a.weight"


def weights(folder: Path, scheme: Scheme, **tensors: torch.Tensor) -> QuantisedWeights:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return QuantisedWeights(SafetensorsWeights([folder / "model.safetensors"]), scheme)


@pytest.mark.parametrize("name", ["int8_channel", "fp8_channel", "fp8_tensor", "fp8_block"])
def test_equal_to_what_compressed_tensors_reads_itself(name: str) -> None:
    folder = RECORDED / name
    raw = json.loads((folder / "config.json").read_text())
    scheme = read_scheme(folder, raw)
    assert scheme is not None
    ours = QuantisedWeights(SafetensorsWeights([folder / "model.safetensors"]), scheme)
    theirs = load_file(folder / "decompressed.safetensors")
    assert set(ours.names()) == set(theirs)
    for tensor, values in theirs.items():
        assert torch.equal(ours.get(tensor), values), tensor


@pytest.mark.filterwarnings("ignore")
def test_equal_to_what_transformers_reads_itself(tmp_path: Path) -> None:
    """transformers has its own reader of block FP8, which dequantises whole blocks."""
    model = reference_model(
        "Qwen3", head_dim=64, hidden_size=128, intermediate_size=384, num_attention_heads=4
    )
    save(model, tmp_path)
    random = torch.Generator().manual_seed(1)

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if "_proj." in n]:
            rows, columns = (size // 128 for size in tensors[name].shape)
            tensors[f"{name}_scale_inv"] = torch.rand(rows, columns, generator=random) * 1e-3
            tensors[name] = (tensors[name] * 300).clamp(-448, 448).to(torch.float8_e4m3fn)

    changed_tensors(tmp_path, quantise)
    change(tmp_path, quantization_config=FP8)
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(128, 128)),
    ).state_dict()  # fmt: skip
    ours = QuantisedWeights(
        SafetensorsWeights([tmp_path / "model.safetensors"]), Scheme("fp8", "F8_E4M3", (128, 128))
    )
    assert set(ours.names()) == set(theirs)
    assert all(torch.equal(ours.get(name), values) for name, values in theirs.items())


def test_the_last_blocks_may_be_partial(tmp_path: Path) -> None:
    values = torch.ones(3, 5).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    read = weights(tmp_path, Scheme("fp8", "F8_E4M3", (2, 2)), a__weight=values, a__weight_scale_inv=scales)
    assert read.get(NAME).tolist() == [[1, 1, 2, 2, 3], [1, 1, 2, 2, 3], [4, 4, 5, 5, 6]]


def test_the_product_is_made_in_float32(tmp_path: Path) -> None:
    values = torch.arange(-128, 128, dtype=torch.int8).reshape(4, 64)
    scales = torch.tensor([[0.0123], [0.7], [1 / 3], [5e-5]])
    read = weights(tmp_path, Scheme("compressed-tensors", "I8"), a__weight=values, a__weight_scale=scales)
    exact = (values.double() * scales.double()).float()
    assert read.get(NAME).dtype == torch.float32
    torch.testing.assert_close(read.get(NAME), exact, rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    ("scheme", "tensors", "words"),
    [
        (Scheme("fp8", "F8_E4M3", (2, 2)), {}, "has 0 scales .*it must have one"),
        (
            Scheme("fp8", "F8_E4M3", (2, 2)),
            {"a__weight_scale": torch.ones(2, 2), "a__weight_scale_inv": torch.ones(2, 2)}, "has 2 scales",
        ),
        (
            Scheme("fp8", "F8_E4M3", (2, 2)), {"a__weight_scale_inv": torch.ones(1, 2)},
            r"shape \(1, 2\).*one for each block of \(2, 2\)",
        ),
        (
            Scheme("fp8", "F8_E4M3"), {"a__weight_scale": torch.ones(2)},
            r"shape \(2,\).*one for the weight or one for each row",
        ),
        (
            Scheme("fp8", "F8_E4M3"), {"a__weight_scale": torch.ones(4, 1, dtype=torch.int32)},
            "has dtype I32: scales must be",
        ),
        (Scheme("fp8", "I8"), {"a__weight_scale": torch.ones(4)}, "has dtype F8_E4M3: weights must be"),
    ],
)  # fmt: skip
def test_a_weight_without_its_scale_is_refused(
    scheme: Scheme, tensors: dict[str, torch.Tensor], words: str, tmp_path: Path
) -> None:
    values = torch.ones(4, 4).to(torch.float8_e4m3fn)
    with pytest.raises(ModelLoadError, match=words):
        weights(tmp_path, scheme, a__weight=values, **tensors).get(NAME)


def test_scales_of_powers_of_two(tmp_path: Path) -> None:
    scales = torch.tensor([[0.25]]).to(torch.float8_e8m0fnu)
    values = torch.full((2, 2), 3.0).to(torch.float8_e4m3fn)
    read = weights(tmp_path, Scheme("fp8", "F8_E4M3", (2, 2)), a__weight=values, a__weight_scale_inv=scales)
    assert read.get(NAME).tolist() == [[0.75, 0.75], [0.75, 0.75]]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**FP8, "rotation": "hadamard"}, "rotation='hadamard'"),
        ({**FP8, "fmt": "e5m2"}, "fmt=e5m2"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size=\[128\]: give two whole numbers"),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype='fp4'"),
        ("fp8", "is not an object"),
        ({}, "quantisation 'unnamed'"),
    ],
)
def test_a_method_is_read_strictly(config: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=words):
        read_scheme(tmp_path, {"quantization_config": config})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("transform_config", {"config_groups": {"R1": {}}}, "transform_config="),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config="),
        ("quantization_status", "frozen", "quantization_status='frozen'"),
        ("format", "nvfp4-pack-quantized", "format=nvfp4-pack-quantized"),
    ],
)
def test_compressed_tensors_that_need_more_are_refused(key: str, value: Any, words: str) -> None:
    raw = json.loads((RECORDED / "fp8_channel" / "config.json").read_text())
    raw["quantization_config"][key] = value
    with pytest.raises(ModelLoadError, match=words):
        read_scheme(RECORDED, raw)


def test_a_fingerprint_follows_the_scheme(tmp_path: Path) -> None:
    """Blocks of 40 and of 32 give a weight of 48 columns the same number of scales, and other numbers."""
    save(reference_model("Llama"), tmp_path)

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.self_attn.q_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    changed_tensors(tmp_path, quantise)
    found = set()
    for block in (32, 40):
        change(tmp_path, quantization_config={**FP8, "weight_block_size": [block, block]})
        files = ModelFiles("m", "hf", tmp_path)
        found.add(load_model(files, "float32", "cpu", TorchOps(), cache_dir=tmp_path / "cache").fingerprint)
    assert len(found) == 2
