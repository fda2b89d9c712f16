"""An engine that only waits: when its steps end, what it says, and what it refuses."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from hotprefix.cost.model import CostModel
from hotprefix.cost.presets import load_cost
from hotprefix.engine.build import build_engine
from hotprefix.engine.config import OF_A_MODEL, EngineConfig
from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.messages import EngineInfo, Generate
from hotprefix.engine.model.files import resolve_model
from hotprefix.engine.paced.answers import Answer, Words
from hotprefix.engine.paced.build import build_paced
from hotprefix.engine.paced.executor import PacedExecutor, PacedHost
from hotprefix.engine.paced.pace import MOST_BEHIND_S, Pace
from hotprefix.engine.params import SamplingParams, StructuredOutput
from hotprefix.engine.text.output import OutputText
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.errors import ConfigError, InputError, ProtocolError
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import KernelConfig, TierConfig
from hotprefix.kernel.plan import Chunk, Finish
from tests.support.engine import drain

PRESET = "llama-3.1-8b.1xh100.fp8"
WORDS = Words(first=(10, 11, 12), further=tuple(range(20, 90)), spoken=frozenset(range(10, 90)), end=2)
GREEDY = SamplingParams(max_tokens=30, temperature=0.0)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model("default").path)


class Clock:
    """A clock that only sleeping moves, and `extra` seconds more at each sleep."""

    def __init__(self, extra: float = 0.0) -> None:
        self.now, self.extra = 100.0, extra

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.extra


def paced_loop(
    clock: Clock, cost: CostModel | None = None, host: PacedHost | None = None, **config: Any
) -> tuple[EngineLoop, PacedExecutor]:
    cost = cost or load_cost(PRESET)
    kernel = KernelConfig(**({"total_pages": 4096, "page_size": 16, "max_running": 16} | config))
    executor = PacedExecutor(cost, WORDS, host, clock=clock, sleep=clock.sleep)
    tokens = kernel.total_pages * kernel.page_size
    info = EngineInfo("paced", tokens, 60_000, kernel.page_size, tokens)
    loop = EngineLoop(
        kernel, executor, info, fingerprint="paced", eos_ids=(2,), clock=clock, host=host,
        make_text=lambda params: OutputText(tokenizer(), params), pace=executor.pace.totals,
    )  # fmt: skip
    return loop, executor


def said(prompt: Sequence[int], params: SamplingParams, count: int, known: Sequence[int] = ()) -> list[int]:
    """An answer, one position a step. known: the part of it that was said elsewhere."""
    tokens = [*prompt, *known]
    answer = Answer(WORDS, prompt, params)
    if known:
        answer.replay(known)
    new, found = tokens[-1:] if known else tokens, list(known)  # all of it but the last token may be cached
    while len(found) < count:
        start = len(tokens) - len(new)
        token = answer.after(Chunk("r", 0, start, tk.encode(new), 0, (), True, False))
        found.append(token)
        tokens, new = [*tokens, token], [token]
    return found


# -- when a step ends ---------------------------------------------------------------------------------


def test_a_step_begins_when_the_last_has_ended_or_its_oldest_request_came() -> None:
    pace = Pace()
    assert pace.step(10.0, 0.5) == 10.5
    pace.ended(10.52)
    assert pace.step(10.0, 0.5) == 11.0  # the 20 ms that the last ended late come off this one
    pace.ended(11.0)
    assert pace.step(15.0, 0.5) == 15.5
    assert pace.totals.priced_s == 1.5
    assert pace.totals.lost_s == 0.0


def test_what_cannot_be_made_up_for_is_given_up_and_counted() -> None:
    pace = Pace()
    pace.step(10.0, 0.5)
    pace.ended(13.5)
    assert pace.totals.behind_s == MOST_BEHIND_S
    assert pace.totals.lost_s == pytest.approx(3.0 - MOST_BEHIND_S)
    assert pace.step(10.0, 0.5) == pytest.approx(14.0 - MOST_BEHIND_S)
    pace.ended(13.9)
    assert pace.totals.behind_s == 0.0


def test_a_request_takes_what_the_cost_model_says() -> None:
    cost, clock = load_cost(PRESET), Clock()
    loop, executor = paced_loop(clock, max_batched_tokens=2048)
    loop.submit(Generate("a", tuple(range(100, 5100)), SamplingParams(max_tokens=3, temperature=0.0)))
    deltas = drain(loop)["a"]
    expected, start = 0.0, 0
    for length in (2048, 2048, 904):
        expected += cost.prices.step_s(length, length * start + length * (length + 1) // 2, 0, 0)
        start += length
    timing = deltas[-1].timing
    assert timing is not None
    assert timing.prefill == pytest.approx(expected)
    assert timing.decode == pytest.approx(sum(cost.prices.step_s(0, 0, 1, at) for at in (5001, 5002)))
    assert executor.pace.totals.priced_s == pytest.approx(clock.now - 100.0)


def test_the_scheduler_s_time_counts_what_runs_and_what_waits() -> None:
    prices = {"scheduler_base_s": 1.0, "scheduler_running_s": 10.0, "scheduler_waiting_s": 100.0}
    cost = load_cost(PRESET).model_copy(update=prices)
    loop, executor = paced_loop(Clock(), cost, max_running=2)
    for name in ("a", "b", "c"):
        loop.submit(Generate(name, (1, 2, 3), SamplingParams(max_tokens=9)))
    loop.step()
    assert executor.pace.totals.priced_s == pytest.approx(1 + 2 * 10 + 100, abs=0.1)


def test_sleeping_too_long_does_not_slow_the_pace_down() -> None:
    exact, late = Clock(), Clock(extra=0.001)
    for clock in (exact, late):
        loop, executor = paced_loop(clock)
        loop.submit(Generate("a", tuple(range(100, 200)), GREEDY))
        drain(loop)
    assert late.now == pytest.approx(exact.now + 0.001)
    assert executor.pace.totals.lost_s == 0.0


def test_a_machine_that_is_too_slow_is_told() -> None:
    clock = Clock(extra=1.0)
    loop, _ = paced_loop(clock)
    loop.submit(Generate("a", tuple(range(100, 200)), GREEDY))
    drain(loop)
    insight = loop.stats().insight
    assert insight is not None
    assert insight.pace is not None
    assert insight.pace.lost_s > 0.5
    assert 0 < insight.pace.behind_s <= MOST_BEHIND_S


def test_restores_take_their_link_s_time_and_saves_none() -> None:
    cost = load_cost(PRESET)
    save = cost.links.save.model_copy(update={"bytes_per_s": 1e6})  # type: ignore[union-attr]
    cost = cost.model_copy(update={"links": cost.links.model_copy(update={"save": save})})
    page_bytes = 16 * cost.kv_token_bytes
    clock, host = Clock(), PacedHost(cost, page_bytes)
    tiers = TierConfig(pages=512, min_restore_pages=1, compute_s_per_token=1.0, restore_s_per_page=1e-9)
    loop, executor = paced_loop(clock, host=host, total_pages=128, tiers=tiers)
    first, other = tuple(range(100, 1700)), tuple(range(5000, 6600))
    for name, prompt in (("a", first), ("b", other), ("c", first)):
        loop.submit(Generate(name, prompt, SamplingParams(max_tokens=1)))
        found = drain(loop)[name][-1]
    assert found.usage.cached_host > 1000
    assert host.links.restored_bytes == found.usage.cached_host // 16 * page_bytes
    assert host.links.restored_s == pytest.approx(host.links.restored_bytes / 64e9)
    assert host.links.saved_s == pytest.approx(host.links.saved_bytes / 1e6)
    assert host.links.saved_bytes > 0
    assert loop.kernel.predictions is not None
    assert loop.kernel.predictions.restore.observed_s == pytest.approx(host.links.restored_s)
    assert executor.pace.totals.priced_s == pytest.approx(clock.now - 100.0)
    assert found.timing is not None
    computed = 1600 - found.usage.cached_tokens
    step = cost.prices.step_s(computed, computed * (1600 - computed) + computed * (computed + 1) // 2, 0, 0)
    assert found.timing.prefill == pytest.approx(step + host.links.restored_s)


def test_a_cost_model_without_links_has_no_l2() -> None:
    cost = load_cost(PRESET)
    bare = cost.model_copy(update={"links": cost.links.model_copy(update={"restore": None})})
    with pytest.raises(ConfigError, match="knows no links to L2: leave out l2_tokens"):
        PacedHost(bare, 1)


# -- what it says -------------------------------------------------------------------------------------


def test_an_answer_that_was_begun_elsewhere_goes_on_equally() -> None:
    prompt = list(range(300, 340))
    for params in (GREEDY, SamplingParams(max_tokens=30, seed=5)):
        whole = said(prompt, params, 30)
        for cut in (1, 7, 29):
            assert said(prompt, params, 30, known=whole[:cut]) == whole
    assert len(set(said(prompt, GREEDY, 30))) > 15


def test_answers_depend_on_the_whole_prompt_and_if_sampled_on_the_seed() -> None:
    prompt = list(range(300, 340))
    seeds = [said(prompt, SamplingParams(max_tokens=9, seed=seed), 9) for seed in (None, 1, 2, -1)]
    assert len({tuple(one) for one in seeds}) == 4
    greedy = [SamplingParams(max_tokens=9, temperature=0.0, seed=seed) for seed in (None, 1)]
    assert said(prompt, greedy[0], 9) == said(prompt, greedy[1], 9) == seeds[0]
    assert said([1, *prompt[1:]], GREEDY, 9) != seeds[0]


def test_answers_do_not_depend_on_chunks_batches_caches_or_retractions() -> None:
    r = random.Random(4)
    shared = [r.randrange(100, 5000) for _ in range(200)]
    prompts = {f"r{i}": (*shared[: r.randint(1, 200)], 100 + i) for i in range(12)}
    params = {name: SamplingParams(max_tokens=40, seed=r.choice([None, 1, 2])) for name in prompts}
    alone = {name: said(prompt, params[name], 40) for name, prompt in prompts.items()}
    for config in (
        {},
        {"total_pages": 20, "max_batched_tokens": 32, "output_reserve": 0.0},
        {"prefix_cache": False},
    ):
        loop, _ = paced_loop(Clock(), **config)
        for name, prompt in prompts.items():
            loop.submit(Generate(name, prompt, params[name]))
        found = drain(loop)
        assert {n: [t for d in deltas for t in d.tokens] for n, deltas in found.items()} == alone
        assert ("total_pages" in config) == (loop.stats().retractions > 0)


def test_tokens_that_were_never_told_are_no_answer() -> None:
    answer = Answer(WORDS, [1, 2, 3], GREEDY)
    with pytest.raises(ProtocolError, match="3 tokens are known, its chunk begins at 5"):
        answer.after(Chunk("r", 0, 5, tk.encode([9]), 0, (), True, False))


def test_an_answer_without_a_length_ends_by_itself() -> None:
    free = SamplingParams(temperature=0.0)
    lengths = []
    for first in range(200):
        found = said([first, 7], free, 2000)
        lengths.append(found.index(WORDS.end))
        assert WORDS.end not in said([first, 7], SamplingParams(temperature=0.0, ignore_eos=True), 300)
        assert WORDS.end not in said([first, 7], SamplingParams(temperature=0.0, max_tokens=300), 300)
    assert 200 < sum(lengths) / len(lengths) < 320
    held = said([3, 7], SamplingParams(temperature=0.0, min_tokens=1500), 3000)
    assert held.index(WORDS.end) >= 1499


def test_its_text_becomes_the_same_tokens_again() -> None:
    words, tokens = Words.of(tokenizer()), tokenizer()
    for first in range(5):
        prompt = [*tokens.encode(f"question {first}"), *tokenizer().eos_ids]
        answer = Answer(words, prompt, GREEDY)
        said_, new, at = [], prompt, 0
        for _ in range(40):
            token = answer.after(Chunk("r", 0, at, tk.encode(new), 0, (), True, False))
            at, new = at + len(new), [token]
            said_.append(token)
        text = tokens.decode(said_)
        assert text[0].isupper()
        again = tokens.encode(text)
        same = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(again, said_, strict=False))
        )
        assert same >= 38, text


# -- what it refuses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(structured=StructuredOutput("regex", "a+")), "response_format"),
        (SamplingParams(logprobs=0), "logprobs"),
        (SamplingParams(prompt_logprobs=2), "prompt_logprobs"),
    ],
)
def test_what_needs_logits_is_refused(params: SamplingParams, param: str) -> None:
    loop, executor = paced_loop(Clock())
    with pytest.raises(InputError, match="no model whose logits could tell") as refused:
        loop.submit(Generate("a", (1, 2), params))
    assert refused.value.param == param
    assert not loop.has_work
    assert not executor._came


def test_an_aborted_request_is_forgotten() -> None:
    loop, executor = paced_loop(Clock())
    loop.submit(Generate("a", (1, 2), SamplingParams(max_tokens=1000)))
    loop.step()
    loop.abort("a")
    assert drain(loop)["a"][-1].finish is Finish.ABORT
    assert not executor._came
    assert not executor._answers


VALUES: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "decode_weights": "dense", "threads": 1, "window_tokens": 0,
    "l3": "file:///tmp/pages",
}  # fmt: skip


@pytest.mark.parametrize("name", OF_A_MODEL)
def test_options_of_a_model_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.* does nothing with paced, which has no model"):
        EngineConfig(paced=PRESET, l2_tokens=1024, **{name: VALUES[name]})


def test_building_it_loads_no_torch_and_an_unknown_preset_is_named() -> None:
    code = (
        "import sys\nfrom hotprefix.engine.config import EngineConfig\n"
        "from hotprefix.server.serve import build\n"
        f"loop = build(EngineConfig(paced={PRESET!r}, pace_factor=2.0), print)\n"
        "print('torch' in sys.modules, loop.info.cost['base_s'], loop.info.details['kv_token_bytes'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    cost = load_cost(PRESET)
    assert done.stdout.splitlines()[-1] == f"False {2 * cost.base_s} {cost.kv_token_bytes}"
    with pytest.raises(InputError, match=r"cost 'nope': neither a file nor a preset"):
        build_paced(EngineConfig(paced="nope"))


@pytest.mark.parametrize("build", [build_engine, build_paced])
def test_the_library_builds_the_same_engine_and_a_cost_model_can_be_told_in_its_place(
    build: Callable[[EngineConfig], EngineLoop],
) -> None:
    loop = build(EngineConfig(paced=PRESET, cost="smollm2-135m.cpu-1-thread", kv_tokens=1024))
    assert loop.info.cost is not None
    assert loop.info.cost["name"] == "smollm2-135m.cpu-1-thread"
    assert loop.info.kv_tokens == loop.info.max_model_len == 1024
