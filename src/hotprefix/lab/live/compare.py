"""A live and a simulated run of one workload, compared. Owns: `Level`, `compare`, and the replay of a live
order.

Rules:
1. Reuse is compared request by request and has to be equal.
2. An error of a time is simulated minus live: if it is positive, the simulator took the engine for slower
   than it is.
3. If requests reuse different numbers of tokens, the reason is tested: the simulator is given the live run's
   order of arrivals and steps, and no times, and then has to decide the same to the last event.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from hotprefix.cost.model import CostModel
from hotprefix.kernel.config import KernelConfig
from hotprefix.lab.live.live_and_simulated import Record, Run, simulated
from hotprefix.lab.live.small_trace import at
from hotprefix.lab.sim.arrivals import Loop
from hotprefix.lab.table_math import PERCENTILE_METHOD, Floats
from hotprefix.lab.trace.trace_request import TraceRequest

TIMES: Final = (
    ("TTFT", pl.col("first_token_s") - pl.col("arrival_s")),
    ("queue time", pl.col("admit_s") - pl.col("arrival_s")),
    ("completion", pl.col("finish_s") - pl.col("arrival_s")),
)
SMALLEST_S: Final = 1e-2  # the relative error of a shorter time means nothing
STEP_OF_ONE: Final = CostModel(
    name="one second a step", source="the order of a live run", model="any", dtype="any", hardware="any",
    date=dt.date(1970, 1, 1), base_s=1.0, prefill_token_s=0.0, prefill_context_s=0.0, decode_s=0.0,
    decode_context_s=0.0, scheduler_base_s=0.0, scheduler_running_s=0.0, scheduler_waiting_s=0.0,
    kv_token_bytes=1,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TimeError:
    """The percentiles of one time (`name`), and how far off they are in the simulation.

    live_*: measured, seconds.
    error_*: simulated minus live, seconds.
    relative_*: the error as a share of live; None if live is below SMALLEST_S.
    typical_s: the median over requests of the absolute error, seconds.
    between_*: the errors with every step shorter, and longer, by as much as the calibration may be off
    (`STANDARD_ERRORS` in against.py). An error in this range needs no other explanation. None if the
    calibration does not say how far off it may be.
    """

    name: str
    live_p50_s: float
    live_p95_s: float
    error_p50_s: float
    error_p95_s: float
    relative_p50: float | None
    relative_p95: float | None
    typical_s: float
    between_p50_s: tuple[float, float] | None = None
    between_p95_s: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Reuse:
    """A request that reused another number of tokens live than in the simulation.

    live, simulated: tokens reused.
    """

    request: str
    live: int
    simulated: int


@dataclass(frozen=True, slots=True)
class Level:
    """The comparison under one load.

    load: share of saturation; None if requests come one by one or all at once.
    makespan_s: when the last request ended, live.
    reused: tokens, live.
    differ: the requests that reused different numbers of tokens.
    steps_equal: how many steps, from the first on, are the same on both sides.
    events_equal: whether all events are the same.
    order_parity: whether all events are the same when the simulator is given the live order; None for one by
    one, which gives the order anyway.
    diverged: the first events that differ, live and simulated; None if none do.
    """

    name: str
    load: float | None
    requests: int
    makespan_s: float
    input_tokens: int
    reused: int
    differ: tuple[Reuse, ...]
    steps_live: int
    steps_simulated: int
    steps_equal: int
    events_equal: bool
    order_parity: bool | None
    diverged: tuple[str, str] | None
    times: tuple[TimeError, ...]


def compare(
    name: str, load: float | None, live: Run, predicted: Run, order_parity: bool | None,
    spread: tuple[Run, Run] | None = None,
) -> Level:  # fmt: skip
    """Compare a live run with its prediction. spread: the predictions with shorter and with longer steps."""
    reused, expected = live.requests["cached_l1"], predicted.requests["cached_l1"]
    return Level(
        name=name,
        load=load,
        requests=len(reused),
        makespan_s=live.makespan_s,
        input_tokens=int(live.requests["input_tokens"].sum()),
        reused=int(reused.sum()),
        differ=tuple(
            Reuse(request, a, b)
            for request, a, b in zip(live.requests["id"], reused, expected, strict=True)
            if a != b
        ),
        steps_live=len(live.steps),
        steps_simulated=len(predicted.steps),
        steps_equal=_common(live.steps, predicted.steps),
        events_equal=live.events == predicted.events,
        order_parity=order_parity,
        diverged=_divergence(live.events, predicted.events),
        times=tuple(_time_error(name, of, live, predicted, spread) for name, of in TIMES),
    )


def same_in_order(kernel: KernelConfig, requests: Sequence[TraceRequest], block_size: int, live: Run) -> bool:
    """Whether the simulator decides what the engine decided if all that it is told of times is before which
    step each request arrived."""
    ordered = at(requests, [float(step) for step in live.before])
    return simulated(kernel, STEP_OF_ONE, ordered, block_size, Loop.OPEN).events == live.events


def _time_error(
    name: str, of: pl.Expr, live: Run, predicted: Run, spread: tuple[Run, Run] | None
) -> TimeError:
    real, guess = _values(live, of), _values(predicted, of)
    p50, p95 = _percentiles(real)
    guess_p50, guess_p95 = _percentiles(guess)
    between = None
    if spread is not None:
        (fast50, fast95), (slow50, slow95) = (_percentiles(_values(run, of)) for run in spread)
        between = (fast50 - p50, slow50 - p50), (fast95 - p95, slow95 - p95)
    return TimeError(
        name, p50, p95, guess_p50 - p50, guess_p95 - p95, _share(guess_p50 - p50, p50),
        _share(guess_p95 - p95, p95), float(np.median(np.abs(guess - real))), *(between or (None, None)),
    )  # fmt: skip


def _values(run: Run, of: pl.Expr) -> Floats:
    return run.requests.select(of).to_series().to_numpy()


def _percentiles(values: Floats) -> tuple[float, float]:
    p50, p95 = np.percentile(values, (50, 95), method=PERCENTILE_METHOD)
    return float(p50), float(p95)


def _share(error: float, of: float) -> float | None:
    return None if of < SMALLEST_S else error / of


def _common(left: Sequence[Record], right: Sequence[Record]) -> int:
    """How many records, from the first on, are equal."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))


def _divergence(live: Sequence[Record], predicted: Sequence[Record]) -> tuple[str, str] | None:
    if live == predicted:
        return None
    first = _common(live, predicted)
    return _told(live, first), _told(predicted, first)


def _told(events: Sequence[Record], index: int) -> str:
    if index >= len(events):
        return "nothing more"
    fields = dict(events[index])
    kind = fields.pop("k")
    return f"{kind} ({', '.join(f'{key} {value}' for key, value in fields.items())})"
