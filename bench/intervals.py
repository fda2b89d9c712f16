"""How often do two equal arms look different? False alarms of several intervals (docs/decisions/0012).

    python bench/intervals.py [--experiments 500]

Every experiment draws two arms of one law: lognormal latencies, a session effect correlated between
neighbours, a part common to both arms. An alarm is a nominal 95 % interval of the difference without 0.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from hotprefix.lab.stats import SECTIONS, half_width

Floats = NDArray[np.float64]
Interval = tuple[float, float]
WORLDS = {  # seeds, sessions, sigma, memory
    "3 seeds x 40 sessions": (3, 40, 2.0, 0.8),
    "5 x 40": (5, 40, 2.0, 0.8),
    "1 x 60": (1, 60, 2.0, 0.8),
    "3 x 40, mild": (3, 40, 1.0, 0.0),
}
STATISTICS: dict[str, Callable[[Floats], float]] = {
    "mean": lambda values: float(values.mean()),
    "p95": lambda values: float(np.percentile(values, 95)),
}


def arms(
    rng: np.random.Generator, sessions: int, sigma: float, memory: float
) -> tuple[NDArray[np.intp], Floats, Floats]:
    """Session number and latency in either arm, of each request of one seed."""
    session = np.repeat(np.arange(sessions), rng.geometric(1 / 8, sessions))
    walks = rng.normal(size=(3, sessions))
    for at in range(1, sessions):
        walks[:, at] = memory * walks[:, at - 1] + (1 - memory**2) ** 0.5 * walks[:, at]
    common = walks[0][session] + 0.7 * sigma * rng.normal(size=len(session))
    own = [0.7 * walk[session] + 0.7 * sigma * rng.normal(size=len(session)) for walk in walks[1:]]
    return session, np.exp(common + own[0]), np.exp(common + own[1])


def candidates(
    rng: np.random.Generator, estimate: float, seeds: Floats, cut: Floats
) -> Iterator[tuple[str, Interval]]:
    """Intervals of the difference. seeds, cut: its value in each seed and in each section."""
    count = len(cut)
    if len(seeds) > 1:
        yield "percentile bootstrap over seeds", _quantiles(_drawn(rng, seeds).mean(axis=1))
    samples = _drawn(rng, cut)
    means, errors = samples.mean(axis=1), samples.std(axis=1, ddof=1) / count**0.5
    yield "percentile bootstrap over sections", _quantiles(means)
    bca = stats.bootstrap((cut,), np.mean, n_resamples=999, method="BCa", rng=rng).confidence_interval
    yield "BCa over sections", (float(bca[0]), float(bca[1]))
    low, high = _quantiles((means - cut.mean())[errors > 0] / errors[errors > 0])
    error = float(cut.std(ddof=1)) / count**0.5
    yield "bootstrap-t, equal tails", (estimate - high * error, estimate - low * error)
    spread = cut - estimate
    reach = float(stats.t.ppf(0.975, count - 1)) * float(((spread**2).sum() / (count - 1) / count) ** 0.5)
    yield "Student's t", (estimate - reach, estimate + reach)
    reach = half_width(spread, 0.95)
    yield "as built", (estimate - reach, estimate + reach)


def _drawn(rng: np.random.Generator, values: Floats) -> Floats:
    return values[rng.integers(0, len(values), (1000, len(values)))]


def _quantiles(values: Floats) -> Interval:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def alarms(world: tuple[int, int, float, float], experiments: int) -> Counter[tuple[str, str]]:
    """(interval, statistic) -> experiments with an interval without 0."""
    seeds, sessions, sigma, memory = world
    found: Counter[tuple[str, str]] = Counter()
    for number in range(experiments):
        rng = np.random.default_rng([number, seeds])
        drawn = [arms(rng, sessions, sigma, memory) for _ in range(seeds)]
        for name, statistic in STATISTICS.items():
            whole = np.array([statistic(arm) - statistic(base) for _, base, arm in drawn])
            cut = np.array([
                statistic(arm[part]) - statistic(base[part])
                for session, base, arm in drawn
                for part in _parts(session, sessions, -(-SECTIONS // seeds))
            ])  # fmt: skip
            for method, (low, high) in candidates(rng, float(whole.mean()), whole, cut):
                found[method, name] += not low <= 0 <= high
    return found


def _parts(session: NDArray[np.intp], sessions: int, parts: int) -> Iterator[NDArray[np.bool_]]:
    for part in range(parts):
        yield session * parts // sessions == part


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiments", type=int, default=500)
    chosen = parser.parse_args()
    for name, world in WORLDS.items():
        found = alarms(world, chosen.experiments)
        print(f"{name}, {chosen.experiments} experiments: false alarms, mean / p95")
        for method in dict.fromkeys(method for method, _ in found):
            shares = " / ".join(f"{found[method, s] / chosen.experiments:.1%}" for s in STATISTICS)
            print(f"  {method:36} {shares}")


if __name__ == "__main__":
    main()
