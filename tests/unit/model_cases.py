"""A tiny model for each row of the table in docs/models.md. Not a test itself.

`CASES[what, case](folder)` makes the files and gives (files, reference): a transformers model that computes
the same, a check to run instead, or None if loading is to be refused.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from gguf_models import GT, WIDE, write_gguf
from safetensors.torch import load_file, save_file
from text_models import metadata
from tiny_models import reference_model, save
from tokenizers import decoders, models, normalizers, pre_tokenizers

from hotprefix.engine.model.files import ModelFiles
from hotprefix.engine.text.tokenizer import Tokenizer

Made = tuple[ModelFiles, Any]
Build = Callable[[Path], Made]
RECORDED = Path(__file__).parents[1] / "data" / "compressed_tensors"
CASES: dict[tuple[str, str], Build] = {}
WINDOW = {"use_sliding_window": True, "sliding_window": 7}


def case(what: str, name: str) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        assert (what, name) not in CASES
        CASES[what, name] = build
        return build

    return add


def change(folder: Path, **keys: Any) -> ModelFiles:
    """The directory with other keys in its config.json; None removes one."""
    file = folder / "config.json"
    raw = {**json.loads(file.read_text()), **keys}
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return ModelFiles(folder.name, "hf", folder)


def changed_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> ModelFiles:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return ModelFiles(folder.name, "hf", folder)


def plain(what: str, name: str, family: str, **options: Any) -> None:
    """A row that loads: transformers' own file of a model with these options."""

    def build(folder: Path) -> Made:
        model = reference_model(family, **options)
        return save(model, folder), model

    case(what, name)(build)


def refused(what: str, name: str, **keys: Any) -> None:
    """A row that is refused for these keys of config.json."""
    case(what, name)(lambda folder: (save_and_change(folder, keys), None))


def save_and_change(folder: Path, keys: dict[str, Any]) -> ModelFiles:
    save(reference_model("Llama"), folder)
    return change(folder, **keys)


# -- architecture, attention --------------------------------------------------------------------------------

_BIASED = {"attention_bias": True, "mlp_bias": True}
plain("architecture", "`LlamaForCausalLM` (Llama 2 and 3, SmolLM 1 and 2, R1 distills)", "Llama")
plain("architecture", "`LlamaForCausalLM` with `attention_bias` and `mlp_bias`", "Llama", **_BIASED)
plain("architecture", "`MistralForCausalLM`", "Mistral", sliding_window=None, head_dim=16)
plain("architecture", "`Qwen2ForCausalLM` (Qwen2, Qwen2.5, R1 distills)", "Qwen2")
plain("architecture", "`Qwen3ForCausalLM`", "Qwen3", head_dim=8)
plain(
    "architecture", "`Qwen3ForCausalLM` with `attention_bias` and another `head_dim`", "Qwen3",
    head_dim=16, attention_bias=True,
)  # fmt: skip
plain("architecture", "`SmolLM3ForCausalLM`", "SmolLM3", num_hidden_layers=5)
refused(
    "architecture", "any other, for example `Gemma2ForCausalLM`",
    architectures=["Gemma2ForCausalLM"], model_type="gemma2",
)  # fmt: skip
refused(
    "architecture", "mixtures of experts, for example `Qwen3MoeForCausalLM`",
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe",
)  # fmt: skip
refused("architecture", "a model that brings its own code (`auto_map`)", auto_map={"AutoModel": "own.Model"})
refused("architecture", "`hidden_act` other than silu", hidden_act="gelu")

plain("attention", "a window in every layer (`MistralForCausalLM`)", "Mistral", sliding_window=7)
plain(
    "attention", "windows by `layer_types`", "Qwen3", head_dim=8, **WINDOW,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)  # fmt: skip
plain("attention", "windows from `max_window_layers` on", "Qwen2", max_window_layers=1, **WINDOW)
plain(
    "attention", "windows in the layers that do not rotate (`SmolLM3ForCausalLM`)", "SmolLM3",
    no_rope_layers=[1, 0, 1], **WINDOW,
)  # fmt: skip
plain("attention", "layers without rotation by `no_rope_layers`", "SmolLM3", no_rope_layers=[0, 1, 0])
refused("attention", "chunked or other `layer_types`", layer_types=["chunked_attention"] * 3)
refused("attention", "a window in `LlamaForCausalLM`", sliding_window=7)


# -- output head --------------------------------------------------------------------------------------------


@case("output head", "tied to the embedding, absent from the file")
def _tied(folder: Path) -> Made:
    model = reference_model("Llama", tie_word_embeddings=True)
    files = save(model, folder)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    return files, model


@case("output head", "tied to the embedding, the same one in the file")
def _tied_twice(folder: Path) -> Made:
    files, model = _tied(folder)
    changed_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    return files, model


@case("output head", "tied to the embedding, a different one in the file")
def _own_though_tied(folder: Path) -> Made:
    model = reference_model("Llama")
    save(model, folder)
    return change(folder, tie_word_embeddings=True), model


@case("output head", "not tied, absent from the file")
def _absent_though_untied(folder: Path) -> Made:
    _, model = _tied(folder)
    return change(folder, tie_word_embeddings=False), model


# -- rope ---------------------------------------------------------------------------------------------------


def _rope_config(**keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **keys}}


def rope(name: str, **keys: Any) -> None:
    plain("rope", name, "Llama", **_rope_config(**keys))


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
_HALF_YARN = (0.1 * math.log(4.0) + 1.0) * 0.5
rope("`default`", rope_type="default")
rope("`linear`", rope_type="linear", factor=4.0)
rope(
    "`llama3`", rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
rope("`yarn`", **_YARN)
rope("`yarn` with `truncate: false`", **_YARN, truncate=False)
rope("`yarn` with `mscale` and `mscale_all_dim`", **_YARN, mscale=2.0, mscale_all_dim=0.5)
rope(
    "`yarn` with `attention_factor`, `beta_fast`, `beta_slow`", **_YARN, attention_factor=0.7,
    beta_fast=4.0, beta_slow=2.0,
)  # fmt: skip


@case("rope", "`yarn` with `attn_factor`, which multiplies yarn's own factor")
def _attn_factor(folder: Path) -> Made:
    """transformers says the product in its own key; the formula is the paper's."""
    model = reference_model("Llama", **_rope_config(**_YARN, attention_factor=_HALF_YARN))
    save(model, folder)
    old = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {**_YARN, "attn_factor": 0.5}}
    return change(folder, **old), model


refused("rope", "`dynamic`", rope_parameters={"rope_type": "dynamic", "factor": 2.0})
refused(
    "rope", "`longrope`",
    rope_parameters={"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
)  # fmt: skip
refused("rope", "part of each head (`partial_rotary_factor`)", partial_rotary_factor=0.5)
refused(
    "rope", "a key that the named kind does not use",
    rope_parameters={"rope_type": "linear", "factor": 2.0, "beta_fast": 32},
)  # fmt: skip


# -- GGUF ---------------------------------------------------------------------------------------------------


def as_gguf(what: str, name: str, family: str = "Llama", loads: bool = True, **options: Any) -> None:
    """A row about a GGUF file; options: of `write_gguf`, and `config` of the transformers model."""

    def build(folder: Path) -> Made:
        folder.mkdir(exist_ok=True)
        rest = dict(options)
        model = reference_model(family, **{**WIDE, **rest.pop("config", {})})
        path = write_gguf(model, folder / "m.gguf", **rest)
        return ModelFiles("m", "gguf", path), model if loads else None

    case(what, name)(build)


_TYPE, _FACTOR = "rope.scaling.type", "rope.scaling.factor"
as_gguf("architecture", "GGUF `llama`")
as_gguf("architecture", "GGUF `qwen2`", "Qwen2", architecture="qwen2")
as_gguf("architecture", "GGUF `qwen3`", "Qwen3", architecture="qwen3", config={"head_dim": 32})
as_gguf("architecture", "GGUF `smollm3`", "SmolLM3", architecture="smollm3", config={"num_hidden_layers": 5})
as_gguf("architecture", "GGUF, any other, for example `gemma2`", architecture="gemma2", loads=False)
as_gguf(
    "rope", "GGUF `linear`, and a factor without a type", keys={_FACTOR: 4.0},
    config=_rope_config(rope_type="linear", factor=4.0),
)  # fmt: skip
as_gguf(
    "rope", "GGUF `yarn` with beta and attention factors",
    keys={
        _TYPE: "yarn", _FACTOR: 4.0, "rope.scaling.original_context_length": 256,
        "rope.scaling.attn_factor": 0.5, "rope.scaling.yarn_ext_factor": 1.0,
        "rope.scaling.yarn_beta_fast": 4.0, "rope.scaling.yarn_beta_slow": 2.0,
    },
    config=_rope_config(**_YARN, attention_factor=_HALF_YARN, beta_fast=4.0, beta_slow=2.0),
)  # fmt: skip
as_gguf(
    "rope", "GGUF `rope_freqs.weight`", extra={"rope_freqs.weight": np.full(8, 4.0, np.float32)},
    config=_rope_config(rope_type="linear", factor=4.0),
)  # fmt: skip
as_gguf("rope", "GGUF `longrope`", keys={_TYPE: "longrope", _FACTOR: 4.0}, loads=False)
as_gguf("rope", "GGUF, part of each head", keys={"rope.dimension_count": 8}, loads=False)
as_gguf("dtype", "GGUF F32, F16, BF16", kinds=(GT.F32, GT.F16, GT.BF16))
as_gguf("dtype", "GGUF Q4_0, Q4_1, Q5_0, Q5_1, Q8_0", kinds=(GT.Q4_0, GT.Q4_1, GT.Q5_0, GT.Q5_1, GT.Q8_0))
as_gguf(
    "dtype", "GGUF K-quants, for example Q4_K and Q6_K", kinds=(GT.Q4_K, GT.Q6_K),
    config={"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2},
)  # fmt: skip
as_gguf(
    "dtype", "GGUF integers", loads=False, config={"tie_word_embeddings": True},
    extra={"output.weight": np.ones((151, 64), np.int32)},
)  # fmt: skip
as_gguf("files", "a split GGUF file, given by its first part", split=9)
as_gguf(
    "files", "GGUF, a tensor that the architecture does not have", loads=False,
    extra={"blk.0.ffn_gate_inp.weight": np.ones((4, 64), np.float32)},
)  # fmt: skip


@case("files", "a split GGUF file, given by another part")
def _second_part(folder: Path) -> Made:
    files, _ = CASES["files", "a split GGUF file, given by its first part"](folder)
    return ModelFiles("m", "gguf", files.path.with_name(files.path.name.replace("-00001-", "-00002-"))), None


@case("files", "a split GGUF file, a part absent")
def _absent_part(folder: Path) -> Made:
    folder.mkdir(exist_ok=True)
    path = write_gguf(reference_model("Llama", **WIDE), folder / "m.gguf", split=20)
    sorted(folder.glob("*-of-*"))[-1].unlink()
    return ModelFiles("m", "gguf", path), None


# -- dtype, files -------------------------------------------------------------------------------------------


def stored_as(name: str, dtype: torch.dtype) -> None:
    def build(folder: Path) -> Made:
        model = reference_model("Llama")
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype).float()
        save(model, folder)
        tensors = load_file(folder / "model.safetensors").items()
        return changed_tensors(folder, lambda t: t.update({n: v.to(dtype) for n, v in tensors})), model

    case("dtype", name)(build)


stored_as("F32", torch.float32)
stored_as("F16", torch.float16)
stored_as("BF16", torch.bfloat16)


@case("dtype", "F64, integers, and 8-bit floats without a `quantization_config`")
def _unexplained(folder: Path) -> Made:
    save(reference_model("Llama"), folder)
    name = "model.layers.1.mlp.up_proj.weight"
    return changed_tensors(folder, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)})), None


@case("files", "`model.safetensors` beside other safetensors files")
def _beside(folder: Path) -> Made:
    model = reference_model("Llama")
    files = save(model, folder)
    other = {name: tensor.clone() * 2 for name, tensor in model.state_dict().items()}
    save_file(other, folder / "zz-other.safetensors")
    return files, model


@case("files", "shards with their index")
def _sharded(folder: Path) -> Made:
    model = reference_model("Llama")
    return save(model, folder, max_shard_size="30KB"), model


@case("files", "shards without an index")
def _lost_index(folder: Path) -> Made:
    files, model = _sharded(folder)
    (folder / "model.safetensors.index.json").unlink()
    return files, model


@case("files", "a tensor in two files")
def _twice(folder: Path) -> Made:
    files, _ = _sharded(folder)
    index = folder / "model.safetensors.index.json"
    where = json.loads(index.read_text())
    shutil.copy(folder / min(where["weight_map"].values()), folder / "copy.safetensors")
    where["weight_map"]["a.name.it.does.not.hold"] = "copy.safetensors"
    index.write_text(json.dumps(where))
    return files, None


@case("files", "`model.safetensors` and an index of other files")
def _two_sets(folder: Path) -> Made:
    files, _ = _sharded(folder)
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    return files, None


@case("files", "a tensor that the config has no place for")
def _unused(folder: Path) -> Made:
    save(reference_model("Llama", attention_bias=True), folder)
    return change(folder, attention_bias=False), None


@case("files", "a tensor of another shape than the config says")
def _misshapen(folder: Path) -> Made:
    return save_and_change(folder, {"intermediate_size": 88}), None


@case("files", "other weight formats, for example `pytorch_model.bin`")
def _pickled(folder: Path) -> Made:
    files = save(reference_model("Llama"), folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return files, None


# -- quantisation -------------------------------------------------------------------------------------------


def quantised(folder: Path, method: dict[str, Any], block: tuple[int, int] | None, end: str) -> Made:
    """A checkpoint quantised element by element, and transformers' model of the dequantised weights."""
    model = reference_model("Qwen3", head_dim=8)
    save(model, folder)

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if "_proj." in n]:
            weight = tensors[name]
            rows, columns = block or weight.shape
            scales = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
            values = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
            for i in range(weight.shape[0]):
                for j in range(weight.shape[1]):
                    corner = weight[i // rows * rows :][:rows, j // columns * columns :][:, :columns]
                    scale = scales[i // rows, j // columns] = corner.abs().max() / 448
                    values[i, j] = weight[i, j] / scale
                    weight[i, j] = values[i, j].float() * scale
            model.get_parameter(name).data.copy_(weight)
            tensors[name] = values
            tensors[name.replace("weight", end)] = scales if block else scales.reshape(())

    changed_tensors(folder, quantise)
    return change(folder, quantization_config=method), model


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


@case("quantisation", "`fp8`, a scale for each block (DeepSeek, Qwen3-FP8)")
def _fp8_blocks(folder: Path) -> Made:
    return quantised(folder, {**_FP8, "weight_block_size": [32, 32]}, (32, 32), "weight_scale_inv")


@case("quantisation", "`fp8`, one scale for a weight")
def _fp8_tensor(folder: Path) -> Made:
    files, model = quantised(folder, {**_FP8, "activation_scheme": "static"}, None, "weight_scale")
    changed_tensors(folder, lambda t: t.update({"model.layers.0.mlp.up_proj.input_scale": torch.tensor(0.5)}))
    return files, model


def recorded(name: str, folder_name: str) -> None:
    """What compressed-tensors wrote, against what it read back itself, computed by transformers."""

    def build(folder: Path) -> Made:
        shutil.copytree(RECORDED / folder_name, folder)
        raw = json.loads((folder / "config.json").read_text())
        (folder / "decompressed.safetensors").unlink()
        raw.pop("quantization_config")
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**raw, attn_implementation="eager"))
        model.load_state_dict(load_file(RECORDED / folder_name / "decompressed.safetensors"))
        return ModelFiles(folder_name, "hf", folder), model.float().eval()

    case("quantisation", f"`compressed-tensors`, {name}")(build)


recorded("INT8, a scale for each row (W8A8)", "int8_channel")
recorded("FP8, a scale for each row", "fp8_channel")
recorded("FP8, one scale for a weight", "fp8_tensor")
recorded("FP8, a scale for each block", "fp8_block")


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    args = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": args, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    }  # fmt: skip


def method(name: str, **keys: Any) -> None:
    refused("quantisation", name, **keys)


method(
    "`compressed-tensors`, packed 4-bit",
    quantization_config=_compressed("pack-quantized", num_bits=4, strategy="group", group_size=128),
)
method(
    "`compressed-tensors`, with zero points",
    quantization_config=_compressed("int-quantized", symmetric=False),
)
method("`gptq`", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
method("`awq`", quantization_config={"quant_method": "awq", "bits": 4, "version": "gemm"})
method("`bitsandbytes`", quantization_config={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
method(
    "`fbgemm_fp8`, `torchao`, `mxfp4`, `hqq` and any other method",
    quantization_config={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
)
method("MLX (`quantization`)", quantization={"group_size": 64, "bits": 4})


@case("quantisation", "ModelOpt (`hf_quant_config.json`)")
def _modelopt(folder: Path) -> Made:
    files = save(reference_model("Llama"), folder)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    return files, None


# -- tokenizer ----------------------------------------------------------------------------------------------

_PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    "▁",
    "a",
    "b",
    "▁a",
    "ab",
    "▁ab",
    *(f"<0x{byte:02X}>" for byte in range(256)),
]
_TEXTS = ("ab ba", " a  b", "é b", "<s>ab")


def bpe(folder: Path, tokenizer: tokenizers.Tokenizer) -> Made:
    """Ids equal the library's own, which has no added tokens in these texts' plain parts."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "added_tokens_decoder": {"2": {"content": "</s>", "special": True}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    def check() -> None:
        ours = Tokenizer.load(folder)
        for text in _TEXTS:
            ids = ours.encode(text)
            assert ids == tokenizer.encode(text, add_special_tokens=False).ids
            assert ours.decode(ids) == tokenizer.decode(ids)

    return ModelFiles("t", "hf", folder), check


@case("tokenizer", "`tokenizer.json`, BPE over bytes")
def _bytes(folder: Path) -> Made:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", *alphabet, "ab", "Ġa"])}
    own = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("Ġ", "a")]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    return bpe(folder, own)


@case("tokenizer", "`tokenizer.json`, SentencePiece BPE (Metaspace, or the older Prepend)")
def _pieces(folder: Path) -> Made:
    checks = []
    for older in (False, True):
        vocab = {piece: i for i, piece in enumerate(_PIECES)}
        merges = [("a", "b"), ("▁", "a"), ("▁", "ab")]
        own = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
        parts = [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
        own.decoder = decoders.Sequence(parts)
        if older:
            blanks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            own.normalizer = normalizers.Sequence(blanks)
        else:
            own.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        checks.append(bpe(folder / str(older), own) if folder.mkdir(exist_ok=True) is None else None)
    return checks[0][0], lambda: [check() for _, check in checks]


def write_metadata(folder: Path, keys: dict[str, Any]) -> ModelFiles:
    folder.mkdir(exist_ok=True)
    out = gguf.GGUFWriter(str(folder / "t.gguf"), "llama")
    for key, value in keys.items():
        add = {
            str: out.add_string, int: out.add_uint32, float: out.add_float32, bool: out.add_bool,
            list: out.add_array,
        }[type(value)]  # fmt: skip
        if value != []:
            add(key, value)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.close()
    return ModelFiles("t", "gguf", folder / "t.gguf")


@case("tokenizer", "GGUF `gpt2`")
def _gguf_bytes(folder: Path) -> Made:
    keys = metadata(["<s>", "</s>"])
    keys["tokenizer.ggml.tokens"].append("ab")
    keys["tokenizer.ggml.token_type"].append(1)
    files = write_metadata(folder, {**keys, "tokenizer.ggml.merges": ["a b"]})

    def check() -> None:
        ours = Tokenizer.load(files.path)
        assert ours.encode("cab") == [ord("c"), 258]
        assert ours.decode([258, 257]) == "ab"

    return files, check


def _sentence_pieces(model: str) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": model, "tokenizer.ggml.tokens": _PIECES,
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 6, *[6] * 256],
        "tokenizer.ggml.scores": [0.0] * 3 + [-float(i) for i in (9, 8, 7, 2, 1, 3)] + [0.0] * 256,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip


@case("tokenizer", "GGUF `llama`")
def _gguf_pieces(folder: Path) -> Made:
    files = write_metadata(folder, _sentence_pieces("llama"))

    def check() -> None:
        ours = Tokenizer.load(files.path)
        assert ours.encode("ab b") == [8, 3, 5]
        assert ours.decode([8, 3, 5]) == "ab b"

    return files, check


@case("tokenizer", "GGUF, any other, for example `bert`")
def _gguf_other(folder: Path) -> Made:
    return write_metadata(folder, _sentence_pieces("bert")), None


@case("tokenizer", "`tokenizer.json`, Unigram or WordPiece")
def _unigram(folder: Path) -> Made:
    own = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    return bpe(folder, own)[0], None


@case("tokenizer", "`tokenizer.model` alone")
def _model_alone(folder: Path) -> Made:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(b"\n")
    return ModelFiles("t", "hf", folder), None
