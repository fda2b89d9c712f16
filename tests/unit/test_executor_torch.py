"""TorchExecutor: page deltas, mixed batches, same-step reads, prompt logprobs, failures."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    GreedySampler,
    Sequencer,
    executor_for,
    load_like,
    make_ops,
    one_thread,
    reference_model,
    run,
    step,
)

from hotprefix.engine import torch_executor
from hotprefix.engine.kvpool import KVPool, page_bytes
from hotprefix.engine.model.loader import LoadedModel
from hotprefix.engine.model.torch_ops import TorchOps
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.torch_executor import TorchExecutor
from hotprefix.errors import ConfigError, HotprefixError
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.plan import Chunk, StepPlan

PAGE, PAGES = 4, 96


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return reference_model("Llama")


@pytest.fixture(scope="module", params=["torch", "native"])
def loaded(
    request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory
) -> LoadedModel:
    return load_like(model, tmp_path_factory.mktemp("llama"), make_ops(request.param))


def prompt(seed: int, size: int) -> list[int]:
    return random.Random(seed).choices(range(2, 151), k=size)


def alone(loaded: LoadedModel, tokens: list[int], outputs: int) -> list[int]:
    executor, _ = executor_for(loaded, PAGES, PAGE)
    return run(executor, Sequencer("alone", 0, tokens, range(PAGES), PAGE), outputs, chunk=10_000)


def start(executor: TorchExecutor, request: Sequencer, **settings: Any) -> Sequencer:
    executor.start(request.name, request.tokens, SamplingParams(**settings))
    return request


def test_mixed_batches_on_a_fragmented_pool_equal_lone_runs(loaded: LoadedModel) -> None:
    """Pages interleaved between requests, prefill chunks and decodes in one step."""
    executor, _ = executor_for(loaded, PAGES, PAGE)
    lengths = (3, 23, 41, 16)
    requests = [
        start(executor, Sequencer(f"r{i}", 5 * i, prompt(i, size), range(PAGES - 1 - i, 0, -4), PAGE))
        for i, size in enumerate(lengths)
    ]
    rng = random.Random(0)
    while any(len(request.output) < 10 for request in requests):
        busy = [request for request in requests if len(request.output) < 10]
        step(executor, [(request, rng.choice((1, 2, 7))) for request in busy if rng.random() < 0.8] or
             [(busy[0], 1)])  # fmt: skip
    for i, size in enumerate(lengths):
        assert requests[i].output == alone(loaded, prompt(i, size), 10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_logits_are_the_same_bits_however_batched(dtype: str, model: Any, tmp_path: Path) -> None:
    """So a cache hit, a chunk edge or a batch mate never changes a token, even in bfloat16."""
    loaded = load_like(model, tmp_path, make_ops("native"), dtype)
    tokens, rows = prompt(3, 45), []
    for chunk in (1, 7, 16, 45):
        executor, sampler = executor_for(loaded, PAGES, PAGE)
        request = start(executor, Sequencer("a", 1, tokens, range(30), PAGE))
        mate = start(executor, Sequencer("b", 0, prompt(chunk, 60), range(40, 90), PAGE))
        while not request.output:
            step(executor, [(mate, 1 + chunk % 3), (request, chunk)] if chunk > 1 else [(request, chunk)])
        rows.append(sampler.logits[-1][-1])
    assert all(torch.equal(row, rows[0]) for row in rows)


def test_pages_written_in_the_same_step_are_read(loaded: LoadedModel) -> None:
    """A follower shares the leader's first pages and computes only its own tail, all in one step."""
    executor, _ = executor_for(loaded, PAGES, PAGE)
    shared = prompt(9, 24)
    leader = start(executor, Sequencer("a", 0, [*shared, 7, 8], range(20, 40), PAGE))
    tail = [11, 12, 13]
    follower = start(executor, Sequencer("b", 1, shared + tail, [*range(20, 26), *range(50, 70)], PAGE))
    follower.reuse(24)
    step(executor, [(follower, 99), (leader, 99)])
    while len(follower.output) < 6:
        step(executor, [(follower, 1), (leader, 1)])
    assert leader.output == alone(loaded, [*shared, 7, 8], 6)
    assert follower.output == alone(loaded, shared + tail, 6)


def test_a_slot_is_reused_by_a_longer_request(loaded: LoadedModel) -> None:
    executor, _ = executor_for(loaded, PAGES, PAGE)
    first = prompt(1, 9)
    assert run(executor, Sequencer("a", 2, first, range(PAGES), PAGE), 5, 3) == alone(loaded, first, 5)
    executor.finish("a")
    second = prompt(2, 50)
    got = run(executor, Sequencer("b", 2, second, range(PAGES - 1, 0, -1), PAGE), 5, 17)
    assert got == alone(loaded, second, 5)


@pytest.mark.parametrize("chunk", [1, 5, 16, 33, 100])
@pytest.mark.parametrize("block", [4, 128])
def test_prompt_logprobs_in_any_chunks(
    loaded: LoadedModel, model: Any, chunk: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal entries however the prompt is cut, one per token but the first."""
    monkeypatch.setattr(torch_executor, "_LOGPROB_ROWS", block)
    tokens = prompt(4, 33)
    executor, _ = executor_for(loaded, PAGES, PAGE)
    request = start(executor, Sequencer("a", 0, tokens, range(PAGES), PAGE), prompt_logprobs=3)
    other = start(executor, Sequencer("b", 1, prompt(5, 40), range(50, 90), PAGE))
    entries = []
    while not request.output:
        result = step(executor, [(other, 3), (request, chunk)])
        assert "b" not in result.prompt_logprobs
        entries += result.prompt_logprobs.get("a", [])
    assert not step(executor, [(request, 1)]).prompt_logprobs
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert [entry.token for entry in entries] == tokens[1:]
    for row, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(expected[row, entry.token]), abs=1e-3)
        assert entry.rank == int((expected[row] > expected[row, entry.token]).sum()) + 1
        assert [token for token, _ in entry.top] == expected[row].topk(3).indices.tolist()


def test_prompt_logprobs_come_once_after_a_retraction(loaded: LoadedModel) -> None:
    executor, _ = executor_for(loaded, PAGES, PAGE)
    request = start(executor, Sequencer("a", 0, prompt(4, 20), range(PAGES), PAGE), prompt_logprobs=0)
    first = step(executor, [(request, 12)]).prompt_logprobs["a"]
    again = Sequencer("a", 0, prompt(4, 20), range(PAGES - 1, 0, -1), PAGE)
    rest = step(executor, [(again, 99)]).prompt_logprobs["a"]
    assert [entry.token for entry in (*first, *rest)] == prompt(4, 20)[1:]
    assert all(entry.top == () for entry in rest)


def test_not_finite_numbers_fail_the_step_and_the_next_one_works(loaded: LoadedModel) -> None:
    tokens = prompt(6, 10)
    executor, sampler = executor_for(loaded, PAGES, PAGE)
    executor._pool.values[1][:] = torch.nan
    for size in (3, 99):  # a chunk that samples nothing must not be published either
        request = start(executor, Sequencer(f"a{size}", 0, tokens, range(PAGES), PAGE))
        request.reuse(4)
        with pytest.raises(HotprefixError, match="not finite"):
            step(executor, [(request, size)])
    assert sampler.logits == []
    assert run(executor, Sequencer("b", 0, tokens, range(PAGES), PAGE), 5, 4) == alone(loaded, tokens, 5)


class FailingOnce(TorchOps):
    """Raises in the middle of one forward pass."""

    fails = True

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory, say")
        return super().silu_mul(gate_up)


def test_failure_inside_the_pass_is_clear_and_leaves_no_trace(
    model: Any, loaded: LoadedModel, tmp_path: Path
) -> None:
    executor, _ = executor_for(load_like(model, tmp_path, FailingOnce()), PAGES, PAGE)
    tokens = prompt(6, 10)
    request = start(executor, Sequencer("a", 0, tokens, range(PAGES), PAGE))
    with pytest.raises(HotprefixError, match=r"step \d+ .*out of memory, say"):
        step(executor, [(request, 7)])
    request.reuse(0)  # the page ids told in the failed step stay known
    while len(request.output) < 5:
        step(executor, [(request, 7)])
    assert request.output == alone(loaded, tokens, 5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": tk.encode([151])}, "token id"),
        ({"tokens": tk.encode([-1])}, "token id"),
        ({"table": (PAGES,)}, "outside the pool"),
        ({"table": (-1,)}, "outside the pool"),
        ({"start": 512, "table": tuple(range(90)) * 2}, "position 512"),
    ],
)
def test_a_wrong_plan_never_writes_wildly(loaded: LoadedModel, changes: dict[str, Any], words: str) -> None:
    executor, _ = executor_for(loaded, PAGES, PAGE)
    executor.start("a", [5], SamplingParams())
    fields: dict[str, Any] = {
        "request": "a", "row": 0, "start": 0, "tokens": tk.encode([5]), "table_from": 0, "table": (0,),
        "samples": True, "prefill": True,
    }  # fmt: skip
    with pytest.raises(HotprefixError, match=words):
        executor.execute(StepPlan(0, (Chunk(**{**fields, **changes}),)))


def test_pool_bytes(loaded: LoadedModel) -> None:
    config = loaded.decoder.config
    pool = KVPool.allocate(config, 10, PAGE, torch.bfloat16, torch.device("cpu"))
    assert pool.keys[0].shape == (10 * PAGE, config.kv_heads, config.head_dim)
    assert pool.bytes() == 10 * page_bytes(config, PAGE, torch.bfloat16)
    with pytest.raises(ConfigError, match="KV pages"):
        KVPool.allocate(config, 10**12, PAGE, torch.float32, torch.device("cpu"))


def test_finish_forgets_and_ignores_the_unknown(loaded: LoadedModel) -> None:
    decoder, sampler = loaded.decoder, GreedySampler()
    pool = KVPool.allocate(decoder.config, 4, PAGE, decoder.dtype, decoder.device)
    executor = TorchExecutor(decoder, pool, sampler)
    executor.start("a", [1, 2], SamplingParams(prompt_logprobs=1))
    executor.finish("a")
    executor.finish("never seen")
    assert executor._scores == {}
    assert sampler.known == set()
