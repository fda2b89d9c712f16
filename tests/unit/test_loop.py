"""The engine loop over the fake executor: stops, limits, failures, terminal deltas."""

from __future__ import annotations

import pytest

from hotprefix.engine.messages import Delta, Generate
from hotprefix.engine.params import SamplingParams
from hotprefix.errors import ContextLengthExceeded, InputError, QueueFull
from hotprefix.kernel.plan import Finish
from tests.support.engine import drain, fake_loop
from tests.support.fake import VOCAB, cold_run

PROMPT = tuple(range(1, 24))


def ask(
    name: str = "a", prompt: tuple[int, ...] = PROMPT, deadline: float | None = None, **params: object
) -> Generate:
    params.setdefault("max_tokens", 8)
    return Generate(name, prompt, SamplingParams(**params), deadline=deadline)  # type: ignore[arg-type]


def tokens(deltas: list[Delta]) -> list[int]:
    return [t for d in deltas for t in d.tokens]


def test_outputs_equal_the_uncached_run_and_end_once() -> None:
    loop, executor, _ = fake_loop()
    for name in ("a", "b", "c"):
        loop.submit(ask(name))
    found = drain(loop)
    for name in ("a", "b", "c"):
        assert tokens(found[name]) == cold_run(list(PROMPT), 8)
        assert [d.finish for d in found[name]][-1] is Finish.LENGTH
        assert sum(d.finish is not None for d in found[name]) == 1
    assert found["b"][-1].usage.cached_tokens == 20
    assert found["b"][-1].usage.completion_tokens == 8
    assert not executor.started


def test_end_token_stops_and_its_text_is_not_shown() -> None:
    third = cold_run(list(PROMPT), 3)[2]
    loop, _, _ = fake_loop(eos=(third,))
    loop.submit(ask())
    loop.submit(ask("on", ignore_eos=True))
    found = drain(loop)
    assert found["a"][-1].finish is Finish.STOP
    assert len(tokens(found["a"])) == cold_run(list(PROMPT), 3).index(third) + 1
    assert len("".join(d.text for d in found["a"])) == len(tokens(found["a"])) - 1
    assert found["on"][-1].finish is Finish.LENGTH


def test_first_token_may_end_the_request() -> None:  # rule 50
    loop, _, _ = fake_loop(eos=(cold_run(list(PROMPT), 1)[0],))
    loop.submit(ask())
    (only,) = drain(loop)["a"]
    assert (only.text, only.finish, only.usage.completion_tokens) == ("", Finish.STOP, 1)
    loop.submit(ask("next", prompt=(*PROMPT, 5, 6), max_tokens=2, ignore_eos=True))
    assert tokens(drain(loop)["next"]) == cold_run([*PROMPT, 5, 6], 2)


def test_stop_string_ends_in_its_step_and_nothing_beyond_is_computed() -> None:  # rule 46
    text = "".join(chr(32 + t % 94) for t in cold_run(list(PROMPT), 8))
    loop, _, _ = fake_loop()
    loop.submit(ask(stop=(text[2:4],)))
    found = drain(loop)["a"]
    at = text.index(text[2:4]) + 2
    assert len(tokens(found)) == at
    assert (found[-1].finish, found[-1].stop_reason) == (Finish.STOP, text[2:4])
    computed = loop.kernel.counters
    assert computed.computed_prompt_tokens + computed.computed_output_tokens == len(PROMPT) + at - 1


@pytest.mark.parametrize(
    ("length", "wanted", "ok"),
    [(199, 1, True), (200, 1, False), (201, 1, False), (150, 51, False), (150, 50, True)],
)
def test_context_limit_is_exact_and_says_its_numbers(
    length: int, wanted: int, ok: bool
) -> None:  # 71, 92, 141
    loop, executor, _ = fake_loop()
    message = ask(prompt=(3,) * length, max_tokens=wanted)
    if ok:
        loop.submit(message)
        assert len(tokens(drain(loop)["a"])) == wanted
        return
    with pytest.raises(ContextLengthExceeded, match=rf"{length}.*200") as caught:
        loop.submit(message)
    assert caught.value.code == "context_length_exceeded"
    assert not executor.started
    loop.submit(ask("b"))
    assert len(tokens(drain(loop)["b"])) == 8


def test_without_max_tokens_the_context_is_the_limit() -> None:
    loop, _, _ = fake_loop(max_model_len=40)
    loop.submit(ask(max_tokens=None))
    assert len(tokens(drain(loop)["a"])) == 40 - len(PROMPT)


@pytest.mark.parametrize("prompt", [(), (VOCAB,), (-1,), (2**63,)])
def test_bad_prompt_ids_are_refused_and_leave_nothing(prompt: tuple[int, ...]) -> None:  # 84, 144
    loop, executor, _ = fake_loop()
    with pytest.raises(InputError):
        loop.submit(ask(prompt=prompt))
    assert not loop.has_work
    assert not executor.started


def test_a_used_id_is_refused_and_the_first_goes_on() -> None:
    loop, _, _ = fake_loop()
    loop.submit(ask())
    with pytest.raises(InputError, match="in use"):
        loop.submit(ask())
    assert tokens(drain(loop)["a"]) == cold_run(list(PROMPT), 8)


def test_full_queue_is_refused() -> None:
    loop, executor, _ = fake_loop(max_waiting=1, max_running=1)
    for name in ("a", "b"):
        loop.submit(ask(name))
    with pytest.raises(QueueFull, match="limit is 1"):
        loop.submit(ask("c"))
    assert set(executor.started) == {"a", "b"}


def test_abort_gives_the_terminal_delta_with_the_next_step() -> None:
    loop, executor, _ = fake_loop()
    loop.submit(ask())
    loop.step()
    loop.abort("a")
    loop.abort("a")
    loop.abort("unknown")
    assert loop.has_work
    (last,) = loop.step()
    assert last.finish is Finish.ABORT
    assert not loop.has_work
    assert not executor.started
    loop.kernel.check()


def test_deadline_is_honoured_while_waiting_and_running() -> None:
    loop, _, clock = fake_loop(max_running=1)
    loop.submit(ask("runs", deadline=5.0, max_tokens=50))
    loop.submit(ask("waits", prompt=(9, 9, 9), deadline=3.0))
    loop.step()
    clock.now = 4.0
    assert {d.id: d.finish for d in loop.step() if d.finish} == {"waits": Finish.ABORT}
    clock.now = 6.0
    (last,) = [d for d in loop.step() if d.finish]
    assert "deadline" in (last.error or "")
    assert not loop.has_work


def test_a_failed_step_is_retried_and_changes_no_output() -> None:
    loop, executor, _ = fake_loop()
    loop.submit(ask("a"))
    loop.submit(ask("b", prompt=(*PROMPT[:12], 7)))
    loop.step()
    executor.raise_next = 1
    found = drain(loop)
    assert loop.kernel.counters.failed_steps == 1
    assert found["a"][-1].finish is Finish.LENGTH
    assert found["b"][-1].finish is Finish.LENGTH
    assert tokens(found["b"])[-1] == cold_run([*PROMPT[:12], 7], 8)[-1]


def test_a_poisonous_request_ends_alone_with_an_error() -> None:
    loop, executor, _ = fake_loop()
    executor.poison = {"bad"}
    for name in ("a", "bad", "b"):
        loop.submit(ask(name, prompt=(*PROMPT, ord(name[0]) % 50)))
    found = drain(loop)
    assert found["bad"][-1].finish is Finish.ERROR
    assert "poisonous" in (found["bad"][-1].error or "")
    for name in ("a", "b"):
        assert tokens(found[name]) == cold_run([*PROMPT, ord(name[0]) % 50], 8)
    loop.kernel.check()


def test_a_request_that_nothing_can_be_sampled_for_ends_and_the_step_is_good_for_the_others() -> None:
    loop, executor, _ = fake_loop()
    for name in ("a", "bad", "b"):
        loop.submit(ask(name, prompt=(*PROMPT, ord(name[0]) % 50)))
    first = {delta.id: delta for delta in loop.step()}
    executor.fake.unsampled = {"bad"}
    second = {delta.id: delta for delta in loop.step()}
    assert (second["bad"].finish, second["bad"].error) == (Finish.ERROR, "nothing can be said for bad")
    assert (second["bad"].tokens, second["bad"].usage.completion_tokens) == ((), 1)
    assert len(second["a"].tokens) == len(second["b"].tokens) == 1
    assert set(executor.started) == {"a", "b"}
    rest = drain(loop)
    for name in ("a", "b"):
        said = tokens([first[name], second[name], *rest[name]])
        assert said == cold_run([*PROMPT, ord(name[0]) % 50], 8)
    count = loop.kernel.counters
    assert (count.failed_steps, count.retractions, count.failed, count.steps) == (0, 0, 1, 8)
    loop.kernel.check()


def test_timing_is_never_negative_and_absent_where_it_never_happened() -> None:  # rule 58
    loop, _, clock = fake_loop(max_running=1)
    loop.submit(ask("a", max_tokens=2))
    loop.submit(ask("b", prompt=(4, 4, 4)))
    clock.now = 1.5
    loop.step()
    loop.abort("b")
    clock.now = 2.0
    found = {d.id: d for d in [*loop.step(), *drain(loop).get("a", [])] if d.finish}
    assert found["a"].timing is not None
    assert (found["a"].timing.queue, found["a"].timing.decode) == (1.5, 0.5)
    assert found["b"].timing is not None
    assert found["b"].timing.queue is None


def test_flush_says_what_it_could_not_drop() -> None:
    loop, _, _ = fake_loop()
    loop.submit(ask("a", max_tokens=2))
    drain(loop)
    loop.submit(ask("b", max_tokens=3))
    loop.step()
    report = loop.flush_cache()
    assert (report.running, report.complete) == (1, False)
    drain(loop)
    assert loop.flush_cache().complete
    assert loop.stats().free_pages == loop.stats().total_pages


def test_a_session_keeps_its_pages_for_its_time_and_no_longer() -> None:
    loop, _, clock = fake_loop(session_pages=16)
    loop.submit(Generate("a", PROMPT, SamplingParams(max_tokens=4), session="s", hold_s=10.0))
    drain(loop)
    held = loop.stats().protected_pages
    assert held == (len(PROMPT) + 3) // 4
    clock.now = 9.0
    loop.submit(ask("b", prompt=(50, 51, 52), max_tokens=1))
    drain(loop)
    assert loop.stats().protected_pages == held
    clock.now = 10.0
    loop.submit(ask("c", prompt=(60, 61, 62), max_tokens=1))
    drain(loop)
    assert loop.stats().protected_pages == 0
