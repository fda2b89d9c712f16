"""Outputs are counted exactly: each draws its own random number, and min_tokens holds to the very token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from text_models import CHATML, toy

from hotprefix.engine.messages import Generate
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.sampling.draw_token import draw, uniform
from hotprefix.engine.sampling.sampler import Sampler
from hotprefix.engine.text.output import OutputText
from hotprefix.kernel.plan import Finish
from hotprefix.server.sampling import MASK_63, requests_for
from hotprefix.server.schemas import Completion
from tests.support.engine import drain, fake_loop
from tests.support.fake import cold_run

V = 1000


def sampled(seed: int, outputs: int, row: torch.Tensor) -> list[int]:
    sampler = Sampler(V)
    sampler.start("a", [1, 2], SamplingParams(seed=seed))
    return [sampler.sample(["a"], row)[0].token for _ in range(outputs)]


def test_output_number_i_draws_the_streams_number_i() -> None:
    row = torch.from_numpy(np.random.default_rng(0).normal(0, 1, (1, V)).astype(np.float32))
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for seed in (0, 7, -(2**63), 2**63 - 1):
        numbers = [uniform(seed, i) for i in range(40)]
        assert len(set(numbers)) == 40
        assert sampled(seed, 40, row) == [draw(row[0].numpy(), u, **off) for u in numbers]


def test_a_streams_outputs_differ_from_each_other_on_equal_logits() -> None:
    """60 draws from 1000 equally likely tokens repeat few tokens. One random number for all draws would give
    the same token each time."""
    flat = torch.zeros(1, V)
    tokens = sampled(3, 60, flat)
    assert len(set(tokens)) > 50
    assert tokens != sampled(4, 60, flat)
    assert np.abs(np.corrcoef(tokens[:-1], tokens[1:])[0, 1]) < 0.5


def test_a_retracted_request_draws_on_and_choices_draw_their_own() -> None:
    body = Completion(prompt="a", n=3, seed=5)
    requests = requests_for([[1, 2]], 3, SamplingParams(seed=5), body, "x", None, 0.0)
    seeds = [request.params.seed for request in requests]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    assert all(seed is not None and 0 <= seed <= MASK_63 for seed in seeds)
    flat = torch.zeros(1, V)
    assert len({tuple(sampled(seed or 0, 20, flat)) for seed in seeds}) == 3


# -- min_tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [0, 1, 2, 5])
@pytest.mark.parametrize("end", ["eos", "stop_token_ids"])
def test_an_end_comes_after_exactly_min_tokens_outputs(least: int, end: str) -> None:
    x = torch.zeros(1, V)
    x[0, 7], x[0, 9] = 9.0, 5.0
    sampler = Sampler(V, eos_ids={7} if end == "eos" else ())
    stops = (7,) if end == "stop_token_ids" else ()
    sampler.start("a", [1], SamplingParams(temperature=0.0, min_tokens=least, stop_token_ids=stops))
    tokens = [sampler.sample(["a"], x)[0].token for _ in range(least + 1)]
    assert tokens == [9] * least + [7]


@pytest.mark.parametrize("least", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("named", [True, False])
def test_the_loop_lets_an_end_token_stop_from_the_min_tokens_th_output_on(least: int, named: bool) -> None:
    prompt = tuple(range(1, 24))
    said = cold_run(list(prompt), 8)
    end, at = said[3], said.index(said[3]) + 1
    loop, _, _ = fake_loop(eos=() if named else (end,))
    params = SamplingParams(max_tokens=8, min_tokens=least, stop_token_ids=(end,) if named else ())
    loop.submit(Generate("a", prompt, params))
    last = drain(loop)["a"][-1]
    later = [i + 1 for i, token in enumerate(said) if token == end and i + 1 >= least]
    assert at == 4
    assert last.usage.completion_tokens == (later[0] if later else 8)
    assert last.finish is (Finish.STOP if later else Finish.LENGTH)


@pytest.mark.parametrize("least", [0, 1, 2, 3, 4])
def test_a_stop_string_counts_from_the_min_tokens_th_output_on(least: int) -> None:
    """The string is complete with output 3, and again with output 6."""
    text = OutputText(toy(CHATML), SamplingParams(min_tokens=least, stop=("c",)))
    stopped_at = next(i for i, token in enumerate(b"abcabc", start=1) if text.push(token)[1])
    assert stopped_at == (3 if least <= 3 else 6)
