"""Values that cannot work are refused when they are given; values at the edge of what can work do work."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import pytest
import torch

from hotprefix.engine.executor import Unsampled
from hotprefix.engine.params import (
    MAX_LISTED_TOKENS,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)
from hotprefix.engine.sampling.sampler import Sampler
from hotprefix.engine.text.stop import StopMatcher
from hotprefix.errors import InputError
from tests.support.engine import fake_loop
from tests.support.server import FakeEngine, client

V = 300
NAN, INF = float("nan"), float("inf")


def values(name: str, *given: Any) -> list[tuple[str, Any]]:
    return [(name, value) for value in given]


REFUSED = [
    *values("temperature", -1e-300, 2.1, NAN, INF, True, "1"),
    *values("top_p", 0.0, -0.0, 1.1, NAN, -INF),
    *values("min_p", -0.1, 1.1, NAN),
    *values("repetition_penalty", 0.0, 5e-324, 1e-320, 1e-38, 0.009, 10.1, NAN, INF, -1.0),
    *values("presence_penalty", -2.1, 2.1, 1e308, NAN),
    *values("frequency_penalty", -2.1, 2.1, -1e308, NAN),
    *values("top_k", -2, 1.0, True),
    *values("min_tokens", -1, 0.5),
    *values("max_tokens", -1, 1.0),
    *values("seed", 2**63, -(2**63) - 1, 1.0, True),
    *values("logprobs", -1, MAX_LOGPROBS + 1),
    *values("prompt_logprobs", -1, MAX_LOGPROBS + 1),
    *values("stop", ("",), ("a",) * (MAX_STOPS + 1), ("a" * (MAX_STOP_CHARS + 1),), (5,)),
    *values("stop_token_ids", (-1,), (1.0,), (1,) * (MAX_LISTED_TOKENS + 1)),
    *values("logit_bias", {1: 100.1}, {1: -1e308}, {1: NAN}, {-1: 1.0}),
    *values("logit_bias", dict.fromkeys(range(MAX_LISTED_TOKENS + 1), 1.0)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_value_that_cannot_work_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name) as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name
    assert "give" in refused.value.message


EDGES: dict[str, list[Any]] = {
    "temperature": [0.0, 5e-324, 1e-38, 1e-5, 1.1e-5, 2.0],
    "repetition_penalty": [MIN_REPETITION_PENALTY, 10.0],
    "presence_penalty": [-2.0, 2.0],
    "frequency_penalty": [-2.0, 2.0],
    "top_p": [5e-324, 1e-38, 1.0],
    "min_p": [0.0, 5e-324, 1e-38, 1.0],
    "top_k": [0, 1, 2**200],
    "logit_bias": [{}, dict.fromkeys(range(V), 100.0), dict.fromkeys(range(V), -100.0)],
}
PAIRS = [
    {one: a, other: b}
    for one, other in itertools.combinations(EDGES, 2)
    for a, b in itertools.product(EDGES[one], EDGES[other])
]


@pytest.mark.parametrize("scale", [1e-3, 30.0, 1e4, 1e30])
def test_every_value_at_the_edge_samples_with_every_other(scale: float) -> None:
    """With allowed values, no logits lead to NaN."""
    logits = np.random.default_rng(1).normal(0, scale, (1, V)).astype(np.float32)
    sampler = Sampler(V)
    with np.errstate(invalid="raise", divide="raise"):
        for i, params in enumerate(PAIRS):
            name = f"r{i}"
            sampler.start(name, [1, 2, 3], SamplingParams(seed=i, logprobs=3, **params))
            for _ in range(3):
                (sampled,) = sampler.sample([name], torch.from_numpy(logits))
                assert not isinstance(sampled, Unsampled), (params, sampled)
                assert sampled.logprob is not None
                assert all(np.isfinite(value) for _, value in sampled.logprob.top)


def test_choices_share_what_was_checked_once() -> None:
    params = SamplingParams(seed=1, logit_bias={5: 1.0}, stop=("a",), max_tokens=3)
    other = params.with_seed(7)
    assert other.seed == 7
    assert other.logit_bias is params.logit_bias
    assert params == SamplingParams(seed=1, logit_bias={5: 1.0}, stop=("a",), max_tokens=3)
    assert other == SamplingParams(seed=7, logit_bias={5: 1.0}, stop=("a",), max_tokens=3)


def test_a_long_stop_string_costs_a_character_what_a_short_one_costs() -> None:
    """Calls inside the matcher are counted: there are no more of them when thousands of characters are
    held."""

    def calls(stop: str) -> int:
        matcher, found = StopMatcher([stop]), 0

        def count(*_: object) -> None:
            nonlocal found
            found += 1

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            shown = "".join([matcher.push("a")[0] for _ in range(2000)])
        finally:
            sys.setprofile(before)
        assert shown == "a" * max(0, 2000 - len(stop) + 1)
        return found

    assert calls("a" * 1999 + "b") <= calls("aab")


def test_more_outputs_than_the_context_leaves_are_refused_however_they_are_asked_for() -> None:
    loop, _, _ = fake_loop(max_model_len=20)
    from hotprefix.engine.messages import Generate

    prompt = tuple(range(1, 16))
    for params, param in (
        (SamplingParams(max_tokens=6), "max_tokens"),
        (SamplingParams(max_tokens=10**30), "max_tokens"),
        (SamplingParams(min_tokens=6), "min_tokens"),
        (SamplingParams(min_tokens=10**30), "min_tokens"),
    ):
        with pytest.raises(InputError, match="the context is 20 tokens") as refused:
            loop.submit(Generate("a", prompt, params))
        assert refused.value.param == param
    loop.submit(Generate("a", prompt, SamplingParams(min_tokens=5)))


# -- over HTTP ------------------------------------------------------------------------------------

FIELDS = (
    "temperature", "top_p", "min_p", "top_k", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "n", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "priority",
    "session_hold_s", "stop_token_ids", "logit_bias",
)  # fmt: skip
LITERALS = ["1e999", "-1e999", "NaN", "Infinity", "9" * 4000, "-" + "9" * 4000, "9" * 5000, '"1"', "true"]


@pytest.mark.parametrize("field", FIELDS)
async def test_no_number_of_a_body_is_an_internal_error(field: str) -> None:
    """Such a number is refused by its field, or the body as a whole is no JSON. It is never accepted, and
    never a 500."""
    engine = FakeEngine()
    async with client(engine, headers={"content-type": "application/json"}) as http:
        for literal in LITERALS:
            value = {"stop_token_ids": f"[{literal}]", "logit_bias": f'{{"1": {literal}}}'}.get(
                field, literal
            )
            for route, prompt in (("completions", '"prompt": "a"'), ("chat/completions", '"messages": []')):
                answer = await http.post(f"/v1/{route}", content=f'{{{prompt}, "{field}": {value}}}')
                taken = answer.status_code == 200 and (field, literal) in {
                    ("top_k", "9" * 4000), ("min_tokens", "9" * 4000),
                }  # fmt: skip
                assert taken or answer.status_code == 400, (literal[:20], answer.text[:200])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repetition_penalty": 1e-38}, "repetition_penalty"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"05": 1, "5": 2}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"stop": "a" * (MAX_STOP_CHARS + 1)}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"n": 129}, "n"),
        ({"n": 0}, "n"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ],
)
async def test_a_refusal_names_its_field_and_reaches_no_engine(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        answer = await http.post("/v1/completions", json={"prompt": "a", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not engine.seen


async def test_the_choices_of_a_long_bias_are_checked_once() -> None:
    engine = FakeEngine()
    body = {"prompt": "a", "n": 128, "seed": 3, "logit_bias": {str(i): 1.0 for i in range(V)}}
    async with client(engine) as http:
        await http.post("/v1/completions", json=body)
    assert len(engine.seen) == 128
    assert len({request.params.seed for request in engine.seen}) == 128
    assert len({id(request.params.logit_bias) for request in engine.seen}) == 1
