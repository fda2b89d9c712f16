"""Configuration keys: those of published models are read; a key that is not read is refused by name and
value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from published_configs import PUBLISHED

from hotprefix.engine.model.files import ModelFiles
from hotprefix.engine.model.gguf_config import from_gguf
from hotprefix.engine.model.hf_config import HF_FAMILIES, from_hf
from hotprefix.engine.model.loader import load_model
from hotprefix.engine.model.quantised import read_scheme
from hotprefix.engine.model.strict_fields import Fields
from hotprefix.errors import ModelLoadError

CLASSES = {
    "LlamaForCausalLM": "LlamaConfig", "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config", "Qwen3ForCausalLM": "Qwen3Config",
    "SmolLM3ForCausalLM": "SmolLM3Config",
}  # fmt: skip
SIZES = {
    "vocab_size": 100, "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 30,
    "num_attention_heads": 32,
}  # fmt: skip
GGUF = {
    "general.architecture": "llama", "llama.vocab_size": 100, "llama.embedding_length": 64,
    "llama.feed_forward_length": 96, "llama.block_count": 4, "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-6, "llama.context_length": 256,
}  # fmt: skip


def small(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SIZES, **changes}


def reference(architecture: str, raw: dict[str, Any]) -> Any:
    config_class = getattr(transformers, CLASSES[architecture])
    return config_class(**{k: v for k, v in raw.items() if k != "quantization_config"})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    raw = PUBLISHED[name]
    ours, theirs = from_hf(raw), reference(raw["architectures"][0], raw)
    read_scheme(tmp_path, raw)
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", ours.hidden_size // ours.heads)
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    rope = theirs.rope_parameters
    assert (ours.rope.kind, ours.rope.theta) == (rope["rope_type"], rope["rope_theta"])
    assert ours.rope.factor == rope.get("factor", 1.0)
    windows = ours.family == "mistral" and theirs.sliding_window
    assert set(ours.windows) == {windows or None}


@pytest.mark.parametrize("architecture", HF_FAMILIES)
def test_a_missing_key_means_what_the_configuration_class_means(architecture: str) -> None:
    """For each family, our value for a missing key is the one that transformers fills in."""
    ours = from_hf(small(architecture))
    theirs = getattr(transformers, CLASSES[architecture])(**SIZES)
    whole = from_hf({**theirs.to_dict(), "architectures": [architecture]})
    assert ours == whole
    assert whole.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("architecture", HF_FAMILIES)
@pytest.mark.parametrize(
    "options", [{}, {"use_sliding_window": True, "sliding_window": 8}], ids=["plain", "windows"]
)
def test_every_key_that_transformers_writes_is_known(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    if options and not hasattr(getattr(transformers, CLASSES[architecture])(), "use_sliding_window"):
        pytest.skip("the family has no such switch")
    config = getattr(transformers, CLASSES[architecture])(**SIZES, **options, architectures=[architecture])
    config.save_pretrained(tmp_path)
    written = from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert written == from_hf(json.loads(json.dumps(config.to_dict())))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * 30
    window = 8 if options else getattr(config, "sliding_window", None)
    sees = ["full_attention" if w is None else "sliding_attention" for w in written.windows]
    assert sees == (kinds if architecture != "MistralForCausalLM" else ["sliding_attention"] * 30)
    assert {w for w in written.windows if w is not None} <= {window}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"embedding_scale_power": 3}, r"embedding_scale_power=3.*does not know"),
        ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, r"auto_map=.*remove it if it does not"),
        ({"residual_multiplier": 0.22}, r"residual_multiplier=0.22 is not supported, only 1.0"),
        ({"rope_interleaved": True}, r"rope_interleaved=True is not supported, only False"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config"),
        ({"attention_bias": 1}, "attention_bias=1: give true or false"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers='4': give a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True: give a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: give a finite number"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"rope_theta": "1e6"}, "rope_theta='1e6': give a finite number"),
        ({"model_type": "mistral"}, r"LlamaForCausalLM.*model_type 'mistral'"),
        ({"architectures": ["LlamaForCausalLM", "X"]}, "not supported; supported"),
        ({"layer_types": ["full_attention"] * 29}, "29 entries for num_hidden_layers=30"),
        ({"layer_types": ["chunked_attention"] * 30}, "chunked_attention"),
        ({"sliding_window": 8}, "sliding_window=8 with architecture LlamaForCausalLM"),
        ({"rope_scaling": [1]}, r"rope_scaling: \[1\] is not an object"),
        ({"no_rope_layers": [1] * 30}, "no_rope_layers="),
    ],
)  # fmt: skip
def test_what_nobody_reads_is_refused_by_name_and_value(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        from_hf(small(**changes))


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("MistralForCausalLM", {"attention_bias": True}, "attention_bias=True"),
        ("MistralForCausalLM", {"layer_types": ["full_attention"] * 30}, "in every layer"),
        ("Qwen2ForCausalLM", {"mlp_bias": True}, "mlp_bias=True"),
        ("Qwen3ForCausalLM", {"layer_types": ["sliding_attention"] * 30}, "no window is switched on"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1] * 29}, "no_rope_layers="),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0"),
    ],
)  # fmt: skip
def test_a_key_is_known_by_family(architecture: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        from_hf(small(architecture, **changes))


def test_qwen_s_windows_begin_where_transformers_begins_them() -> None:
    raw = small("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=8)
    assert from_hf(raw).windows == (None,) * 28 + (8, 8)
    kinds = transformers.Qwen2Config(**{k: v for k, v in raw.items() if k != "architectures"}).layer_types
    assert [kind == "sliding_attention" for kind in kinds] == [False] * 28 + [True] * 2


def test_smollm3_has_its_windows_where_it_does_not_rotate() -> None:
    raw = small("SmolLM3ForCausalLM", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    assert from_hf(raw).windows == tuple(8 if (i + 1) % 4 == 0 else None for i in range(30))
    longer = small("SmolLM3ForCausalLM", no_rope_layers=[0, 1] * 40)
    assert from_hf(longer).rope_layers == (False, True) * 15


def test_a_key_that_occurs_twice_is_an_error(tmp_path: Path) -> None:
    text = json.dumps(small())
    (tmp_path / "config.json").write_text(text[:-1] + ', "rope_theta": 1.0, "rope_theta": 2.0}')
    with pytest.raises(ModelLoadError, match="'rope_theta' occurs twice"):
        load_model(ModelFiles("m", "hf", tmp_path), "float32", "cpu", cache_dir=tmp_path)


def test_more_unknown_keys_than_fit_are_counted() -> None:
    fields = Fields({f"k{i}": i for i in range(9)} | {"long": "x" * 999, "none": None}, "a file")
    assert fields.get("k0") == 0
    with pytest.raises(ModelLoadError, match=r"a file: k1=1, k2=2, k3=3 and 6 more: ") as caught:
        fields.finish()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"llama.expert_count": 8}, "expert_count=8 is not supported, only 0"),
        ({"llama.logit_scale": 0.5}, "logit_scale=0.5"),
        ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"llama.attention.scale": 0.1}, "attention.scale=0.1.*does not know"),
        ({"llama.attention.causal": False}, "attention.causal=False"),
        ({"llama.attention.value_length": 8}, "attention.value_length=8"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count=8"),
        ({"llama.rope.scaling.yarn_attn_factor": 0.9}, "yarn_attn_factor=0.9"),
        ({"llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor=0.5"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier=0.1"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.dimension_sections": [1, 1]}, "dimension_sections=1.*does not know"),
        ({"llama.attention.head_count_kv": [2, 2, 2, 4]}, "varies by layer"),
        ({"llama.tensor_data_layout": "other"}, "tensor_data_layout='other'"),
        ({"general.type": "adapter"}, "general.type='adapter'"),
        ({"llama.block_count": "4"}, "block_count='4'"),
    ],
)  # fmt: skip
def test_gguf_keys_that_change_numbers_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        from_gguf({**GGUF, **changes}, ())


def test_gguf_keys_that_change_nothing_are_accepted() -> None:
    plain = from_gguf(GGUF, ())
    more: dict[str, Any] = {
        "general.name": "x", "general.file_type": 7, "mradermacher.quantized_by": "x",
        "quantize.imatrix.file": "x", "tokenizer.ggml.pre": "x",
        "llama.expert_count": 0, "llama.attention.head_count_kv": [4] * 4, "llama.attention.value_length": 16,
        "llama.rope.scaling.finetuned": True, "llama.tensor_data_layout": "Meta AI original pth",
        "llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0,
    }  # fmt: skip
    assert from_gguf({**GGUF, **more}, ()) == plain


ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2.5, float("nan"), float("inf"), "", "x", [], [1], ["x"], [{}], [None] * 30,
    {}, {"x": 1}, {"rope_type": "yarn"}, {"rope_type": {}}, {"type": []},
    {"rope_type": "llama3", "factor": []},
)  # fmt: skip


@pytest.mark.parametrize("name", ["Llama-3.1-8B-Instruct", "Qwen2.5-7B-Instruct, long texts", "SmolLM3-3B"])
def test_any_value_of_any_key_is_read_or_refused(name: str) -> None:
    """The reader raises nothing but ModelLoadError, whatever the file holds."""
    raw = PUBLISHED[name]
    refused_at = 0
    for key in [*raw, "layer_types", "rope_parameters", "sliding_window", "head_dim", "no_rope_layers"]:
        for value in ODD:
            try:
                from_hf({**raw, key: value})
            except ModelLoadError:
                refused_at += 1
    for key in [*(raw["rope_scaling"] or {}), "beta_fast", "truncate", "mscale", "attn_factor", "rope_theta"]:
        for value in ODD:
            try:
                from_hf({**raw, "rope_scaling": {**(raw["rope_scaling"] or {}), key: value}})
            except ModelLoadError:
                refused_at += 1
    assert refused_at > 200


def test_any_value_of_any_quantisation_key_is_read_or_refused(tmp_path: Path) -> None:
    config = PUBLISHED["Llama-3.1-8B-Instruct-quantized.w8a8"]["quantization_config"]
    group = config["config_groups"]["group_0"]
    changed = [{**config, key: value} for key in [*config, "sparsity_config"] for value in ODD]
    for key in group:
        changed += [{**config, "config_groups": {"group_0": {**group, key: value}}} for value in ODD]
    for key in group["weights"]:
        weights = [{**group["weights"], key: value} for value in ODD]
        changed += [{**config, "config_groups": {"g": {**group, "weights": each}}} for each in weights]
    refused_at = 0
    for each in changed:
        try:
            read_scheme(tmp_path, {"quantization_config": each})
        except ModelLoadError:
            refused_at += 1
    assert refused_at > 200


def test_any_value_of_any_gguf_key_is_read_or_refused() -> None:
    refused_at = 0
    for key in [*GGUF, "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.attention.key_length"]:
        for value in ODD:
            try:
                from_gguf({**GGUF, key: value}, ())
            except ModelLoadError:
                refused_at += 1
    assert refused_at > 100
