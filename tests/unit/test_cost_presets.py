"""The shipped cost models: files like any other, and the published ones are what their sources give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotprefix.cost.model import CostModel
from hotprefix.cost.presets import load_cost, preset_names
from hotprefix.errors import InputError
from hotprefix.lab.cost.fit_prices import solve

LLAMA_70B, LLAMA_8B = "llama-3.3-70b.2xh100.fp8", "llama-3.1-8b.1xh100.fp8"

# Output tokens per second at maximum load by (input, output) length; TensorRT-LLM 1.0, docs/source/
# performance/perf-overview.md, columns H100 TP2 (70B) and H100 TP1 (8B), FP8.
THROUGHPUT = {
    (128, 128): (6378, 28312), (128, 2048): (6651, 22714), (128, 4096): (4199, 14325),
    (500, 2000): (5222, 17660), (1000, 1000): (4205, 15220), (1000, 2000): (4146, 13899),
    (2048, 128): (762, 3450), (2048, 2048): (3082, 9305), (5000, 500): (898, 3459),
    (20000, 2000): (437, 1351),
}  # fmt: skip
MAX_BATCH = 2048
# Seconds with one request at a time; NVIDIA NIM LLM benchmarking 1.0.0, Performance, NIM 1.8.0.
TTFT_70B = {5000: 0.40677, 500: 0.04777}
ITL_70B = {5000 + 250: 0.01858, 500 + 1000: 0.01891}
ITL_8B = 0.00463


def per_request(inputs: int, outputs: int, cache_tokens: float) -> tuple[float, ...]:
    """The terms of one request's share of the machine, if as many requests decode together as the cache
    holds."""
    context = inputs + outputs / 2
    batch = min(MAX_BATCH, cache_tokens / context)
    return (outputs / batch, inputs, inputs * (inputs + 1) / 2, outputs, outputs * context)


def published(name: str) -> tuple[np.ndarray, np.ndarray]:
    """(terms, seconds) of every published figure behind a preset."""
    column, cache_bytes, token_bytes = (0, 75e9, 163_840) if name == LLAMA_70B else (1, 65e9, 65_536)
    rows = [per_request(i, o, cache_bytes / token_bytes) for i, o in THROUGHPUT]
    seconds = [outputs / rates[column] for (_, outputs), rates in THROUGHPUT.items()]
    if name == LLAMA_70B:
        rows += [(1, n, n * (n + 1) / 2, 0, 0) for n in TTFT_70B] + [(1, 0, 0, 1, n) for n in ITL_70B]
        seconds += [*TTFT_70B.values(), *ITL_70B.values()]
    else:
        rows.append((1, 0, 0, 1, 0))
        seconds.append(ITL_8B)
    return np.array(rows, dtype=float), np.array(seconds)


def prices(model: CostModel) -> np.ndarray:
    return np.array(
        [model.base_s, model.prefill_token_s, model.prefill_context_s, model.decode_s, model.decode_context_s]
    )


def left_out(rows: np.ndarray, seconds: np.ndarray, kept: int) -> np.ndarray:
    """The absolute relative error of each figure, except the last `kept`, in a fit that does not see it."""
    off = []
    for i in range(len(seconds) - kept):
        seen = np.arange(len(seconds)) != i
        found = solve(rows[seen], seconds[seen], np.ones(seen.sum()))
        off.append(abs(rows[i] @ found / seconds[i] - 1))
    return np.array(off)


@pytest.mark.parametrize(("name", "kept"), [(LLAMA_70B, 0), (LLAMA_8B, 1)])
def test_published_presets_are_the_fit_of_their_figures(name: str, kept: int) -> None:
    rows, seconds = published(name)
    model = load_cost(name)
    assert prices(model) == pytest.approx(solve(rows, seconds, np.ones(len(seconds))), rel=1e-3)
    off = left_out(rows, seconds, kept)
    assert model.fit is not None
    assert model.fit.overall.samples == len(off)
    assert model.fit.overall.median == pytest.approx(np.median(off), rel=1e-2)
    assert model.fit.overall.p95 == pytest.approx(np.percentile(off, 95), rel=1e-2)
    assert np.max(np.abs(rows @ prices(model) / seconds - 1)) < 0.11


def test_the_70b_attention_terms_agree_with_arithmetic() -> None:
    """4 x heads x head size x layers operations per pair at 350 TFLOP/s per GPU; KV bytes per bandwidth."""
    model = load_cost(LLAMA_70B)
    assert model.prefill_context_s == pytest.approx(4 * 64 * 128 * 80 / (2 * 350e12), rel=0.1)
    assert model.decode_context_s == pytest.approx(163_840 / (2 * 3.35e12), rel=0.25)
    assert model.kv_token_bytes == 2 * 80 * 8 * 128


def test_a_coding_agent_turn_has_a_sensible_price() -> None:
    """1,000 new tokens after 100,000 cached: attention makes up most of it, and it beats the whole prompt by
    far more than it would by tokens alone."""
    model = load_cost(LLAMA_70B)
    turn = model.prices.step_s(1000, 1000 * 100_000 + 1000 * 1001 // 2, 0, 0)
    whole = model.prices.step_s(101_000, 101_000 * 101_001 // 2, 0, 0)
    assert 0.3 < turn < 0.7
    assert 40 < whole / turn < 80


def test_every_preset_loads_and_says_where_it_is_from() -> None:
    assert {LLAMA_70B, LLAMA_8B} <= set(preset_names())
    for name in preset_names():
        model = load_cost(name)
        assert model.name == name
        assert model.fit is not None
        assert model.source in model.label


def test_an_unknown_name_lists_the_presets(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cost 'h200': neither a file nor a preset; presets: .*70b"):
        load_cost("h200")
    path = tmp_path / "cost.json"
    load_cost(LLAMA_8B).save(path)
    assert load_cost(str(path)) == load_cost(LLAMA_8B)
