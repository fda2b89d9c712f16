"""Do intervals keep their level and their width? Coverage by simulation (docs/decisions/0018-intervals.md).

    python bench/intervals.py [--experiments 2000] [--quick]

Four questions, each a table of Markdown:
- laws: how often does a nominal interval of a difference leave its true value out, and how wide is it against
  Student's t, by law of the sections' differences, number of sections and level?
- ratios: the same of a relative change, against the difference divided by the observed baseline.
- replays: two equal arms with lognormal latencies, a session effect that is correlated between neighbours and
  a part common to both arms, cut into sections as a replay is.
- looks: how often do equal arms look different at any look of an experiment that goes on until it is decided?
Every experiment has its own seed, so the tables are the same on every machine.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import stdtrit

from hotprefix.lab.experiment.looks import looks
from hotprefix.lab.interval import Interval, Paired, difference, ratio
from hotprefix.lab.stats import SECTIONS

Floats = NDArray[np.float64]
Law = Callable[[np.random.Generator, int], Floats]
LEVELS = (0.90, 0.95, 1 - 0.05 / 3, 0.995)
COUNTS = (4, 8, 12, 50, 200)
LAWS: dict[str, Law] = {  # all of mean 0
    "normal": lambda rng, n: rng.normal(size=n),
    "two values": lambda rng, n: rng.choice([-1.0, 1.0], n) + 0.01 * rng.normal(size=n),
    "tied counts": lambda rng, n: (rng.poisson(1, n) - rng.poisson(1, n)).astype(float),
    "mostly equal": lambda rng, n: rng.normal(size=n) * (rng.random(n) < 0.3),
    "heavy tails": lambda rng, n: np.exp(2 * rng.normal(size=n)) - np.exp(2 * rng.normal(size=n)),
    "skewed arms, -30 %": lambda rng, n: (
        0.7 * np.exp(rng.normal(size=n)) - np.exp(rng.normal(size=n)) + 0.3 * np.exp(0.5)
    ),
    "skewed difference": lambda rng, n: rng.gamma(4.0, size=n) - 4.0,
    "very skewed difference": lambda rng, n: rng.exponential(size=n) - 1.0,
}
RATIOS = {  # sigma of what both arms share, sigma of what each has of its own
    "alike": (0.5, 0.2), "independent": (0.0, 0.5), "heavy, alike": (2.0, 0.5), "heavy": (0.0, 1.0),
}  # fmt: skip
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


# -- intervals ----------------------------------------------------------------------------------------


def paired(base: Floats, arm: Floats, whole: tuple[float, float] | None = None) -> Paired:
    cut = np.stack([base, arm], axis=1)
    return Paired(*(whole or (float(base.mean()), float(arm.mean()))), cut)


def student(each: Floats, estimate: float, level: float) -> Interval:
    spread, n = each - estimate, len(each)
    reach = float(stdtrit(n - 1, (1 + level) / 2)) * float(((spread**2).sum() / (n - 1) / n) ** 0.5)
    return estimate - reach, estimate + reach


def symmetric_bootstrap(rng: np.random.Generator, each: Floats, estimate: float, level: float) -> Interval:
    """Symmetric studentised bootstrap, not narrower than Student's t: what was built before."""
    spread, n = each - estimate, len(each)
    drawn = spread[rng.integers(0, n, (1000, n))]
    errors = drawn.std(axis=1, ddof=1) / n**0.5
    vary = errors > 1e-9 * float(np.abs(spread).max())
    scores = np.abs(drawn.mean(axis=1) - spread.mean())[vary] / errors[vary]
    most = float(np.quantile(scores, level)) if len(scores) else 0.0
    reach = float(((spread**2).sum() / (n - 1) / n) ** 0.5) * most
    low, high = student(each, estimate, level)
    return min(low, estimate - reach), max(high, estimate + reach)


def candidates(rng: np.random.Generator, pair: Paired, level: float) -> Iterator[tuple[str, Interval]]:
    each, estimate = pair.sections[:, 1] - pair.sections[:, 0], pair.arm - pair.base
    yield "studentised bootstrap", symmetric_bootstrap(rng, each, estimate, level)
    bca = stats.bootstrap((each,), np.mean, n_resamples=999, method="BCa", confidence_level=level, rng=rng)
    yield "BCa", (float(bca.confidence_interval[0]), float(bca.confidence_interval[1]))
    yield "Student's t", student(each, estimate, level)
    yield "as built", difference(pair, level)


# -- tables -------------------------------------------------------------------------------------------


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def laws(experiments: int) -> None:
    print(
        f"Left out, % (Student's t / as built); width, as built / Student's t: median, 95 %. {experiments}.\n"
    )
    rows = []
    for name, law in LAWS.items():
        for count in COUNTS:
            cells = [_law(law, count, level, experiments) for level in LEVELS]
            rows.append([name, str(count), *cells])
    table(["law", "sections", *(f"{level * 100:.4g} %" for level in LEVELS)], rows)


def _law(law: Law, count: int, level: float, experiments: int) -> str:
    missed, widths = [0, 0], []
    for number in range(experiments):
        each = law(np.random.default_rng([number, count]), count)
        if not np.ptp(each):
            continue
        t, ours = student(each, float(each.mean()), level), difference(paired(np.zeros(count), each), level)
        missed = [m + (not low <= 0 <= high) for m, (low, high) in zip(missed, (t, ours), strict=True)]
        widths.append((ours[1] - ours[0]) / (t[1] - t[0]))
    shares = " / ".join(f"{100 * m / experiments:.1f}" for m in missed)
    return f"{shares}; {np.median(widths):.2f}, {np.quantile(widths, 0.95):.2f}"


def ratios(experiments: int) -> None:
    print(f"Left out, % (difference / observed baseline; as built); share without an end. {experiments}.\n")
    rows = []
    for name, (shared, own) in RATIOS.items():
        for factor in (0.13, 0.7, 1.0, 2.0):
            for count in (8, 50):
                cells = [_ratio(shared, own, factor, count, level, experiments) for level in LEVELS[1:]]
                rows.append([name, f"{factor:g}", str(count), *cells])
    table(["sections", "ratio", "number", *(f"{level * 100:.4g} %" for level in LEVELS[1:])], rows)


def _ratio(shared: float, own: float, factor: float, count: int, level: float, experiments: int) -> str:
    missed, open_ended = [0, 0], 0
    for number in range(experiments):
        rng = np.random.default_rng([number, count])
        common = shared * rng.normal(size=count)
        base, arm = (np.exp(common + own * rng.normal(size=count)) for _ in range(2))
        pair = paired(base, factor * arm)
        low, high = student(pair.sections[:, 1] - base, pair.arm - pair.base, level)
        plain, ours = (1 + low / pair.base, 1 + high / pair.base), ratio(pair, level, signed=False)
        missed = [m + (not a <= factor <= b) for m, (a, b) in zip(missed, (plain, ours), strict=True)]
        open_ended += np.isinf(ours[1])
    shares = " / ".join(f"{100 * m / experiments:.1f}" for m in missed)
    return f"{shares}; {100 * open_ended / experiments:.0f} %"


def replays(experiments: int) -> None:
    print(f"Two equal arms, nominal 95 %: share with an interval without 0, mean / p95. {experiments}.\n")
    found = {name: alarms(world, experiments) for name, world in WORLDS.items()}
    methods = list(dict.fromkeys(method for one in found.values() for method, _ in one))
    rows = [
        [method, *(" / ".join(f"{100 * one[method, s] / experiments:.1f}" for s in STATISTICS)
                   for one in found.values())]
        for method in methods
    ]  # fmt: skip
    table(["", *WORLDS], rows)


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


def alarms(world: tuple[int, int, float, float], experiments: int) -> dict[tuple[str, str], int]:
    """(interval, statistic) -> experiments with an interval without 0."""
    seeds, sessions, sigma, memory = world
    found: dict[tuple[str, str], int] = defaultdict(int)
    for number in range(experiments):
        rng = np.random.default_rng([number, seeds])
        drawn = [arms(rng, sessions, sigma, memory) for _ in range(seeds)]
        for name, statistic in STATISTICS.items():
            whole = np.array([(statistic(base), statistic(arm)) for _, base, arm in drawn]).mean(axis=0)
            cut = np.array([
                (statistic(base[part]), statistic(arm[part]))
                for session, base, arm in drawn
                for part in _parts(session, sessions, -(-SECTIONS // seeds))
            ])  # fmt: skip
            pair = Paired(float(whole[0]), float(whole[1]), cut)
            for method, (low, high) in candidates(rng, pair, 0.95):
                found[method, name] += not low <= 0 <= high
    return found


def _parts(session: NDArray[np.intp], sessions: int, parts: int) -> Iterator[NDArray[np.bool_]]:
    for part in range(parts):
        yield session * parts // sessions == part


def sequences(experiments: int) -> None:
    print(f"Equal arms that look different at any look, %: as built / at 95 % each. {experiments}.\n")
    rows = []
    for first, most in ((8, 8), (8, 16), (8, 64), (8, 200)):
        grid = looks(first, most)
        cells = []
        for name in ("normal", "heavy tails", "tied counts"):
            counts = [0, 0]
            for number in range(experiments):
                each = LAWS[name](np.random.default_rng([number, most]), most)
                for at, share in enumerate([[look.spend for look in grid], [1.0] * len(grid)]):
                    counts[at] += any(
                        _sees(each[: look.seeds], 1 - 0.05 * spend)
                        for look, spend in zip(grid, share, strict=True)
                    )
            cells.append(" / ".join(f"{100 * c / experiments:.1f}" for c in counts))
        rows.append([", ".join(str(look.seeds) for look in grid), *cells])
    table(["looks after seeds", "normal", "heavy tails", "tied counts"], rows)


def _sees(each: Floats, level: float) -> bool:
    if not np.ptp(each):
        return False
    low, high = difference(paired(np.zeros(len(each)), each), level)
    return not low <= 0 <= high


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiments", type=int, default=2000, help="of each cell")
    parser.add_argument("--quick", action="store_true", help="200 of each cell: two minutes")
    chosen = parser.parse_args()
    experiments = 200 if chosen.quick else chosen.experiments
    laws(experiments)
    ratios(experiments)
    replays(min(experiments, 500))
    sequences(experiments)


if __name__ == "__main__":
    main()
