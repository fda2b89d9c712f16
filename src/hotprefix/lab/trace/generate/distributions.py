"""Numbers for generators. Owns: the distributions a parameter may have, and fresh block ids.

Rules: everything is drawn from a random generator that is passed in, so a seed gives the same trace on every
machine.
"""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from hotprefix.errors import ConfigError
from hotprefix.lab.trace.line_fields import MAX_BLOCK, NO_BLOCKS
from hotprefix.lab.trace.trace_request import Blocks

FROZEN: Final = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")

Count = Annotated[int, Field(ge=1, le=10**7)]
Length = Annotated[int, Field(ge=1, le=10**7)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Random = np.random.Generator


@dataclass(config=FROZEN, frozen=True, slots=True)
class LogNormal:
    """The lognormal distribution exp(N(ln median, sigma))."""

    median: Positive
    sigma: Annotated[float, Field(ge=0, le=5)]

    def draw(self, random: Random) -> float:
        return float(self.median * np.exp(self.sigma * random.standard_normal()))


@dataclass(config=FROZEN, frozen=True, slots=True)
class Quantiles:
    """A distribution given by its values at rising probabilities from 0 to 1, with straight lines between
    them."""

    at: Annotated[list[Share], Field(min_length=2)]
    values: list[Annotated[float, Field(ge=0, le=1e9)]]

    @model_validator(mode="after")
    def _check(self) -> Quantiles:
        if len(self.at) != len(self.values) or self.at[0] != 0 or self.at[-1] != 1:
            raise ValueError("give a value for each probability, from 0 to 1")
        if sorted(self.at) != self.at or sorted(self.values) != self.values:
            raise ValueError("probabilities and values must not fall")
        return self

    def draw(self, random: Random) -> float:
        return float(np.interp(random.random(), self.at, self.values))


Distribution = LogNormal | Quantiles


def tokens(of: Distribution, random: Random) -> int:
    """Draw a length, >= 1."""
    return max(1, round(of.draw(random)))


class Ids:
    """Block ids that no block had before."""

    def __init__(self) -> None:
        self._next = 0

    def fresh(self, count: int) -> Blocks:
        if count <= 0:
            return NO_BLOCKS
        if self._next + count > MAX_BLOCK:
            raise ConfigError("more than 2^30 distinct blocks: generate less, or larger blocks")
        self._next += count
        return np.arange(self._next - count, self._next, dtype=np.int32)


def extended(blocks: Blocks, count: int, ids: Ids) -> Blocks:
    """The first `count` of `blocks`; if there are fewer, fresh ids follow."""
    return np.concatenate((blocks[:count], ids.fresh(count - len(blocks))))
