"""The fit finds the prices that samples were made with, despite noise and outliers, and states its error
honestly."""

from __future__ import annotations

import numpy as np
import pytest

from hotprefix.cost.features import Features
from hotprefix.cost.prices import total
from hotprefix.errors import InputError
from hotprefix.lab.cost.design import CHUNKS, SHORTEST, Design, fitting
from hotprefix.lab.cost.fit_prices import (
    Form,
    best_form,
    cross_validated,
    errors,
    scheduler_prices,
    solve,
    step_matrix,
    step_prices,
)
from hotprefix.lab.cost.measure_steps import Sample

PLANTED = np.array([0.02, 2e-3, 6e-7, 3e-3, 3e-6])


def shapes() -> list[Features]:
    prefills = [
        Features(n, n * p + n * (n + 1) // 2, 0, 0) for n in (16, 64, 256, 1024) for p in (0, 512, 4096)
    ]
    decodes = [Features(0, 0, k, k * c) for k in (1, 4, 16, 64) for c in (64, 1024, 4096)]
    return prefills + decodes + [Features(n, n * (n + 1) // 2, 8, 8000) for n in (16, 256, 1024)]


def samples(
    noise: float = 0.0, outliers: float = 0.0, repeats: int = 6, prices: np.ndarray = PLANTED
) -> list[Sample]:
    draw = np.random.default_rng(5)
    found = []
    for _ in range(repeats):
        for shape in shapes():
            seconds = float(np.array([1, *shape]) @ prices) * np.exp(draw.normal(0, noise))
            if draw.random() < outliers:
                seconds *= draw.uniform(2, 6)
            found.append(Sample(str(shape), shape, seconds, 1e-4 + 1e-5 * shape.decodes, shape.decodes, 0))
    return found


def test_exact_timings_give_the_planted_prices_back() -> None:
    assert step_prices(samples()).values == pytest.approx(PLANTED, rel=1e-6)


def test_noise_and_outliers_move_them_little() -> None:
    """Noise is 5 %, and three steps in ten take 2 to 6 times as long. With equal weights, two prices would be
    16 % off."""
    timed = samples(noise=0.05, outliers=0.3)
    assert step_prices(timed).values == pytest.approx(PLANTED, rel=0.06)
    seconds = np.array([s.seconds for s in timed])
    plain = np.linalg.lstsq(step_matrix(timed) / seconds[:, None], np.ones(len(timed)), rcond=None)[0]
    assert np.max(np.abs(plain / PLANTED - 1)) > 0.1


def test_a_price_is_never_negative() -> None:
    """Timings that fall as context grows: a fit without bounds would give context a negative price."""
    rows = np.array([[1.0, c] for c in (1, 10, 100, 1000)])
    assert solve(rows, np.array([4.0, 3.0, 2.0, 1.0]), np.ones(4))[1] == 0.0


def test_a_batch_that_ran_often_counts_as_one() -> None:
    """One decode batch ran 500 times and took 20 % too long each time. Its regime still has its own share
    only."""
    many = samples(repeats=2)
    shape = Features(0, 0, 1, 64)
    due = float(np.array([1, *shape]) @ PLANTED)
    many += [Sample("often", shape, due * 1.2, 1e-4, 1, 0)] * 500
    assert step_prices(many).values == pytest.approx(PLANTED, rel=0.05)


def bent(shape: Features) -> float:
    """The planted seconds, but each decode beyond the eighth costs four times as much."""
    return float(np.array([1, *shape]) @ PLANTED) + max(0, shape.decodes - 8) * 3 * PLANTED[3]


def test_a_price_that_changes_is_found_and_a_straight_line_stays_one() -> None:
    """Batches of 8, 16 and more decodes show that a decode costs 3 ms at first and 12 ms later. With one
    price, 64 decodes would be far off."""
    counted = [
        *shapes(),
        *(Features(0, 0, k, k * c) for k in (2, 8, 12, 24, 32, 48) for c in (64, 1024)),
    ]
    noise = np.random.default_rng(7)
    timed = [
        Sample(str(s), s, bent(s) * np.exp(noise.normal(0, 0.03)), 1e-4, s.decodes, 0)
        for _ in range(6)
        for s in counted
    ]
    form = best_form(timed)
    assert form.decode
    found = step_prices(timed, form)
    for count in (1, 8, 16, 64):
        due = bent(Features(0, 0, count, 0)) - PLANTED[0]
        assert total(found.decode, count) + found.base_s - PLANTED[0] == pytest.approx(due, rel=0.1)
    assert cross_validated(timed, form).overall.p95 < 0.5 * cross_validated(timed).overall.p95
    assert best_form(samples(noise=0.03)) == Form()


def test_no_price_is_made_up_for_what_was_never_run() -> None:
    """At most 8 decodes were timed. Beyond them the last price holds, not 0."""
    few = [s for s in samples() if s.features.decodes <= 8]
    found = step_prices(few, Form(decode=(2, 4, 8, 16)))
    assert found.form.decode == (2, 4)
    assert found.decode[-1][1] == pytest.approx(PLANTED[3], rel=1e-6)


def test_the_scheduler_has_prices_of_its_own() -> None:
    timed = [
        Sample("s", Features(0, 0, 1, 1), 0.1, 1e-4 + 2e-5 * r + 1e-6 * w + 3e-7 * touched, r, w, touched)
        for r in (1, 8, 64)
        for w in (0, 100, 500)
        for touched in {0, min(w, 128)}
    ]
    assert scheduler_prices(timed) == pytest.approx([1e-4, 2e-5, 1e-6, 3e-7], rel=1e-6)


def test_cross_validation_leaves_batches_out_whole() -> None:
    """There are two batches and two prices, so every fit is exact on the batch that it saw, however often,
    and far off on the other."""
    exact = cross_validated(samples())
    assert exact.overall.p95 < 1e-6
    assert exact.overall.samples == 6 * 27
    two = [
        Sample(f"prefill {n}", Features(n, 0, 0, 0), 1.0 + n, 1e-4, 1, 0) for n in (1, 100) for _ in range(9)
    ]
    assert errors(two, step_prices(two).predict(two), "in sample").overall.p95 < 1e-6
    unseen = cross_validated(two)
    assert unseen.method == "2-fold cross-validation over 2 batches"
    assert unseen.overall.median > 0.3
    assert cross_validated(two) == unseen


def test_errors_are_told_by_regime_with_their_sign() -> None:
    """Prefill is predicted exactly, decode 10 % too high, and there is no mixed step. The bias is that of the
    sum, (1 + 1.1) / 2 - 1."""
    timed = [
        Sample("a", Features(2, 3, 0, 0), 1.0, 0.1, 1, 0),
        Sample("b", Features(0, 0, 1, 1), 1.0, 0.1, 1, 0),
    ]
    found = errors(timed, np.array([1.0, 1.1]), "by hand")
    assert found.prefill is not None
    assert found.decode is not None
    assert (found.prefill.median, found.mixed) == (0.0, None)
    assert found.decode.median == pytest.approx(0.1)
    assert found.bias == pytest.approx(0.05)


def test_the_uncertainty_of_the_sum_is_about_what_repeating_it_shows() -> None:
    """Each batch is off by 10 % independently of the others. The jackknife is within a factor of the true
    spread."""

    def made(seed: int) -> list[Sample]:
        draw = np.random.default_rng(seed)
        off = {str(s): np.exp(draw.normal(0, 0.1)) for s in shapes()}
        return [
            Sample(str(s), s, float(np.array([1, *s]) @ PLANTED) * off[str(s)], 1e-4, s.decodes, 0)
            for s in shapes()
        ]  # fmt: skip

    true = sum(float(np.array([1, *s]) @ PLANTED) for s in shapes())
    sums = [float(step_prices(made(seed)).predict(made(0)).sum()) / true for seed in range(40)]
    told = [cross_validated(made(seed)).uncertainty or 0.0 for seed in range(20)]
    assert 0.4 < np.median(told) / np.std(sums) < 2.5
    assert cross_validated(samples()).uncertainty == pytest.approx(0.0, abs=1e-6)


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(InputError, match="0 timings"):
        solve(np.zeros((0, 2)), np.zeros(0), np.zeros(0))
    with pytest.raises(InputError, match="above 0 s"):
        solve(np.ones((2, 1)), np.array([1.0, 0.0]), np.ones(2))
    with pytest.raises(InputError, match="1 batches were timed"):
        cross_validated([samples()[0]])


def sized(tokens: float, room: int = 32768, positions: int = 8192, budget: int = 2048) -> Design:
    return fitting(room, positions, budget, 64, tokens)


def test_the_design_grows_with_the_time_there_is() -> None:
    longest = [max(sized(tokens).prefixes) for tokens in (1e3, 3e4, 1e5, 1e6)]
    assert longest == sorted(longest)
    assert longest[0] == SHORTEST
    assert longest[-1] == 4096
    for tokens in (3e4, 1e5, 1e6):
        found = sized(tokens)
        assert sum(found.texts) <= 0.3 * tokens
        assert found.round_tokens <= 0.2 * tokens
        assert sum(found.texts) + found.round_tokens <= 0.8 * 32768


def test_the_design_keeps_to_the_engine_it_is_for() -> None:
    small = sized(1e6, room=1024, positions=512, budget=64)
    assert max(small.chunks) <= 32
    assert max(small.prefixes) + 2 * max(small.chunks) <= 512
    assert max(sized(1e6).chunks) == max(CHUNKS)
    assert max(scene.count for scene in fitting(32768, 8192, 2048, 3, 1e6).decodes) == 2
