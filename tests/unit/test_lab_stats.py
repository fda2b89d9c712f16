"""Intervals: sections hold whole clusters, and two equal arms seldom look different."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from hotprefix.definitions import Slo
from hotprefix.errors import InputError
from hotprefix.lab.paired_sections import Run, section_figures
from hotprefix.lab.stats import SECTIONS, Comparison, compare
from tests.support.tables import links, request, requests, run, window, windows

SLO = Slo(ttft_s=3.0)


def plain(seed: int, rows: list[dict[str, object]]) -> Run:
    return Run(seed, requests(*rows), windows(*(window(30.0 * i) for i in range(4))), links(), 16)


def test_the_estimate_is_the_mean_over_seeds_of_whole_replays() -> None:
    base = [run(s, 1) for s in range(3)]
    arm = [run(s, 2) for s in range(3)]
    found = compare(base, arm, slo=SLO)["ttft_p95_s"]
    for side, some in (("base", base), ("arm", arm)):
        each = [
            np.percentile((r.requests["first_token_s"] - r.requests["arrival_s"]).to_numpy(), 95)
            for r in some
        ]
        assert getattr(found, side) == pytest.approx(np.mean(each))
    assert len(found.sections) == 9  # 3 of each seed


def test_with_many_seeds_a_section_is_a_seed() -> None:
    base, arm = ([run(s, k, sessions=4) for s in range(SECTIONS)] for k in (1, 2))
    found = compare(base, arm, slo=SLO)["ttft_mean_s"]
    assert len(found.sections) == SECTIONS
    assert found.base == pytest.approx(np.mean([b for b, _ in found.sections]))


def test_sections_keep_sessions_whole_and_add_up() -> None:
    base, arm = run(0, 1, sessions=23), run(0, 2, sessions=23)
    cut = section_figures(base, arm, 5, slo=SLO, window_s=30.0)
    assert len(cut) == 5
    for side, whole in ((0, base), (1, arm)):
        each = [figures[side] for figures in cut]
        assert sum(f["requests"] / 5 for f in each) == whole.requests.height
        assert sum(f["evicted_pages"] / 5 for f in each) == whole.windows["evicted_pages"].sum()
    sizes = [f["requests"] / 5 for f, _ in cut]
    sessions = base.requests.group_by("session").len()["len"].to_list()
    assert max(sizes) - min(sizes) <= 2 * max(sessions)
    order = base.requests.group_by("session").agg(pl.col("arrival_s").min(), n=pl.len()).sort("arrival_s")
    borders = set(order["n"].cum_sum().to_list())
    assert set(np.cumsum(sizes).round().astype(int).tolist()) <= borders


def test_windows_of_arrivals_stand_in_for_sessions() -> None:
    rows = [request(i, arrival_s=float(i)) for i in range(120)]  # 4 windows of 30 s
    base, arm = plain(0, rows), plain(0, rows)
    cut = section_figures(base, arm, 10, slo=SLO, window_s=30.0)
    assert [f["requests"] / len(cut) for f, _ in cut] == [30, 30, 30, 30]
    assert compare([base], [arm], slo=SLO)["ttft_mean_s"].sections == ((2.0, 2.0),) * 4


def test_a_session_named_like_a_window_is_not_one() -> None:
    rows = [request(0, session="0"), request(1)]
    assert len(section_figures(plain(0, rows), plain(0, rows), 2, slo=SLO, window_s=30.0)) == 2


def test_what_only_one_arm_reached_is_in_a_section_too() -> None:
    rows = [request(i, session=f"s{i}") for i in range(8)]
    cut = section_figures(plain(0, rows[:4]), plain(0, rows), 4, slo=SLO, window_s=30.0)
    assert [(b["requests"] / len(cut), a["requests"] / len(cut)) for b, a in cut] == [
        (2, 2),
        (2, 2),
        (0, 2),
        (0, 2),
    ]


def test_no_interval_without_spread_or_clusters() -> None:
    rows = [request(i, session="only") for i in range(50)]
    one = compare([plain(0, rows)], [plain(0, rows)], slo=SLO)["ttft_mean_s"]
    assert one.interval() is None
    assert one.why_none() == "measured in 1 of 1 sections; 8 seeds would do"
    same = [run(s, 1) for s in range(3)]
    equal = compare(same, same, slo=SLO)["ttft_mean_s"]
    assert len(equal.sections) == 9
    assert equal.interval(0.99) == equal.interval(0.99, "relative") == (0.0, 0.0)
    assert equal.interval(0.999) is None
    assert equal.why_none(0.999) == "9 equal sections may be chance; 11 would not"


def test_extremes_and_what_is_beyond_the_horizon_have_no_interval() -> None:
    base, arm = [run(s, 1) for s in range(3)], [run(s, 2) for s in range(3)]
    assert compare(base, arm, slo=SLO)["oldest_wait_s"].reason.startswith("an extreme value")
    lost = [
        Run(
            r.seed,
            r.requests.with_columns(first_token_s=None, outcome=pl.lit("unfinished")),
            r.windows,
            r.links,
            16,
        )
        for r in arm
    ]
    found = compare(base, lost, slo=SLO)["ttft_p95_s"]
    assert (found.beyond, found.arm, found.interval()) == ("arm", None, None)
    assert "not served" in found.reason


def test_one_seed_beyond_the_horizon_is_not_left_out() -> None:
    base, arm = [run(s, 1) for s in range(2)], [run(s, 2) for s in range(2)]
    never = arm[0].requests.with_columns(first_token_s=None, outcome=pl.lit("unfinished"))
    arm[0] = Run(0, never, arm[0].windows, arm[0].links, 16)
    found = compare(base, arm, slo=SLO)["ttft_p95_s"]
    assert (found.beyond, found.arm) == ("arm", None)
    assert found.base is not None


def test_the_relative_change_of_a_negative_baseline_keeps_its_sign() -> None:
    pairs = tuple((-2.0 + d, -1.0 + 2 * d) for d in (-0.2, -0.1, 0.0, 0.1, 0.2))
    found = Comparison("net_l1_hit_loss_share", -2.0, -1.0, pairs)
    assert found.value("relative") == 0.5
    low, high = found.interval() or (0.0, 0.0)
    assert 0 < low < 1.0 < high
    low, high = found.interval(scale="relative") or (0.0, 0.0)
    assert 0 < low < 0.5 < high
    none = Comparison("stalls", 0.0, 3.0, pairs)
    assert none.interval(scale="relative") is None
    assert none.why_none() == "the baseline is 0"
    either = tuple((b, b + 0.5) for b in (-9.0, 4.0, 8.0, -7.0, 3.0, -2.0, 6.0, -1.0))
    found = Comparison("net_l1_hit_loss_tokens", 0.25, 0.75, either)
    assert found.interval() == (0.5, 0.5)
    assert found.interval(scale="relative") is None
    assert found.why_none() == "the baseline itself may be 0 at 95 %"


def test_no_relative_change_is_below_minus_100_percent() -> None:
    """A burst computed once: sections differ in size far more than they differ in what became of them."""
    sections = tuple((b, b / 8) for b in (400.0, 3_000.0, 900.0, 12_000.0, 500.0, 2_000.0, 700.0, 4_000.0))
    base, arm = np.mean(sections, axis=0)
    found = Comparison("computed_tokens", base, arm, sections)
    for level in (0.95, 1 - 0.05 / 3, 0.9875, 0.995):
        low, high = found.interval(level, "relative") or (0.0, 0.0)
        assert -1 <= low <= found.value("relative") <= high  # type: ignore[operator]


def test_different_seeds_are_not_compared() -> None:
    with pytest.raises(InputError, match=r"\[1\].*\[0\]"):
        compare([run(0, 1, sessions=5)], [run(1, 1, sessions=5)], slo=SLO)


def test_a_planted_difference_is_found_and_its_sign_is_right() -> None:
    base = [run(s, 1) for s in range(3)]
    arm = [run(s, 2, loss=0.2) for s in range(3)]
    low, high = compare(base, arm, slo=SLO)["net_l1_hit_loss_share"].interval(scale="relative") or (0.0, 0.0)
    assert -0.37 < low < -1 / 3 < high < -0.29


# Rates of false alarm. The figures are those of the sections' own arithmetic, so that hundreds of experiments
# take seconds: a statistic of each section and of each whole, as `compare` takes them.


def _alarms(experiments: int, seeds: int, sessions: int, sigma: float, memory: float, q: float | None) -> int:
    """How many of so many A/A experiments have an interval without 0."""
    alarms = 0
    for number in range(experiments):
        rng = np.random.default_rng([number, seeds])
        whole, cut = [], []
        for _ in range(seeds):
            session, base, arm = _latencies(rng, sessions, sigma, memory)
            section = session * (-(-SECTIONS // seeds)) // sessions
            whole.append((_statistic(base, q), _statistic(arm, q)))
            cut += [
                (_statistic(base[section == s], q), _statistic(arm[section == s], q))
                for s in range(section.max() + 1)
            ]
        b, a = np.mean(whole, axis=0)
        low, high = Comparison("ttft_mean_s", b, a, tuple(cut)).interval(0.95) or (0.0, 0.0)
        alarms += not low <= 0 <= high
    return alarms


def _latencies(
    rng: np.random.Generator, sessions: int, sigma: float, memory: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Session numbers, and latencies of two arms of one law: lognormal, with a part common to both, a part of
    the session, and memory from one session to the next."""
    session = np.repeat(np.arange(sessions), rng.geometric(1 / 8, sessions))
    walks = rng.normal(size=(3, sessions))
    for at in range(1, sessions):
        walks[:, at] = memory * walks[:, at - 1] + (1 - memory**2) ** 0.5 * walks[:, at]
    common = walks[0][session] + 0.7 * sigma * rng.normal(size=len(session))
    arms = [
        np.exp(common + 0.7 * w[session] + 0.7 * sigma * rng.normal(size=len(session))) for w in walks[1:]
    ]
    return session, arms[0], arms[1]


def _statistic(values: np.ndarray, q: float | None) -> float:
    return float(values.mean() if q is None else np.percentile(values, q))


@pytest.mark.parametrize("q", [None, 95.0], ids=["mean", "p95"])
@pytest.mark.parametrize(
    ("seeds", "sessions", "sigma", "memory"),
    [(3, 40, 1.0, 0.0), (3, 40, 2.0, 0.8), (5, 40, 2.0, 0.8), (12, 20, 2.0, 0.8)],
    ids=["independent", "heavy tails, correlated", "five seeds", "a section is a seed"],
)
def test_equal_arms_look_different_at_most_as_often_as_stated(
    seeds: int, sessions: int, sigma: float, memory: float, q: float | None
) -> None:
    """5 % of 200 are 10. The experiments have fixed seeds, so the count is always the same."""
    assert _alarms(200, seeds, sessions, sigma, memory, q) <= 10
