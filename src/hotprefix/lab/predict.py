"""When a session will be back. Owns: `ThinkTimes`, an online quantile of the waits between its requests.

Rules: the driver's side of eviction `reuse` (the kernel takes seconds, it predicts nothing). By what is
awaited, a tool's result or a user's message: an engine reads that off the answer it has just given. Only
what has happened is learned, so a prediction holds no knowledge of the future. Published figures are where
each kind begins: tool results median 9 s, p90 72 s, messages median 97 s, p90 1277 s.
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
    """Of a lognormal distribution, seconds."""

    median: float
    p90: float

    @property
    def sigma(self) -> float:
        return math.log(self.p90 / self.median) / NormalDist().inv_cdf(0.9)


PUBLISHED: Final[Mapping[str, Spread]] = {TOOL: Spread(9.0, 72.0), USER: Spread(97.0, 1277.0)}


class ThinkTimes:
    """Predicts waits, seconds. quantile: of the waits seen (0.5: as many were longer as shorter); the first
    observations move it like PRIOR_WEIGHT earlier ones would let them. Kinds without a prior begin as USER.
    Raises ConfigError."""

    def __init__(self, quantile: float = 0.5, prior: Mapping[str, Spread] = PUBLISHED) -> None:
        if not 0.0 < quantile < 1.0:
            raise ConfigError(f"quantile={quantile}: give a number between 0 and 1", param="quantile")
        self._quantile = quantile
        self._prior = prior
        self._logs: dict[str, float] = {}
        self._seen: dict[str, int] = {}

    def expected(self, kind: str | None) -> float:
        """Seconds from a request's end to its session's next one."""
        name = kind or USER
        return math.exp(self._logs[name]) if name in self._logs else math.exp(self._begin(name))

    def learn(self, kind: str | None, seconds: float) -> None:
        """One wait has ended. Robbins and Monro's steps (1951) towards the quantile of its logarithm, as wide
        as the prior is spread."""
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
