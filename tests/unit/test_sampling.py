"""The sampler against naive oracles: draws, truncation, penalties, logprobs, and rows that do not affect each
other."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotprefix.engine.executor import Sampled, Unsampled
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.sampling.draw_token import draw, uniform
from hotprefix.engine.sampling.sampler import Sampler
from hotprefix.engine.sampling.token_logprobs import FLOOR, prompt_logprobs
from hotprefix.errors import InputError, ProtocolError

V = 300
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def logits(seed: int, rows: int = 1, v: int = V) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (rows, v)).astype(np.float32))


def run(sampler: Sampler, request: str, steps: int, **params: Any) -> list[int]:
    """The tokens of a request that is alone in its batch. Its logits at step i are those of every request at
    step i."""
    sampler.start(request, [1, 2, 3], SamplingParams(**params))
    return [sampler.sample([request], logits(i))[0].token for i in range(steps)]


def naive_set(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The ids that stay, computed word for word as the settings are defined."""
    p = np.exp(row.astype(np.float64) - row.max())
    p /= p.sum()
    ids = [int(i) for i in np.argsort(-row, kind="stable") if row[i] > -np.inf]
    if min_p > 0:
        ids = [i for i in ids if p[i] >= min_p * p.max() * (1 - 1e-6)]
    if 0 < top_k < row.size:
        kth = np.sort(row)[-top_k]
        ids = [i for i in ids if row[i] >= kth]
    kept, mass, total = [], 0.0, sum(p[i] for i in ids)
    for i in ids:
        kept.append(i)
        mass += p[i] / total
        if mass >= top_p:
            break
    return set(kept)


# -- drawing --------------------------------------------------------------------------------------


def test_uniform_is_a_fixed_function_of_seed_and_index() -> None:
    assert uniform(7, 0) == uniform(7, 0) != uniform(7, 1)
    assert uniform(-(2**63), 0) != uniform(2**63 - 1, 0)
    values = [uniform(5, i) for i in range(2000)]
    assert all(0.0 <= u < 1.0 for u in values)
    assert abs(np.mean(values) - 0.5) < 0.03
    assert abs(np.mean([uniform(i, 0) for i in range(2000)]) - 0.5) < 0.03


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    v=st.sampled_from([1, 2, 7, 255, 256, 257, 1000]),
    u=st.floats(0.0, 1.0, exclude_max=True),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 2.0]),
    forbidden=st.integers(0, 5),
)
def test_draw_is_the_inverse_of_the_cumulative_distribution(
    seed: int, v: int, u: float, temperature: float, forbidden: int
) -> None:
    row = logits(seed, v=v)[0].numpy().copy()
    row[: min(forbidden, v - 1)] = -np.inf
    token = draw(row, u, **(OFF | {"temperature": temperature}))
    p = np.exp((row - row.max()).astype(np.float64) / temperature)
    cdf = np.cumsum(p / p.sum())
    before = cdf[token - 1] if token else 0.0
    assert row[token] > -np.inf
    assert before - 1e-5 <= u <= cdf[token] + 1e-5


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 299, 300, 10_000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    forbidden=st.integers(0, 280),
)
def test_truncation_keeps_exactly_the_ids_of_the_definition(
    seed: int, top_k: int, top_p: float, min_p: float, forbidden: int
) -> None:
    row = logits(seed)[0].numpy().copy()
    row[np.random.default_rng(seed).permutation(V)[:forbidden]] = -np.inf
    want = naive_set(row, top_k, top_p, min_p)
    grid = [*np.linspace(0, 1, 500, endpoint=False), 1 - 2**-53]
    got = {draw(row, float(u), temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p) for u in grid}
    p = np.exp(row.astype(np.float64) - row.max())
    likely = {i for i in want if p[i] > 5e-3 * sum(p[j] for j in want)}
    assert likely <= got <= want


def test_top_p_of_equals_keeps_the_fewest() -> None:
    row = np.zeros(8, np.float32)
    assert {draw(row, u / 64, **(OFF | {"top_p": 0.5})) for u in range(64)} == {0, 1, 2, 3}


def test_top_k_keeps_equals_of_the_last() -> None:
    row = np.array([3, 2, 2, 1], np.float32)
    assert {draw(row, u / 64, **(OFF | {"top_k": 2})) for u in range(64)} == {0, 1, 2}


def test_frequencies_follow_the_softmax() -> None:
    row = np.array([0.0, 1.0, 2.0, -np.inf, 0.5], np.float32)
    counts = np.bincount([draw(row, uniform(3, i), **OFF) for i in range(20_000)], minlength=5)
    p = np.exp(row) / np.exp(row).sum()
    assert counts[3] == 0
    assert np.abs(counts / 20_000 - p).max() < 0.015


# -- rows -----------------------------------------------------------------------------------------


def test_plain_greedy_rows_are_the_argmax() -> None:
    sampler = Sampler(V)
    rows = [f"r{i}" for i in range(16)]
    for r in rows:
        sampler.start(r, [5], SamplingParams(temperature=0.0))
    x = logits(1, 16)
    assert [s.token for s in sampler.sample(rows, x)] == x.argmax(1).tolist()
    assert sampler.sample([], logits(1, 0)) == []


def test_a_seeded_stream_is_independent_of_batch_mates_and_row() -> None:
    alone = run(Sampler(V), "a", 12, seed=11, top_p=0.9)
    sampler = Sampler(V)
    sampler.start("a", [1, 2, 3], SamplingParams(seed=11, top_p=0.9))
    for i in range(6):
        sampler.start(f"m{i}", [4], SamplingParams(seed=i, temperature=i % 3 / 2, repetition_penalty=1.2))
    got = []
    for step in range(12):
        order = ["a", *(f"m{i}" for i in range(6))][: 1 + step % 7]
        random.Random(step).shuffle(order)
        table = logits(1000 + step, len(order))
        table[order.index("a")] = logits(step)[0]
        got.append(sampler.sample(order, table)[order.index("a")].token)
    assert got == alone
    assert run(Sampler(V), "b", 12, seed=12, top_p=0.9) != alone


def test_a_pause_changes_nothing_and_a_new_start_begins_again() -> None:
    whole = run(Sampler(V), "a", 8, seed=4, presence_penalty=1.5)
    sampler = Sampler(V)
    head = run(sampler, "a", 4, seed=4, presence_penalty=1.5)
    sampler.finish("nobody")
    tail = [sampler.sample(["a"], logits(i))[0].token for i in range(4, 8)]
    assert head + tail == whole
    sampler.finish("a")
    assert run(sampler, "a", 8, seed=4, presence_penalty=1.5) == whole


@pytest.mark.parametrize("cut", range(1, 8))
def test_outputs_from_elsewhere_are_gone_on_with_as_if_they_were_sampled_here(cut: int) -> None:
    """The draws' numbers, the penalties' counts and min_tokens all count them."""
    params: dict[str, Any] = {
        "seed": 4, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3,
        "min_tokens": 6, "stop_token_ids": (5, 6, 7),
    }  # fmt: skip
    whole = run(Sampler(V), "a", 8, **params)
    sampler = Sampler(V)
    sampler.start("a", [1, 2, 3], SamplingParams(**params))
    assert not sampler.replay("a", whole[:cut])
    assert [sampler.sample(["a"], logits(i))[0].token for i in range(cut, 8)] == whole[cut:]


def test_seedless_requests_get_a_seed_of_their_own_and_no_global_generator_moves() -> None:
    seeds = iter([21, 22])
    sampler = Sampler(V, fresh_seed=lambda: next(seeds))
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first, second = run(sampler, "a", 8), run(sampler, "b", 8)
    assert first == run(Sampler(V), "x", 8, seed=21)
    assert second == run(Sampler(V), "y", 8, seed=22)
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert run(Sampler(V), "a", 8) != run(Sampler(V), "b", 8)


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    tokens = run(Sampler(V), "a", 3, temperature=1e-300, seed=1)
    assert tokens == [int(logits(i).argmax()) for i in range(3)]


# -- adjustments ----------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    prompt=st.lists(st.integers(0, 19), min_size=1, max_size=40),
    repetition=st.sampled_from([1.0, 0.5, 1.3, 3.0]),
    presence=st.sampled_from([0.0, -1.0, 1.7]),
    frequency=st.sampled_from([0.0, -0.5, 0.9]),
    seed=st.integers(0, 1000),
)
def test_penalties_match_the_dense_definition(
    prompt: list[int], repetition: float, presence: float, frequency: float, seed: int
) -> None:
    sampler = Sampler(20)
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias={3: 1.5, 4: -2.0},
    )
    sampler.start("a", prompt, params)
    output: list[int] = []
    for step in range(25):
        x = logits(seed + step, v=20)
        row = x[0].double().clone()
        row[3] += 1.5
        row[4] -= 2.0
        for t in range(20):
            if t in prompt or t in output:
                row[t] = row[t] / repetition if row[t] > 0 else row[t] * repetition
            row[t] -= frequency * output.count(t) + presence * (t in output)
        kept = x.clone()
        token = sampler.sample(["a"], x)[0].token
        assert torch.equal(x, kept)
        assert row[token] >= row.max() - 1e-5
        output.append(token)


def test_many_distinct_outputs_are_all_counted() -> None:
    sampler = Sampler(500)
    sampler.start("a", [0], SamplingParams(temperature=0.0, presence_penalty=2.0))
    tokens = [sampler.sample(["a"], torch.zeros(1, 500))[0].token for _ in range(500)]
    assert sorted(tokens) == list(range(500))


def test_min_tokens_holds_back_every_end() -> None:
    x = torch.zeros(1, V)
    x[0, 7], x[0, 8], x[0, 9] = 9.0, 8.0, 5.0
    sampler = Sampler(V, eos_ids={7})
    sampler.start("a", [1], SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(8,)))
    assert [sampler.sample(["a"], x)[0].token for _ in range(3)] == [9, 9, 7]
    sampler.start("b", [1], SamplingParams(temperature=0.0, min_tokens=2, ignore_eos=True))
    assert sampler.sample(["b"], x)[0].token == 7


def test_min_tokens_yields_where_only_an_end_is_left() -> None:
    x = torch.full((1, V), -torch.inf)
    x[0, 7] = 0.0
    sampler = Sampler(V, eos_ids={7})
    sampler.start("a", [1], SamplingParams(min_tokens=5))
    assert sampler.sample(["a"], x)[0].token == 7


# -- logprobs -------------------------------------------------------------------------------------


def one(x: torch.Tensor, **params: Any) -> Sampled:
    sampler = Sampler(x.shape[1])
    sampler.start("a", [1], SamplingParams(**params))
    return sampler.sample(["a"], x)[0]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    x = logits(5)
    want = x[0].double().log_softmax(0)
    got = one(x, seed=3, temperature=1.7, logprobs=4, top_k=40, logit_bias={9: 50.0})
    assert got.token == 9
    assert got.logprob is not None
    assert got.logprob.token == 9
    assert got.logprob.logprob == pytest.approx(float(want[9]), abs=1e-5)
    assert got.logprob.rank == int((x[0] > x[0, 9]).sum()) + 1
    values, ids = want.topk(4)
    assert [i for i, _ in got.logprob.top] == ids.tolist()
    assert [v for _, v in got.logprob.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert one(x, temperature=0.0, logprobs=0).logprob.top == ()  # type: ignore[union-attr]
    assert one(x, temperature=0.0).logprob is None


def test_logprobs_are_always_finite() -> None:
    x = torch.full((1, V), -torch.inf)
    x[0, 4] = 1.0
    got = one(x, top_k=1, logprobs=5).logprob
    assert got is not None
    assert (got.logprob, got.rank) == (0.0, 1)
    assert [v for _, v in got.top] == [0.0, FLOOR, FLOOR, FLOOR, FLOOR]


def test_prompt_logprobs_score_each_next_token() -> None:
    x = logits(2, 3)
    got = prompt_logprobs(x, [4, 5, 6], 2)
    want = x.double().log_softmax(1)
    assert [e.token for e in got] == [4, 5, 6]
    for i, entry in enumerate(got):
        assert entry.logprob == pytest.approx(float(want[i, entry.token]), abs=1e-5)
        assert [t for t, _ in entry.top] == want[i].topk(2).indices.tolist()


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_number_has_no_token_and_changes_nobody(
    bad: float | None, temperature: float
) -> None:
    sampler = Sampler(V)
    params = SamplingParams(temperature=temperature, seed=5, frequency_penalty=0.5)
    for r in "abc":
        sampler.start(r, [1], params)
    x = logits(9, 3)
    if bad is None:
        x[1] = -torch.inf
    else:
        x[1, 17] = bad
    first, none, third = sampler.sample(["a", "b", "c"], x)
    assert isinstance(none, Unsampled)
    assert "logits peak at" in none.error
    for name, row, got in (("a", 0, first), ("c", 2, third)):
        alone = Sampler(V)
        alone.start(name, [1], params)
        assert [got] == alone.sample([name], x[row : row + 1])
        for i in range(5):
            assert sampler.sample([name], logits(i)) == alone.sample([name], logits(i))
    fresh = Sampler(V)
    fresh.start("b", [1], params)
    assert sampler.sample(["b"], logits(0)) == fresh.sample(["b"], logits(0)), "it is as it was"


def test_misuse_is_refused() -> None:
    sampler = Sampler(V)
    sampler.start("a", [1], SamplingParams())
    with pytest.raises(ProtocolError, match="twice"):
        sampler.start("a", [1], SamplingParams())
    with pytest.raises(ProtocolError, match="never started"):
        sampler.sample(["b"], logits(0))
    with pytest.raises(ProtocolError, match="logits"):
        sampler.sample(["a"], logits(0, 2))
    with pytest.raises(ProtocolError, match="logits"):
        sampler.sample(["a"], logits(0, v=V + 1))
    for params in ({"stop_token_ids": (V,)}, {"logit_bias": {V: 1.0}}):
        with pytest.raises(InputError, match=f"ids 0 to {V - 1}"):
            sampler.start("c", [1], SamplingParams(**params))  # type: ignore[arg-type]
    assert sampler.sample(["a"], logits(0))[0].token >= 0
