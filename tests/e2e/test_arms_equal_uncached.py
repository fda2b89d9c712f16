"""The project's correctness test on the real default model in float32: under every publication and flight,
page size, chunk budget and order of arrival, with aborts and retractions in between, greedy output equals
the uncached run's, token by token; the uncached run equals transformers' (test_greedy_equals_transformers).

Near ties would make equality hang on rounding order; float32 rows have the same bits whatever their
batch (native kernels), so none is expected and no tolerance is given. Whole pages of a prefix in another
order give the same text here (keys carry their rotation); the fake executor's tests see that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch

from hotprefix.engine.kvpool import KVPool
from hotprefix.engine.live_request import TokensOnly
from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.messages import EngineInfo, Generate
from hotprefix.engine.model.files import DEFAULT_MODEL, resolve_model
from hotprefix.engine.model.loader import LoadedModel, load_model
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.sampling.sampler import Sampler
from hotprefix.engine.torch_executor import TorchExecutor
from hotprefix.kernel.config import Flight, KernelConfig, Publication
from hotprefix.kernel.plan import Finish

OUTPUTS = 6
COMMON = [(37 * n) % 4000 + 500 for n in range(70)]
TAILS = [[(91 * n + 13 * t) % 4000 + 500 for n in range(length)] for t, length in enumerate((0, 1, 9, 26))]
PROMPTS = [COMMON + tail for tail in TAILS] + [COMMON[:40] + TAILS[3], [7, 8, 9], TAILS[3] + COMMON[:30]]
ARMS = list(product(Publication, Flight))
SHAPES = [(1, 64), (16, 33), (16, 512), (64, 50)]  # page size, tokens a step may compute


@pytest.fixture(scope="module")
def model() -> Iterator[LoadedModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two that wait for each other crawl on a busy machine
    yield load_model(resolve_model(DEFAULT_MODEL), "float32", "cpu")
    torch.set_num_threads(threads)


def make_loop(model: LoadedModel, config: KernelConfig) -> EngineLoop:
    decoder = model.decoder
    pool = KVPool.allocate(
        decoder.config, config.total_pages, config.page_size, decoder.dtype, decoder.device
    )
    vocabulary = decoder.config.vocab_size
    tokens = config.total_pages * config.page_size
    info = EngineInfo("default", tokens, vocabulary, config.page_size, tokens)
    return EngineLoop(
        config,
        TorchExecutor(decoder, pool, Sampler(vocabulary, decoder.device)),
        info,
        fingerprint=model.fingerprint,
        eos_ids=(),
        make_text=lambda _: TokensOnly(),
    )


def submit(loop: EngineLoop, name: str, prompt: Sequence[int]) -> None:
    params = SamplingParams(max_tokens=OUTPUTS, temperature=0.0, ignore_eos=True)
    loop.submit(Generate(name, tuple(prompt), params))


@pytest.fixture(scope="module")
def cold(model: LoadedModel) -> list[list[int]]:
    """Each prompt alone, the cache off, in one chunk. They differ, or equality would show nothing."""
    outputs = []
    for prompt in PROMPTS:
        loop = make_loop(model, KernelConfig(total_pages=16, prefix_cache=False, flight=Flight.NONE))
        submit(loop, "only", prompt)
        outputs.append([token for _ in range(OUTPUTS) for delta in loop.step() for token in delta.tokens])
    assert len({tuple(output) for output in outputs}) >= 5
    return outputs


@pytest.mark.parametrize(("publication", "flight"), ARMS)
def test_every_arm(
    model: LoadedModel, cold: list[list[int]], publication: Publication, flight: Flight
) -> None:
    """Up to 16 requests at a time, some arriving while others run, some aborted, over a pool that is too
    small for all of them, so that pages are evicted and requests retracted."""
    seed = ARMS.index((publication, flight))
    page_size, budget = SHAPES[seed % len(SHAPES)]
    rng = random.Random(seed)
    loop = make_loop(
        model,
        KernelConfig(
            total_pages=max(5, 320 // page_size),
            page_size=page_size,
            max_batched_tokens=budget,
            max_running=16,
            publication=publication,
            flight=flight,
            output_reserve=0.0,
        ),
    )
    wanted: dict[str, int] = {}
    got: dict[str, list[int]] = {}
    ends: dict[str, Finish] = {}
    arrivals = [rng.randrange(len(PROMPTS)) for _ in range(14)] + [0] * 4
    aborted = set()
    while arrivals or loop.has_work:
        for _ in range(rng.choice((0, 1, 5)) if loop.has_work else 1):
            if arrivals:
                name = f"r{len(wanted)}"
                wanted[name], got[name] = arrivals.pop(0), []
                submit(loop, name, PROMPTS[wanted[name]])
        if rng.random() < 0.1 and (live := [n for n in wanted if n not in ends]):
            aborted.add(rng.choice(live))
            loop.abort(sorted(aborted)[-1])
        for delta in loop.step():
            got[delta.id] += delta.tokens
            if delta.finish is not None:
                ends[delta.id] = delta.finish
        loop.kernel.check()
    for name, number in wanted.items():
        assert got[name] == cold[number][: len(got[name])], (name, number)
        assert ends[name] is (Finish.ABORT if len(got[name]) < OUTPUTS else Finish.LENGTH)
    assert sum(end is Finish.LENGTH for end in ends.values()) >= 12
    assert loop.kernel.counters.cached_tokens > 0


def test_retracted_requests_say_the_same(model: LoadedModel, cold: list[list[int]]) -> None:
    """Over-committed on purpose: all are admitted for their prompts alone, then decodes run out of pages.
    Salts keep them from sharing, so that the pool is really short."""
    numbers = (3, 4, 6, 2)
    pages = sum(len(PROMPTS[n]) for n in numbers) + 4
    loop = make_loop(model, KernelConfig(total_pages=pages, page_size=1, output_reserve=0.0))
    got: dict[str, list[int]] = {f"r{n}": [] for n in numbers}
    params = SamplingParams(max_tokens=OUTPUTS, temperature=0.0, ignore_eos=True)
    for n in numbers:
        loop.submit(Generate(f"r{n}", tuple(PROMPTS[n]), params, salt=str(n)))
    while loop.has_work:
        for delta in loop.step():
            got[delta.id] += delta.tokens
        loop.kernel.check()
    assert loop.kernel.counters.retractions > 0
    for n in numbers:
        assert got[f"r{n}"] == cold[n]
