"""Requests that bring outputs which were sampled elsewhere: they go on as if this engine had sampled them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.messages import Delta, Generate
from hotprefix.engine.params import SamplingParams
from hotprefix.errors import InputError
from hotprefix.kernel.plan import Finish
from tests.support.engine import drain, fake_loop
from tests.support.fake import VOCAB, cold_run

PROMPT = tuple(range(1, 12))
SAID = cold_run(list(PROMPT), 12)


def ask(loop: EngineLoop, outputs: Sequence[int] = (), **params: object) -> list[Delta]:
    settings = SamplingParams(**({"max_tokens": 12} | params))  # type: ignore[arg-type]
    loop.submit(Generate("r", PROMPT, settings, outputs=tuple(outputs)))
    return drain(loop)["r"]


def shown(deltas: Sequence[Delta]) -> list[object]:
    """What a client sees of deltas."""
    return [(d.text, d.tokens, d.usage.completion_tokens, d.finish, d.stop_reason) for d in deltas]


@pytest.mark.parametrize("cut", range(1, 13))
@pytest.mark.parametrize("stop", [(), ("".join(chr(32 + t % 94) for t in SAID[6:9]),)])
def test_the_deltas_are_those_of_the_run_that_was_not_cut(cut: int, stop: tuple[str, ...]) -> None:
    whole = ask(fake_loop()[0], stop=stop)
    cut = min(cut, len(whole))
    loop, executor, _ = fake_loop()
    assert shown(ask(loop, SAID[:cut], stop=stop)) == shown(whole)
    assert whole[-1].finish is (Finish.STOP if stop else Finish.LENGTH)
    assert not executor.started
    loop.kernel.check()


@pytest.mark.parametrize(
    ("params", "finish", "reason"),
    [
        ({"max_tokens": 5}, Finish.LENGTH, None),
        ({"stop_token_ids": (SAID[4],)}, Finish.STOP, SAID[4]),
        ({}, Finish.STOP, None),
    ],
)
def test_a_request_that_has_ended_with_its_outputs_runs_no_step(
    params: dict[str, object], finish: Finish, reason: int | None
) -> None:
    loop, executor, _ = fake_loop(eos=[] if params else [SAID[4]])
    last = ask(loop, SAID[:5], **params)[-1]
    assert (last.finish, last.stop_reason, last.usage[:2]) == (finish, reason, (len(PROMPT), 5))
    assert loop.stats().steps == 0
    assert not executor.started
    assert not loop.has_work


class AllHeld:
    """Text that comes at the end only."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, token: int) -> tuple[str, bool, str | None]:
        self._text += f"{token},"
        return "", False, None

    def flush(self) -> str:
        return self._text


@pytest.mark.parametrize("cut", [3, 5])
def test_text_that_is_held_to_the_end_comes_then(cut: int) -> None:
    loop, _, _ = fake_loop()
    loop._make_text = lambda params: AllHeld()
    *before, last = ask(loop, SAID[:cut], max_tokens=5)
    assert [d.text for d in before] == [""] * 4
    assert last.text == "".join(f"{token}," for token in SAID[:5])


def test_a_grammar_that_is_complete_with_the_outputs_ends_the_request() -> None:
    loop, _, _ = fake_loop()
    loop._replay = lambda request, outputs: list(outputs) == SAID[:3]
    assert ask(loop, SAID[:3])[-1].finish is Finish.STOP
    assert loop.stats().steps == 0
    assert ask(loop, SAID[:2])[-1].finish is Finish.LENGTH


def test_end_tokens_before_min_tokens_do_not_end_it() -> None:
    loop, _, _ = fake_loop(eos=[SAID[1], SAID[4]])
    deltas = ask(loop, SAID[:3], min_tokens=4)
    assert [d.tokens[0] for d in deltas] == SAID[:5]
    assert deltas[-1].finish is Finish.STOP


@pytest.mark.parametrize(
    ("outputs", "params", "says"),
    [
        ([5, VOCAB], {}, f"outputs holds token id {VOCAB}"),
        ([-1], {}, "outputs holds token id -1"),
        (SAID[:5], {"max_tokens": 4}, "5 outputs are given: the request may have 4 in all"),
        ([5], {"max_tokens": 0}, "1 outputs are given: the request may have 0"),
        ([5] * 190, {"max_tokens": None}, "190 outputs are given: the request may have 189 in all"),
        (SAID[:5], {"stop_token_ids": (SAID[2],)}, "output 3 of 5 .* ends the answer"),
        (SAID[:5], {"stop": (chr(32 + SAID[1] % 94),)}, "output 2 of 5 .* ends the answer"),
    ],
)
def test_outputs_that_cannot_be_are_refused(outputs: list[int], params: dict[str, object], says: str) -> None:
    loop, executor, _ = fake_loop()
    with pytest.raises(InputError, match=says) as refused:
        ask(loop, outputs, **params)
    assert refused.value.param == "outputs"
    assert not executor.started
    assert not loop.has_work
    assert ask(loop)  # the id is free


def test_prompt_and_outputs_are_found_in_the_cache() -> None:
    loop, _, _ = fake_loop()
    ask(loop)
    last = ask(loop, SAID[:8])[-1]
    assert last.usage.prompt_tokens == len(PROMPT)
    assert last.usage.cached_tokens == (len(PROMPT) + 8 - 1) // 4 * 4


def test_times_and_counts_are_those_of_what_is_sampled_here() -> None:
    loop, _, clock = fake_loop()
    settings = SamplingParams(max_tokens=9)
    loop.submit(Generate("r", PROMPT, settings, outputs=tuple(SAID[:8])))
    clock.now = 3.0
    *given, last = drain(loop)["r"]
    assert len(given) == 8
    assert last.timing is not None
    assert (last.timing.queue, last.timing.decode) == (3.0, 0.0)
    assert loop.stats().generated_tokens == 1


def test_given_deltas_come_before_anything_else_also_when_it_is_aborted() -> None:
    loop, _, _ = fake_loop()
    loop.submit(Generate("r", PROMPT, SamplingParams(max_tokens=9), outputs=tuple(SAID[:2])))
    loop.abort("r")
    deltas = drain(loop)["r"]
    assert [d.finish for d in deltas] == [None, None, Finish.ABORT]
    loop.kernel.check()


def test_prompt_scores_are_placeholders_and_are_not_computed_again() -> None:
    """They came before the first output. The prompt may come from the cache, which it may not if they are
    wanted."""
    loop, executor, _ = fake_loop()
    loop.submit(Generate("r", PROMPT, SamplingParams(max_tokens=4, prompt_logprobs=0), outputs=(SAID[0],)))
    assert executor.started["r"].prompt_logprobs is None
    first, *rest = drain(loop)["r"]
    assert first.prompt_logprobs is not None
    assert [entry.token for entry in first.prompt_logprobs] == list(PROMPT[1:])
    assert all(delta.prompt_logprobs is None for delta in rest)
    again = ask(loop, SAID[:1], prompt_logprobs=0)
    assert again[-1].usage.cached_tokens == 8


def test_a_refusal_of_the_kernel_forgets_the_outputs() -> None:
    loop, executor, _ = fake_loop(max_waiting=1, max_running=1)
    for name in "ab":
        loop.submit(Generate(name, PROMPT, SamplingParams(max_tokens=4)))
    with pytest.raises(Exception, match="wait"):
        loop.submit(Generate("r", PROMPT, SamplingParams(max_tokens=4), outputs=(1,)))
    assert set(executor.started) == {"a", "b"}
    assert "r" not in drain(loop)
