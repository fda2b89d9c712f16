"""When a session will be back. Owns: `ThinkTimes`, an online quantile of the waits between its requests.

Rules:
1. This is the driver's side of eviction `reuse`; the kernel takes seconds and predicts nothing.
2. Waits are learned by their kind: for a tool's result, or for a user's message. An engine reads the kind off
   the answer that it has just given.
3. Only what has happened is learned, so a prediction has no knowledge of the future.
4. Each kind begins with published figures: median 9 s and p90 72 s for tool results, median 97 s and p90 1277
   s for messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Final, NamedTuple

from hotprefix.errors import ConfigError

TOOL: Final = "tool"
USER: Final = "user"
PRIOR_WEIGHT: Final = 10
SHORTEST_S: Final = 1e-3


class Spread(NamedTuple):
    """A lognormal distribution of waits, by its median and its 90th percentile, seconds."""

    median: float
    p90: float

    @property
    def sigma(self) -> float:
        return math.log(self.p90 / self.median) / NormalDist().inv_cdf(0.9)


PUBLISHED: Final[Mapping[str, Spread]] = {TOOL: Spread(9.0, 72.0), USER: Spread(97.0, 1277.0)}


class ThinkTimes:
    """Predicts waits, seconds. Raises ConfigError.

    quantile: which quantile of the waits is predicted; with 0.5 as many are longer as shorter.
    prior: where each kind begins; kinds without a prior begin as USER. It weighs as much as PRIOR_WEIGHT
    observed waits.
    """

    def __init__(self, quantile: float = 0.5, prior: Mapping[str, Spread] = PUBLISHED) -> None:
        if not 0.0 < quantile < 1.0:
            raise ConfigError(f"quantile={quantile}: give a number between 0 and 1", param="quantile")
        self._quantile = quantile
        self._prior = prior
        self._logs: dict[str, float] = {}
        self._seen: dict[str, int] = {}

    def expected(self, kind: str | None) -> float:
        """Predicted seconds from a request's end to its session's next one."""
        name = kind or USER
        return math.exp(self._logs[name]) if name in self._logs else math.exp(self._begin(name))

    def learn(self, kind: str | None, seconds: float) -> None:
        """Learn from a wait that has ended, by a step of Robbins and Monro (1951) towards the quantile of the
        wait's logarithm. The step is in proportion to the prior's spread."""
        name = kind or USER
        log, seen = self._logs.get(name, self._begin(name)), self._seen.get(name, 0)
        shorter = math.log(max(seconds, SHORTEST_S)) <= log
        step = self._spread(name).sigma / NormalDist().pdf(self._z) / (seen + PRIOR_WEIGHT)
        self._logs[name] = log + step * (self._quantile - shorter)
        self._seen[name] = seen + 1

    @property
    def _z(self) -> float:
        return NormalDist().inv_cdf(self._quantile)

    def _spread(self, name: str) -> Spread:
        return self._prior.get(name, self._prior[USER])

    def _begin(self, name: str) -> float:
        spread = self._spread(name)
        return math.log(spread.median) + self._z * spread.sigma
