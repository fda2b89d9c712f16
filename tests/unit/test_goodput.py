"""Goodput, time-outs and busy seconds of a live engine, against a recount that reads nothing but the event
log."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections import Counter

import pytest

from hotprefix.definitions import KnownPrefixes, Slo, buckets_of, is_hot
from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.messages import Fared, Generate, Insight
from hotprefix.engine.params import SamplingParams
from hotprefix.errors import ConfigError, QueueFull
from hotprefix.kernel.plan import StepPlan
from hotprefix.records import schema as sc
from tests.support.engine import Clock, FakeEngineExecutor, fake_loop
from tests.unit.test_metrics_insight import exposed
from tests.unit.test_records_derive import Lists

PAGE = 4
SLO = Slo(ttft_s=6.0, tpot_s=1.6, completion_s=14.0, timeout_s=9.0)


def ticking(executor: FakeEngineExecutor, clock: Clock) -> list[tuple[bool, float]]:
    """Steps take seconds that depend on what they do; returns what they took, (with prefill tokens,
    seconds)."""
    took, execute = [], executor.execute

    def execute_and_wait(plan: StepPlan) -> object:
        prefill = any(c.prefill for c in plan.chunks)
        seconds = 2.0 if prefill else 1.0
        clock.now += seconds
        took.append((prefill, seconds))
        return execute(plan)

    executor.execute = execute_and_wait  # type: ignore[method-assign,assignment]
    return took


def busy(seed: int, slo: Slo | None) -> tuple[EngineLoop, list[sc.Record], list[tuple[bool, float]]]:
    """Prompts that share prefixes with prompts and answers; some are refused, aborted or end with an
    error."""
    r, recorder = random.Random(seed), Lists()
    loop, executor, clock = fake_loop(
        observer=recorder, slo=slo, max_waiting=3, max_running=2, total_pages=60
    )
    took = ticking(executor, clock)
    said: list[list[int]] = [[r.randrange(90) for _ in range(24)] for _ in range(2)]
    tokens: dict[str, list[int]] = {}
    for n in range(40):
        name, base = f"r{n}", r.choice(said)
        prompt = base[: r.choice([3, 8, 17, 40])] + [r.randrange(90) for _ in range(r.choice([1, 6, 14]))]
        if r.random() < 0.1:
            executor.poison.add(name)
        message = Generate(name, tuple(prompt), SamplingParams(max_tokens=r.choice([1, 2, 9])),
                           arrived=clock.now - r.choice([0.0, 2.0]))  # fmt: skip
        with contextlib.suppress(QueueFull):
            loop.submit(message)
            tokens[name] = prompt
        for _ in range(r.randint(0, 5)):
            for delta in loop.step():
                tokens[delta.id] = tokens[delta.id] + list(delta.tokens)
                if delta.finish is not None:
                    said.append(tokens.pop(delta.id))
        if r.random() < 0.15 and tokens:
            loop.abort(r.choice(sorted(tokens)))
    while loop.has_work:
        loop.step()
    return loop, recorder.records, took


def recount(records: list[sc.Record], slo: Slo) -> dict[str, Counter[str]]:
    """By the meaning of the words, from the log's lines alone."""
    found: dict[str, Counter[str]] = {"hot": Counter(), "cold": Counter()}
    had: set[str] = set()
    asked: dict[str, tuple[float, str]] = {}
    first: dict[str, float] = {}
    for r in records:
        if isinstance(r, sc.RequestInfo):
            known = [page in had for page in r.pages]
            leading = known.index(False) if False in known else len(known)
            hot = leading * PAGE * 2 >= r.prompt_tokens
            asked[r.request] = (r.arrived, "hot" if hot else "cold")
            had |= set(r.pages)
        elif isinstance(r, sc.Reject):
            found[asked.pop(r.request)[1]]["refused"] += 1
        elif isinstance(r, sc.FirstToken):
            first[r.request] = r.t
        elif isinstance(r, sc.End):
            arrived, heat = asked.pop(r.request)
            had |= set(r.answer or ())
            waited = first.get(r.request, r.t) - arrived
            if waited > slo.timeout_s:  # type: ignore[operator]
                found[heat]["timeouts"] += 1
            if r.reason in ("error", "abort"):
                found[heat]["failed" if r.reason == "error" else "aborted"] += 1
                continue
            gaps = (r.t - first[r.request]) / (r.outputs - 1) if r.outputs > 1 else 0.0
            good = waited <= slo.ttft_s and gaps <= slo.tpot_s and r.t - arrived <= slo.completion_s  # type: ignore[operator]
            found[heat]["good" if good else "missed"] += 1
    return found


def insight(loop: EngineLoop) -> Insight:
    found = loop.stats().insight
    assert found is not None
    return found


def counts(fared: Fared | None) -> dict[str, Counter[str]]:
    assert fared is not None
    return {heat: Counter({k: v for k, v in dataclasses.asdict(o).items() if v})
            for heat, o in fared.groups.items()}  # fmt: skip


def test_goodput_is_what_the_log_says() -> None:
    total: Counter[str] = Counter()
    for seed in range(12):
        loop, records, _ = busy(seed, SLO)
        found = counts(insight(loop).fared)
        assert found == recount(records, SLO), seed
        for heat, outcomes in found.items():
            total.update({f"{heat} {name}": n for name, n in outcomes.items()})
    outcomes = ("good", "missed", "failed", "aborted", "refused", "timeouts")
    assert {f"{heat} {name}" for heat in ("hot", "cold") for name in outcomes} == set(total), "each was met"


def test_objectives_change_no_plan() -> None:
    def plans(slo: Slo | None) -> list[str]:
        return [repr(r) for r in busy(3, slo)[1] if not isinstance(r, sc.Header)]

    assert plans(SLO) == plans(None)


def test_what_is_no_objective_is_absent() -> None:
    from tests.support.server import STATS

    loop, _, _ = busy(1, None)
    got = exposed(dataclasses.replace(STATS, insight=insight(loop)))
    assert not [name for name in got if "slo" in name]
    loop, _, _ = busy(1, Slo(ttft_s=5.0))
    got = exposed(dataclasses.replace(STATS, insight=insight(loop)))
    assert {name: value for name, value in got.items() if name.startswith("hotprefix_slo_seconds")} == {
        "hotprefix_slo_seconds{objective=ttft}": 5.0
    }
    assert not [name for name in got if "timeouts" in name]
    assert sum(v for name, v in got.items() if name.startswith("hotprefix_slo_requests_total")) == 40
    assert not [name for name in got if name.startswith("hotprefix_prediction")], "there is no L2"
    assert not [name for name in got if name.startswith(("hotprefix_oldest", "hotprefix_queue_head"))]


def test_busy_with_prefill_are_the_steps_that_had_prefill_tokens() -> None:
    loop, _, took = busy(2, None)
    assert insight(loop).prefill_busy_s == sum(seconds for prefill, seconds in took if prefill) > 0
    assert insight(loop).execute_s == sum(seconds for _, seconds in took)


def test_refresh_seconds_are_those_of_its_passes_alone() -> None:
    loop, _, clock = fake_loop(refresh_every=2)
    refresh = loop.kernel.refresh

    def slow(now: float) -> bool:
        clock.now += 3.0
        return refresh(now)

    loop.kernel.refresh = slow  # type: ignore[method-assign]
    loop.submit(Generate("a", tuple(range(9)), SamplingParams(max_tokens=7)))
    while loop.has_work:
        loop.step()
    passes = loop.kernel.counters.refresh_passes
    assert 0 < passes < loop.kernel.counters.steps
    assert insight(loop).refresh_s == 3.0 * passes


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_an_objective_that_is_none_is_refused_with_its_value(bad: float) -> None:
    with pytest.raises(ConfigError, match=rf"tpot_s={bad!r}: give seconds > 0"):
        Slo(tpot_s=bad)


# -- one meaning of hot ---------------------------------------------------------------------------


def test_hot_is_half_of_the_prompt() -> None:
    assert [bool(is_hot(known, 10)) for known in (4, 5, 6)] == [False, True, True]


def test_what_is_forgotten_is_the_oldest_chain_s_tail() -> None:
    known = KnownPrefixes(most=4)
    assert known.ask("abc") == (0, 0)
    assert known.ask("x") == (0, 0)
    assert known.ask("abz") == (2, 1), "two pages are known, one prompt had begun so"
    assert known.ask("abc") == (2, 2), "c was the oldest chain's tail"
    known.answered("q")
    assert known.ask("q") == (1, 0), "an answer is known, and no prompt had begun so"
    assert len(known) == 4
    assert known.ask("") == (0, 0)
    small = KnownPrefixes(most=3)
    small.ask("abcde")
    assert small.ask("abcde").pages == 3


def test_buckets_tile_the_numbers() -> None:
    rows = list(buckets_of("heat"))
    assert [name for _, name, _, _ in rows] == [
        "0",
        "1 to 3",
        "4 to 15",
        "16 to 63",
        "64 to 255",
        "256 and more",
    ]
    assert all(a[3] == b[2] for a, b in itertools.pairwise(rows))
