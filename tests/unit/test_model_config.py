"""ModelConfig from both kinds of files: equal if they describe one model, refused if it cannot be
computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hotprefix.engine.model.config import ModelConfig, RopeConfig
from hotprefix.engine.model.gguf_config import from_gguf
from hotprefix.engine.model.hf_config import from_hf
from hotprefix.engine.model.rope import RopeTable
from hotprefix.errors import ModelLoadError

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.vocab_size": 100,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 4,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.context_length": 256,
}


def hf(**changes: Any) -> ModelConfig:
    return from_hf({**BASE, **changes})


def test_both_readers_agree_on_one_model() -> None:
    assert from_gguf(GGUF, {"lm_head.weight"}) == hf()


def test_head_dim_may_differ_from_hidden_over_heads() -> None:
    assert hf().head_dim == 16
    assert hf(head_dim=32).shape.qkv_width == (4 + 2 * 2) * 32


def test_unsupported_architecture_names_itself_and_the_supported_ones() -> None:
    with pytest.raises(ModelLoadError, match=r"GPT2LMHeadModel.*Qwen3ForCausalLM"):
        hf(architectures=["GPT2LMHeadModel"])
    with pytest.raises(ModelLoadError, match=r"'mamba'.*llama"):
        from_gguf({"general.architecture": "mamba"}, ())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "layers"),
    ],
)
def test_what_cannot_be_computed_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        hf(**changes)


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 256}, (None,) * 4),
        ("MistralForCausalLM", {}, (4096,) * 4),
        ("MistralForCausalLM", {"sliding_window": 8}, (8,) * 4),
        ("MistralForCausalLM", {"sliding_window": None}, (None,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (None,) * 4),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
    ],
)
def test_attention_windows_by_layer(
    architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert hf(architectures=[architecture], **changes).windows == windows


def test_family_specific_parts() -> None:
    assert hf(architectures=["Qwen2ForCausalLM"]).qkv_bias
    assert not hf(architectures=["Qwen2ForCausalLM"]).output_bias
    assert hf(architectures=["Qwen3ForCausalLM"]).qk_norm
    smol = hf(architectures=["SmolLM3ForCausalLM"])
    assert smol.rope_layers == (True, True, True, False)
    assert smol.tied_embeddings


ROPES = [
    {"rope_type": "default", "rope_theta": 5000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    {
        "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=[str(r["rope_type"]) for r in ROPES])
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_rope_tables_equal_transformers(rope: dict[str, Any], spelling: str) -> None:
    given = {**BASE, "head_dim": 64, spelling: rope, "rope_theta": rope["rope_theta"]}
    ours = RopeTable(from_hf(given).rope, 64, torch.device("cpu"), None)
    theirs = transformers.LlamaConfig(**{**BASE, "head_dim": 64, "rope_parameters": dict(rope)})
    if rope["rope_type"] == "default":
        inverse, scale = 1.0 / (rope["rope_theta"] ** (torch.arange(0, 64, 2).float() / 64)), 1.0
    else:
        inverse, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu")
    positions = torch.arange(0, 256, 5, dtype=torch.int32)
    cos, sin = ours(positions)
    angles = positions.float()[:, None] * inverse
    torch.testing.assert_close(cos, angles.cos() * scale, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sin, angles.sin() * scale, atol=1e-5, rtol=1e-5)


def test_divisors_of_a_gguf_file_slow_the_rotation() -> None:
    plain = RopeTable(RopeConfig(), 8, torch.device("cpu"), None)
    slowed = RopeTable(RopeConfig(), 8, torch.device("cpu"), torch.full((4,), 2.0))
    even = torch.tensor([2, 4, 10], dtype=torch.int32)
    torch.testing.assert_close(slowed(even)[0], plain(even // 2)[0])
