"""Models with attention windows on pools of their own: greedy float32 output equals the uncached run's
and transformers', token by token, also after frames were evicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from tiny_models import load_like, make_ops, one_thread, reference_model

from hotprefix.engine.config import EngineConfig
from hotprefix.engine.groups import kernel_config, pool_of_layers
from hotprefix.engine.kvpool import KVPool
from hotprefix.engine.live_request import TokensOnly
from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.messages import EngineInfo, Generate
from hotprefix.engine.model.config import ModelConfig
from hotprefix.engine.model.hf_config import from_hf
from hotprefix.engine.model.loader import LoadedModel
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.sampling.sampler import Sampler
from hotprefix.engine.torch_executor import TorchExecutor
from hotprefix.errors import ConfigError
from hotprefix.kernel.config import Flight, KernelConfig, LayerGroup, Publication

WINDOW, OUTPUTS = 21, 6
COMMON = [(37 * n) % 140 + 5 for n in range(110)]
TAILS = [[(91 * n + 13 * t) % 140 + 5 for n in range(length)] for t, length in enumerate((1, 9, 26))]
# Branches at several depths, a short prompt, one whose window ends in another's middle, and repeats.
PROMPTS = [
    *[COMMON + tail for tail in TAILS], COMMON[:40] + TAILS[2], [7, 8, 9], TAILS[2] + COMMON[:30],
    COMMON[:64], COMMON[:90], COMMON + TAILS[1],
]  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows only": ("Mistral", {"sliding_window": WINDOW}),
    "mixed layers": (
        "Qwen2",
        {
            "use_sliding_window": True, "sliding_window": WINDOW, "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}  # fmt: skip
ARMS = [
    *product(Publication, (Flight.COALESCED,)),
    *product((Publication.FINISH, Publication.SCHEDULE), (Flight.NONE, Flight.EXACT_PREFILL)),
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module", params=list(product(MODELS, ("torch", "native"))), ids="-".join)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedModel, list[list[int]]]:
    """A model, and transformers' own answer to each prompt."""
    name, ops = request.param
    family, options = MODELS[name]
    model = reference_model(family, **options)
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        said = model.generate(ids, max_new_tokens=OUTPUTS, do_sample=False, eos_token_id=None)
        answers.append(said[0, len(prompt) :].tolist())
    assert len({tuple(answer) for answer in answers}) >= 7
    return load_like(model, tmp_path_factory.mktemp("model"), make_ops(ops)), answers


def make_loop(model: LoadedModel, config: KernelConfig) -> EngineLoop:
    decoder = model.decoder
    pool = KVPool.allocate(
        decoder.config, config.total_pages, config.page_size, decoder.dtype, decoder.device, config.groups
    )
    tokens = config.total_pages * config.page_size
    info = EngineInfo("tiny", tokens, decoder.config.vocab_size, config.page_size, tokens)
    executor = TorchExecutor(decoder, pool, Sampler(decoder.config.vocab_size, decoder.device))
    return EngineLoop(
        config, executor, info, fingerprint="tiny", eos_ids=(), make_text=lambda _: TokensOnly()
    )


def answer(loop: EngineLoop, prompts: list[list[int]], together: int) -> list[list[int]]:
    """Outputs of the prompts, `together` of them submitted at a time."""
    outputs: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(prompts), together):
        for i in range(first, min(first + together, len(prompts))):
            params = SamplingParams(max_tokens=OUTPUTS, temperature=0.0, ignore_eos=True)
            loop.submit(Generate(str(i), tuple(prompts[i]), params))
        while loop.has_work:
            for delta in loop.step():
                outputs[int(delta.id)] += delta.tokens
    return outputs


def windowed(page: int, spare: int, **config: Any) -> KernelConfig:
    """Frames for one window and `spare` tokens."""
    frames = -(-(WINDOW - 1) // page) + 1 + -(-spare // page)
    group = LayerGroup(frames, WINDOW)
    return KernelConfig(total_pages=-(-1200 // page), page_size=page, groups=(group,), **config)


def check(loaded: tuple[LoadedModel, list[list[int]]], shape: tuple[int, int], arms: list[Any]) -> None:
    """Alone without a cache, windows kept like full attention; then under every arm with few frames and
    with more, one at a time and three at once."""
    model, expected = loaded
    page, budget = shape
    plain = KernelConfig(total_pages=-(-200 // page), page_size=page, prefix_cache=False, flight=Flight.NONE)
    assert answer(make_loop(model, plain), PROMPTS, 1) == expected
    for publication, flight in arms:
        for spare, together in ((0, 3), (40, 1), (150, 3)):
            config = windowed(
                page, spare, max_batched_tokens=budget, max_running=8, publication=publication, flight=flight
            )
            loop = make_loop(model, config)
            assert answer(loop, PROMPTS, together) == expected, (publication, flight, spare)
            loop.kernel.check()
            assert loop.kernel.status().groups[0].evicted > 0 or spare == 150


@pytest.mark.parametrize("shape", [(4, 33), (16, 64)], ids=str)
def test_equals_the_uncached_run(loaded: tuple[LoadedModel, list[list[int]]], shape: tuple[int, int]) -> None:
    check(loaded, shape, [ARMS[0], ARMS[-1]])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 64), (4, 9), (16, 33), (16, 512)], ids=str)
def test_equals_the_uncached_run_in_every_arm(
    loaded: tuple[LoadedModel, list[list[int]]], shape: tuple[int, int]
) -> None:
    check(loaded, shape, ARMS)


def test_a_stale_frame_may_hold_anything(loaded: tuple[LoadedModel, list[list[int]]]) -> None:
    """What lies before a window is loaded with it by some kernels, and must not count, nor harm: here every
    frame that no window covers holds NaN before each step."""
    model, expected = loaded
    loop = make_loop(model, windowed(4, 40, max_batched_tokens=33, max_running=8))
    pool, group = loop._executor._pool, loop.kernel._s.l1.groups[0]

    def poison(plan: Any, execute: Any = loop._executor.execute) -> Any:
        held = {frame for page, frame in enumerate(group._frame) if frame >= 0}
        for layer, place in enumerate(pool.group_of):
            rows = pool.values[layer].view(-1, 4, *pool.values[layer].shape[1:])
            for frame in set(range(group.total)) - held if place else ():
                rows[frame] = torch.nan
        return execute(plan)

    loop._executor.execute = poison  # type: ignore[method-assign]
    assert answer(loop, PROMPTS, 3) == expected


def shaped(*windows: int | None, positions: int = 4096) -> ModelConfig:
    raw = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": len(windows), "num_attention_heads": 2, "max_position_embeddings": positions,
    }  # fmt: skip
    return replace(from_hf(raw), windows=windows)


@pytest.mark.parametrize(
    ("windows", "settings", "pages", "groups"),
    [
        ((None, None), {}, 2048, []),
        ((512, 512), {}, 8192, [(2048, 512)]),
        ((512, 512), {"window_tokens": 0}, 2048, []),
        ((512, 512), {"window_tokens": 1024}, 256, [(64, 512)]),
        ((512, None), {}, 2048, []),
        ((512, None, 512), {"window_tokens": 1024}, 2048, [(64, 512)]),
        ((512, 64), {"kv_tokens": 1600}, 400, [(100, 64), (100, 512)]),
        ((4096, 4096), {}, 2048, []),  # as long as the context: none
        ((512, 512), {"kv_tokens": 512}, 32, []),  # too small for a window of its own
        ((512, 512), {"l2_tokens": 4096}, 2048, []),
        ((512, 512), {"kv_events": "tcp://127.0.0.1:1"}, 2048, []),
    ],
)
def test_which_models_get_pools_of_their_own(
    windows: tuple[int | None, ...], settings: dict[str, Any], pages: int, groups: list[tuple[int, int]]
) -> None:
    kernel = kernel_config(EngineConfig(**settings), shaped(*windows))
    assert kernel.total_pages == pages
    assert [(group.frames, group.window) for group in kernel.groups] == groups


@pytest.mark.parametrize(
    ("windows", "settings", "message"),
    [
        ((None,), {"window_tokens": 64}, "window_tokens=64: no layer"),
        ((512,), {"window_tokens": 527}, "window_tokens=527: a window of 512 tokens needs 528"),
        ((512,), {"window_tokens": 1024, "l2_tokens": 64}, "window_tokens=1024: L2 and L3"),
        ((512,), {"window_tokens": 1024, "kv_events": "tcp://127.0.0.1:1"}, "window_tokens=1024: KV events"),
        ((512,), {"window_tokens": -1}, "window_tokens=-1: give a whole number >= 0"),
    ],
)
def test_pools_that_cannot_be_had(
    windows: tuple[int | None, ...], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kernel_config(EngineConfig(**settings), shaped(*windows))


def test_a_pool_holds_each_group_s_frames() -> None:
    model = shaped(512, None, 64)
    groups = (LayerGroup(5, 64), LayerGroup(40, 512))
    pool = KVPool.allocate(model, 100, 16, torch.float32, torch.device("cpu"), groups)
    assert pool.group_of == pool_of_layers(model, groups) == (2, 0, 1)
    assert [len(keys) for keys in pool.keys] == [656, 1600, 96]
    assert [len(values) for values in pool.values] == [656, 1600, 96]
    with pytest.raises(ConfigError, match="no recurrent state"):
        KVPool.allocate(model, 9, 16, torch.float32, torch.device("cpu"), (LayerGroup(4),))
