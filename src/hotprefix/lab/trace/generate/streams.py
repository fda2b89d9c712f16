"""Generated arrivals without sessions. Owns: bursts, documents, skew, churn and strangers.

Rules: open loop. Complete blocks have ids, and so has the partial last block of a prompt that comes more than
once. Each generator makes one situation that a policy has to survive, with its size as parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from hotprefix.lab.trace.generate.agents import random_gap
from hotprefix.lab.trace.generate.distributions import FROZEN, Count, Ids, Length, Positive, Share, extended
from hotprefix.lab.trace.trace_request import Blocks, TraceRequest

Seconds = Annotated[float, Field(ge=0, le=1e9)]


@dataclass(config=FROZEN, frozen=True, slots=True, kw_only=True)
class BurstParams:
    """`size` prompts arrive within spread_s. A new burst, of other prompts, begins every_s later.

    shared: the share of the prompt, from its beginning, that all prompts of a burst have in common. 1: they
    are identical.
    """

    bursts: Count = 8
    size: Count = 8
    prompt: Length = 4096
    shared: Share = 1.0
    output: Length = 64
    every_s: Positive = 30.0
    spread_s: Seconds = 0.05
    block_size: Length = 16


def bursts(params: BurstParams, seed: int) -> Iterator[TraceRequest]:
    random, ids = np.random.default_rng(seed), Ids()
    # the partial last block has an id only if it comes more than once
    count = (
        -(-params.prompt // params.block_size) if params.shared == 1 else params.prompt // params.block_size
    )
    for burst in range(params.bursts):
        common = ids.fresh(round(count * params.shared))
        begin = burst * params.every_s
        for n, late in enumerate(sorted(random.uniform(0, params.spread_s, params.size).tolist())):
            blocks = extended(common, count, ids)
            yield _request(f"b{burst}/{n}", params.prompt, params.output, blocks, begin + late, "burst")


@dataclass(config=FROZEN, frozen=True, slots=True, kw_only=True)
class DocumentParams:
    """Questions arrive at `rate` a second, Poisson, each about one of the documents, drawn evenly."""

    documents: Count = 4
    questions: Count = 64
    document: Length = 8192
    question: Length = 64
    output: Length = 128
    rate: Positive = 1.0
    block_size: Length = 16


def documents(params: DocumentParams, seed: int) -> Iterator[TraceRequest]:
    random, ids, now = np.random.default_rng(seed), Ids(), 0.0
    texts = [ids.fresh(params.document // params.block_size) for _ in range(params.documents)]
    length = params.document + params.question
    for n in range(params.questions):
        which = int(random.integers(params.documents))
        blocks = extended(texts[which], length // params.block_size, ids)
        yield _request(f"d{which}/{n}", length, params.output, blocks, now, "question")
        now += random_gap(random, params.rate)


@dataclass(config=FROZEN, frozen=True, slots=True, kw_only=True)
class SkewParams:
    """Requests arrive at `rate` a second, Poisson. A part of them, `cold`, have prompts that come only once.
    Each of the others asks a question after one of `keys` prefixes. The prefix of rank r is drawn with a
    probability that falls as 1 / r ** zipf.

    shift_every_s: so often the ranks are dealt anew, so that other prefixes become hot. None: never.
    """

    requests: Count = 2000
    rate: Positive = 4.0
    keys: Count = 64
    zipf: Annotated[float, Field(ge=0, le=5)] = 1.1
    prefix: Length = 8192
    question: Length = 256
    output: Length = 128
    cold: Share = 0.2
    cold_prompt: Length = 4096
    shift_every_s: Positive | None = None
    block_size: Length = 16


def skew(params: SkewParams, seed: int) -> Iterator[TraceRequest]:
    random, ids, size = np.random.default_rng(seed), Ids(), params.block_size
    texts = [ids.fresh(params.prefix // size) for _ in range(params.keys)]
    weights = 1.0 / np.arange(1, params.keys + 1) ** params.zipf
    chances, now, dealt = weights / weights.sum(), 0.0, 0
    order, length = random.permutation(params.keys), params.prefix + params.question
    for n in range(params.requests):
        if params.shift_every_s is not None and now >= (dealt + 1) * params.shift_every_s:
            order, dealt = random.permutation(params.keys), dealt + 1
        if random.random() < params.cold:
            blocks = ids.fresh(params.cold_prompt // size)
            yield _request(f"cold/{n}", params.cold_prompt, params.output, blocks, now, "cold")
        else:
            which = int(order[random.choice(params.keys, p=chances)])
            blocks = extended(texts[which], length // size, ids)
            yield _request(f"k{which}/{n}", length, params.output, blocks, now, "hot")
        now += random_gap(random, params.rate)


@dataclass(config=FROZEN, frozen=True, slots=True, kw_only=True)
class ChurnParams:
    """The same prompts come in turn, one every_s. If the cache cannot hold all of them, a cache that keeps
    what is most recent always evicts the prompt that comes next."""

    prompts: Count = 32
    rounds: Count = 4
    prompt: Length = 2048
    output: Length = 32
    every_s: Positive = 1.0
    block_size: Length = 16


def churn(params: ChurnParams, seed: int) -> Iterator[TraceRequest]:
    ids = Ids()
    own = [ids.fresh(-(-params.prompt // params.block_size)) for _ in range(params.prompts)]
    order = np.random.default_rng(seed).permutation(params.prompts).tolist()
    for turn in range(params.rounds):
        for place, which in enumerate(order):
            arrival = (turn * params.prompts + place) * params.every_s
            yield _request(f"c{which}/{turn}", params.prompt, params.output, own[which], arrival, "churn")


@dataclass(config=FROZEN, frozen=True, slots=True, kw_only=True)
class StrangerParams:
    """Hot requests arrive at `intensity` a second, Poisson, on a few prefixes. Every cold_every_s a cold
    request arrives, whose prompt comes only once: does it ever get its turn?"""

    seconds: Positive = 120.0
    intensity: Positive = 4.0
    hot_prefixes: Count = 8
    hot_prefix: Length = 4096
    question: Length = 64
    cold_every_s: Positive = 20.0
    cold_prompt: Length = 4160
    output: Length = 64
    block_size: Length = 16


def stranger(params: StrangerParams, seed: int) -> Iterator[TraceRequest]:
    random, ids, size = np.random.default_rng(seed), Ids(), params.block_size
    hot = [ids.fresh(params.hot_prefix // size) for _ in range(params.hot_prefixes)]
    length, now, cold, n = params.hot_prefix + params.question, 0.0, 0, 0
    while now < params.seconds:
        while (due := (cold + 0.5) * params.cold_every_s) <= now:
            blocks = ids.fresh(params.cold_prompt // size)
            yield _request(f"cold/{cold}", params.cold_prompt, params.output, blocks, due, "cold")
            cold += 1
        blocks = extended(hot[int(random.integers(params.hot_prefixes))], length // size, ids)
        yield _request(f"hot/{n}", length, params.output, blocks, now, "hot")
        now += random_gap(random, params.intensity)
        n += 1


def _request(name: str, length: int, output: int, blocks: Blocks, arrival: float, kind: str) -> TraceRequest:
    return TraceRequest(
        id=name, input_length=length, output_length=output, blocks=blocks, arrival_s=arrival, kind=kind
    )
