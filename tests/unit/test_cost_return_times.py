"""Predicted waits: where they begin, where they go, and that they know no future."""

from __future__ import annotations

import numpy as np
import pytest

from hotprefix.cost.answer_lengths import AnswerLengths
from hotprefix.cost.return_times import PUBLISHED, TOOL, USER, Spread, ThinkTimes
from hotprefix.errors import ConfigError


def test_it_begins_with_the_published_figures() -> None:
    half, most = ThinkTimes(), ThinkTimes(0.9)
    assert [half.expected(TOOL), half.expected(USER)] == pytest.approx([9, 97])
    assert [most.expected(TOOL), most.expected(USER)] == pytest.approx([72, 1277])
    assert half.expected(None) == half.expected("cron") == half.expected(USER)


def test_one_wait_moves_it_a_little_and_only_its_kind() -> None:
    times = ThinkTimes()
    times.learn(TOOL, 1.0)
    lower = times.expected(TOOL)
    assert 6 < lower < 9
    assert times.expected(USER) == pytest.approx(97)
    times.learn(TOOL, 100.0)
    assert lower < times.expected(TOOL) < 9.1


@pytest.mark.parametrize("quantile", [0.25, 0.5, 0.9])
@pytest.mark.parametrize(("median", "sigma"), [(9.0, 1.62), (2.0, 0.7), (300.0, 2.0)])
def test_it_comes_to_the_quantile_of_what_it_sees(quantile: float, median: float, sigma: float) -> None:
    rng = np.random.default_rng(1)
    waits = median * np.exp(sigma * rng.standard_normal(20_000))
    times = ThinkTimes(quantile)
    for seconds in waits:
        times.learn(TOOL, float(seconds))
    assert np.mean(waits <= times.expected(TOOL)) == pytest.approx(quantile, abs=0.02)


def test_waits_of_nothing_do_not_upset_it() -> None:
    times = ThinkTimes()
    for n in range(5000):
        times.learn(USER, 0.0 if n % 5 == 0 else 50.0 + n % 7)
    assert 50 <= times.expected(USER) <= 57


def test_what_it_says_depends_on_the_past_alone() -> None:
    first, second = ThinkTimes(), ThinkTimes()
    said = []
    for seconds in (3.0, 40.0, 9.0):
        said.append(first.expected(TOOL))
        first.learn(TOOL, seconds)
    assert said == [second.expected(TOOL)] + [_after(second, s) for s in (3.0, 40.0)]


def _after(times: ThinkTimes, seconds: float) -> float:
    times.learn(TOOL, seconds)
    return times.expected(TOOL)


@pytest.mark.parametrize("quantile", [0.0, 1.0, -1.0, float("nan")])
def test_a_quantile_that_is_none_is_refused(quantile: float) -> None:
    with pytest.raises(ConfigError, match="quantile="):
        ThinkTimes(quantile)


def test_spread() -> None:
    assert PUBLISHED[TOOL].sigma == pytest.approx(1.6226, abs=1e-4)
    assert Spread(1.0, 1.0).sigma == 0.0


def test_answers_are_expected_to_be_as_long_as_those_that_ended() -> None:
    lengths = AnswerLengths()
    assert lengths.expected == 256
    for tokens in (100, 100, 100):
        lengths.learn(tokens)
    assert lengths.expected == round((256 + 300) / 4)
    for _ in range(10_000):
        lengths.learn(0)
    assert lengths.expected == 1
