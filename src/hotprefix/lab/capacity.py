"""What one instance can serve. Owns: `largest_rate`, the bisection, and `Capacity`, its result and file.

Rules (docs/terms.md: observed throughput is never called capacity):
1. Capacity is the largest offered rate at which at least the asked share of requests meets every objective.
   Every request that arrives counts, also one that is rejected or unfinished.
2. It holds for its conditions only, so it is saved with them.
3. Whether more load means fewer good requests is not proven for every trace; every rate that was tried is
   kept, so that a reader sees.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from hotprefix.cost.model import write_json
from hotprefix.errors import ConfigError

MOST_RATES = 60


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Tried(_Frozen):
    """One offered rate. requests_per_s: the rate. good_share: of the requests. reuse_share: of the prompt
    tokens whose prefill was done, those that were not computed."""

    requests_per_s: float
    good_share: float
    reuse_share: float | None = None


class Conditions(_Frozen):
    """What a capacity holds for.

    cost, model, hardware: the cost model's name, and what it is of.
    trace: what was offered. requests: how many in each run; a short trace flatters, because its backlog is
    small. input_tokens, output_tokens: means of a request. loop: open, or closed for traces with sessions,
    whose sessions begin at random and whose turns follow the answers.
    l1_tokens: capacity of L1. restore_bytes_per_s: of the link from L2, None without one.
    kernel: its configuration.
    objectives: the SLO, seconds. share: of the requests that must meet it.
    seeds: 1 to so many; a share is the mean over them. within: upper bound of the relative error of the rate.
    """

    cost: str
    model: str
    hardware: str
    trace: str
    requests: int
    input_tokens: float
    output_tokens: float
    loop: Literal["open", "closed"]
    l1_tokens: int
    restore_bytes_per_s: float | None
    kernel: dict[str, str]
    objectives: dict[str, float]
    share: float
    seeds: int
    within: float


class Capacity(_Frozen):
    """requests_per_s: the largest rate found that meets the objective. too_much: the smallest found that does
    not. tried: in order of the rate."""

    version: Literal[1] = 1
    date: dt.date
    requests_per_s: float
    too_much: float
    tried: tuple[Tried, ...]
    conditions: Conditions

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises InputError if it cannot be written."""
        write_json(path, self, "the capacity")


def largest_rate(
    attain: Callable[[float], Tried], first: float, *, share: float, within: float
) -> tuple[float, float, tuple[Tried, ...]]:
    """(largest rate that holds, smallest that does not, every rate tried in their order).

    attain: tries a rate. first: where the search begins, requests a second. share: what must be attained.
    within: how far apart, relatively, the two rates may be in the end. Raises ConfigError if no rate holds,
    or every one does.
    """
    tried = [attain(first)]
    step = 2.0 if tried[0].good_share >= share else 0.5
    while len(tried) < MOST_RATES and (tried[-1].good_share >= share) == (step > 1):
        tried.append(attain(tried[-1].requests_per_s * step))
    low, high = (tried[-2], tried[-1]) if step > 1 else (tried[-1], tried[-2])
    if len(tried) == MOST_RATES:
        what = "every rate meets" if step > 1 else "no rate meets"
        raise ConfigError(
            f"{what} the objective (tried up to {tried[-1].requests_per_s:g} requests/s): give an objective "
            "that the load decides about (slo.ttft_s)",
            param="slo",
        )
    while high.requests_per_s > low.requests_per_s * (1 + within):
        middle = attain((low.requests_per_s * high.requests_per_s) ** 0.5)
        tried.append(middle)
        low, high = (middle, high) if middle.good_share >= share else (low, middle)
    tried.sort(key=lambda one: one.requests_per_s)
    return low.requests_per_s, high.requests_per_s, tuple(tried)
