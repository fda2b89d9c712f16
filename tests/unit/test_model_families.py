"""Every supported family against transformers on small random float32 models: tokens and logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Sequencer, executor_for, load_like, make_ops, one_thread, reference_model, run, save

from hotprefix.engine.model.loader import load_model
from hotprefix.engine.model.torch_ops import TorchOps
from hotprefix.errors import ModelLoadError

PROMPT_TOKENS, OUTPUTS, PAGES, PAGE = 37, 16, 64, 4
# Random logits of these models spread over +-30; sums in another order differ by < 1e-4 in float32.
TOLERANCE = 2e-4
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied, biased, one head group": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6},
    ),
    "llama3 rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2 window in upper layers": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral window": ("Mistral", {"sliding_window": 7}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["torch", "native"])
def test_greedy_tokens_and_logits(kind: str, name: str, tmp_path: Path) -> None:
    family, options = FAMILIES[name]
    model = reference_model(family, **options)
    loaded = load_like(model, tmp_path, make_ops(kind))
    prompt = torch.randint(2, 151, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(2))
    expected = model.generate(prompt[None], max_new_tokens=OUTPUTS, do_sample=False, eos_token_id=None)
    executor, sampler = executor_for(loaded, PAGES, PAGE)
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(5)).tolist()
    got = run(executor, Sequencer("a", 0, prompt.tolist(), pages, PAGE), OUTPUTS, chunk=11)
    assert got == expected[0, PROMPT_TOKENS:].tolist()
    with torch.inference_mode():
        logits = model(expected[:, :-1]).logits[0, PROMPT_TOKENS - 1 :]
    torch.testing.assert_close(torch.cat(sampler.logits), logits, atol=TOLERANCE, rtol=0)


def test_sharded_directory_equals_single_file(tmp_path: Path) -> None:
    model = reference_model("Llama")
    single = load_like(model, tmp_path / "one", TorchOps())
    files = save(model, tmp_path / "many", max_shard_size="30KB")
    assert len(list(files.path.glob("*.safetensors"))) > 2
    sharded = load_model(files, "float32", "cpu", TorchOps(), cache_dir=tmp_path / "cache")
    tokens = []
    for loaded in (single, sharded):
        executor, _ = executor_for(loaded, PAGES, PAGE)
        tokens.append(run(executor, Sequencer("a", 0, range(5, 20), range(PAGES), PAGE), 8, chunk=99))
    assert tokens[0] == tokens[1]
    next(iter(files.path.glob("model-00002*"))).unlink()
    with pytest.raises(ModelLoadError, match="model-00002"):
        load_model(files, "float32", "cpu", TorchOps(), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_bfloat16_logits_stay_near_float32(kind: str, tmp_path: Path) -> None:
    """bfloat16 has 8 bits of precision: after 3 layers no logit is off by 0.15 of the logits' standard
    deviation."""
    model = reference_model("Llama", initializer_range=0.2)
    save(model, tmp_path)
    found = []
    for dtype in ("float32", "bfloat16"):
        executor, sampler = executor_for(load_like(model, tmp_path, make_ops(kind), dtype), PAGES, PAGE)
        run(executor, Sequencer("a", 0, range(5, 42), range(PAGES), PAGE), 1, chunk=10)
        found.append(sampler.logits[0])
    spread = found[0].std()
    assert float((found[0] - found[1]).abs().max()) < 0.15 * float(spread)
    assert not torch.equal(found[0], found[1])
