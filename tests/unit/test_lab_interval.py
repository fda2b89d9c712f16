"""Intervals keep their level and their width: known answers, laws of exact tests, and coverage by
simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.special import stdtrit

from hotprefix.lab.interval import Paired, difference, fewest, ratio

Floats = NDArray[np.float64]
LEVELS = (0.90, 0.95, 0.975, 1 - 0.05 / 3, 0.9875, 0.99, 0.995)
# The same policy against the same baseline in eight sections: five of them near -60, three near -86.
NEAR_TWO_VALUES = np.array([-60.0, -61.0, -60.5, -60.0, -61.0, -86.0, -85.5, -86.0])


def paired(arm: Floats, base: Floats | float = 0.0) -> Paired:
    """Sections whose mean is the whole's figure."""
    cut = np.stack([np.broadcast_to(np.asarray(base, dtype=float), arm.shape), arm], axis=1)
    return Paired(float(cut[:, 0].mean()), float(cut[:, 1].mean()), cut)


def student(each: Floats, level: float) -> tuple[float, float]:
    reach = float(stdtrit(len(each) - 1, (1 + level) / 2) * each.std(ddof=1) / len(each) ** 0.5)
    return float(each.mean()) - reach, float(each.mean()) + reach


# -- known answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_where_signs_cannot_tell_it_is_students_interval(count: int) -> None:
    each = np.random.default_rng(count).normal(3.0, 1.0, count)
    level = 0.9951
    assert fewest(level) > count
    scipys = stats.t.interval(level, count - 1, each.mean(), stats.sem(each))
    assert difference(paired(each), level) == pytest.approx(scipys)


def test_nearly_equal_sections_do_not_blow_an_interval_up() -> None:
    for level in LEVELS:
        t = student(NEAR_TWO_VALUES, level)
        low, high = difference(paired(NEAR_TWO_VALUES), level)
        assert low <= t[0] + 1e-9
        assert t[1] - 1e-9 <= high
        assert high - low < 1.25 * (t[1] - t[0])


@pytest.mark.parametrize("count", [6, 8, 10])
def test_the_ends_are_those_of_the_exact_sign_flip_test(count: int) -> None:
    """Two values only: there Student's t is too sure, and the sign flips decide."""
    each = np.array([-1.0] + [1.0] * (count - 1)) + np.linspace(0, 0.01, count)
    level = 0.95
    low, high = difference(paired(each), level)
    t = student(each, level)
    assert low < t[0] or high > t[1]
    for end, inner in ((low, t[0]), (high, t[1])):
        if not math.isclose(end, inner):
            inside = end + 1e-6 * (1 if end == low else -1)
            beyond = end - 1e-6 * (1 if end == low else -1)
            assert flip_p(each - inside) > 1 - level
            assert flip_p(each - beyond) <= 1 - level + 1e-12


def flip_p(each: Floats) -> float:
    """scipy's exact two-sided p of the sign-flip test."""
    found = stats.permutation_test((each,), np.mean, permutation_type="samples", n_resamples=np.inf)
    return float(found.pvalue)


@pytest.mark.parametrize("level", LEVELS)
def test_equal_sections_give_their_value(level: float) -> None:
    for count in (2, 8, 40, 200):
        assert difference(paired(np.full(count, -7.0)), level) == pytest.approx((-7.0, -7.0))
        base = np.linspace(5.0, 9.0, count)
        assert count == 2 or ratio(paired(0.125 * base, base), level, signed=False) == pytest.approx(
            (0.125, 0.125)
        )


def test_how_many_sections_of_one_sign_are_not_chance() -> None:
    assert [fewest(level) for level in LEVELS] == [5, 6, 7, 7, 8, 8, 9]
    for level in LEVELS:
        assert 2 / 2 ** fewest(level) <= 1 - level + 1e-12 < 2 / 2 ** (fewest(level) - 1) + 1e-9


# -- a ratio ------------------------------------------------------------------------------------------


def test_the_ends_of_a_ratio_are_where_students_test_turns() -> None:
    rng = np.random.default_rng(5)
    base = rng.gamma(9.0, size=8)
    arm = 0.4 * base + rng.normal(0, 0.4, 8)
    level = 0.9951  # sign flips cannot tell
    low, high = ratio(paired(arm, base), level, signed=False)
    for end in (low, high):
        assert stats.ttest_1samp(arm - end * base, 0.0).pvalue == pytest.approx(1 - level, rel=1e-6)


def test_nothing_falls_by_more_than_all_of_it() -> None:
    base = np.array([9.0, 1.0, 30.0, 2.0, 4.0, 15.0, 3.0, 8.0])
    arm = 0.13 * base[::-1]
    for level in LEVELS:
        low, high = ratio(paired(arm, base), level, signed=False)
        assert 0.0 <= low < arm.mean() / base.mean() < high
    # A net figure may change its sign.
    assert ratio(paired(arm - 5.0, base), 0.95, signed=True)[0] < 0


def test_what_varies_in_both_arms_alike_does_not_widen_a_ratio() -> None:
    base = np.array([50.0, 200, 80, 120, 90, 60, 300, 100])
    arm = 0.13 * base * np.array([1, 1.1, 0.9, 1, 1.05, 0.95, 1, 1])
    low, high = ratio(paired(arm, base), 0.9875, signed=False)
    assert 0.10 < low < high < 0.16
    wide = difference(paired(arm, base), 0.9875)
    assert (wide[1] - wide[0]) / base.mean() > 20 * (high - low)


def test_a_ratio_to_what_may_be_nothing_has_no_upper_end() -> None:
    base = np.array([0.0, 0, 0, 0, 0, 0, 0, 8.0])
    arm = np.array([0.0, 0, 0, 0, 1.0, 0, 0, 7.0])
    low, high = ratio(paired(arm, base), 0.95, signed=False)
    assert high == math.inf
    assert low == 0.0


def test_sections_without_anything_in_the_baseline_do_not_hide_a_rise() -> None:
    """In most sections the baseline served nothing in time, and the arm served 36 a second in all of them:
    that is a rise, however little is known of its size."""
    base = np.array([0.0, 0.0, 0.0, 0.9, 0.0, 0.2, 0.0, 0.0])
    arm = np.array([36.0, 35.0, 37.0, 36.0, 36.5, 35.5, 36.0, 36.0])
    low, high = ratio(paired(arm, base), 0.95, signed=False)
    assert 1.0 < low < arm.mean() / base.mean()
    assert high == math.inf
    low, high = ratio(paired(base, arm), 0.95, signed=False)
    assert low == 0.0
    assert high < 0.1


def test_difference_and_ratio_agree_on_whether_there_is_a_change() -> None:
    rng = np.random.default_rng(6)
    clear = 0
    for number in range(600):
        count = int(rng.choice([2, 4, 8, 9, 13, 30]))
        sigma = rng.choice([0.2, 1.0, 2.0])
        common = rng.normal(size=count)
        base, arm = (np.exp(sigma * (common + 0.5 * rng.normal(size=count))) for _ in range(2))
        pair = paired(arm * rng.choice([1.0, 0.7, 0.2]), base)
        level = LEVELS[number % len(LEVELS)]
        low, high = difference(pair, level)
        below, above = ratio(pair, level, signed=False)
        assert below <= pair.arm / pair.base <= above
        assert (low <= 0 <= high) == (below <= 1 <= above), (number, low, high, below, above)
        clear += not low <= 0 <= high
    assert 100 < clear < 500


def test_a_negative_baseline_turns_the_ratio_round() -> None:
    base = np.array([-2.2, -2.1, -2.0, -1.9, -1.8])
    arm = np.array([-1.4, -1.2, -1.0, -0.8, -0.6])
    assert ratio(paired(arm, base), 0.95, signed=True) == ratio(paired(-arm, -base), 0.95, signed=True)


# -- coverage and width -------------------------------------------------------------------------------

LAWS = {  # symmetric, as the difference of two equal arms is, whatever the law of one arm
    "normal": lambda rng, n: rng.normal(size=n),
    "uniform": lambda rng, n: rng.uniform(-1, 1, n),
    "two values": lambda rng, n: rng.choice([-1.0, 1.0], n) + 0.01 * rng.normal(size=n),
    "tied counts": lambda rng, n: (rng.poisson(1, n) - rng.poisson(1, n)).astype(float),
    "mostly equal": lambda rng, n: rng.normal(size=n) * (rng.random(n) < 0.3),
    "heavy tails": lambda rng, n: np.exp(2 * rng.normal(size=n)) - np.exp(2 * rng.normal(size=n)),
    "skewed arms": lambda rng, n: rng.exponential(size=n) - rng.exponential(size=n),
}


def misses(law: str, count: int, level: float, experiments: int) -> tuple[float, float]:
    """Share of experiments whose interval leaves 0 out, and of those with an interval more than twice as wide
    as Student's."""
    missed = wide = 0
    for number in range(experiments):
        each = LAWS[law](np.random.default_rng([number, count]), count)
        if not np.ptp(each):
            continue  # all equal: no interval unless there are enough of them
        low, high = difference(paired(each), level)
        t = student(each, level)
        missed += not low <= 0 <= high
        wide += high - low > 2 * (t[1] - t[0])
    return missed / experiments, wide / experiments


@pytest.mark.parametrize("law", LAWS)
def test_equal_arms_seldom_look_different_and_no_interval_explodes(law: str) -> None:
    """400 experiments with fixed seeds, so that the count is always the same; two standard errors are
    allowed."""
    for level in (0.95, 1 - 0.05 / 3):
        missed, wide = misses(law, 8, level, 400)
        assert missed <= (1 - level) + 2 * math.sqrt(level * (1 - level) / 400)
        assert wide == 0


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("count", [6, 8, 9, 16, 50, 200])
def test_the_level_is_kept_at_every_number_of_sections(law: str, count: int) -> None:
    for level in (0.90, 0.95, 0.9875, 0.995):
        if count >= fewest(level):
            missed, wide = misses(law, count, level, 600)
            assert missed <= (1 - level) + 3 * math.sqrt(level * (1 - level) / 600)
            assert wide == 0


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.2, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("count", [8, 16, 50])
def test_a_ratio_is_covered_as_often_as_stated(factor: float, sigma: float, count: int) -> None:
    for level in (0.95, 0.9875):
        missed = 0
        for number in range(500):
            rng = np.random.default_rng([number, count])
            common = sigma * rng.normal(size=count)
            base, arm = (np.exp(common + 0.4 * sigma * rng.normal(size=count)) for _ in range(2))
            low, high = ratio(paired(factor * arm, base), level, signed=False)
            missed += not low <= factor <= high
        assert missed / 500 <= (1 - level) + 3 * math.sqrt(level * (1 - level) / 500)
