"""Replay tables made up for tests of metrics, statistics and verdicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from hotprefix.lab.paired_sections import Run
from hotprefix.lab.sim.rows import LINK_COLUMNS, REQUEST_COLUMNS, WINDOW_COLUMNS


def request(number: int, **changes: Any) -> dict[str, Any]:
    """A request that finished: arrives at `number` s, waits 1 s, TTFT 2 s, 11 tokens in 1 s more; 100 prompt
    tokens of which 60 were known and 40 reused."""
    at = float(number)
    row: dict[str, Any] = {
        "id": f"r{number}", "session": None, "kind": None, "instance": 0, "outcome": "finished",
        "input_tokens": 100, "output_tokens": 11, "asked_output_tokens": 11, "ideal_tokens": 60, "heat": 1,
        "queue_depth": 0, "arrival_s": at, "admit_s": at + 1, "prefill_start_s": at + 1,
        "prefill_done_s": at + 2, "first_token_s": at + 2, "finish_s": at + 3, "requeue_s": 0.0,
        "matched_at_enqueue": 60, "matched_at_admission": 40, "retained_tokens": 40, "restored_l2_tokens": 0,
        "restored_l3_tokens": 0, "recomputed_tokens": 20, "cached_l1": 40, "cached_l2": 0, "cached_l3": 0,
        "regained_tokens": 0, "computed_tokens": 60, "rework_tokens": 0, "rework_output_tokens": 0,
        "retractions": 0, "failovers": 0, "available_tokens": None, "captured_tokens": None,
        "copied_tokens": None, "predicted_first_s": None,
    }  # fmt: skip
    assert row.keys() >= changes.keys()
    return row | changes


_NEVER = (
    "admit_s", "prefill_start_s", "prefill_done_s", "first_token_s", "finish_s", "requeue_s",
    "matched_at_admission", "retained_tokens", "regained_tokens", "restored_l2_tokens", "restored_l3_tokens",
    "recomputed_tokens", "cached_l1", "cached_l2", "cached_l3", "computed_tokens", "rework_tokens",
    "rework_output_tokens",
)  # fmt: skip
UNSERVED: dict[str, Any] = dict.fromkeys(_NEVER) | {"outcome": "unfinished", "output_tokens": 0}


def requests(*rows: dict[str, Any]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema=REQUEST_COLUMNS)


def window(start: float, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(WINDOW_COLUMNS, 0) | {
        "instance": 0, "start_s": start, "seconds": 30.0, "oldest_wait_s": 0.0,
    }  # fmt: skip
    assert row.keys() >= changes.keys()
    return row | changes


def windows(*rows: dict[str, Any]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema=WINDOW_COLUMNS)


def links(*rows: dict[str, Any]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema=LINK_COLUMNS)


def run(
    seed: int,
    stream: int,
    *,
    sessions: int = 40,
    sigma: float = 1.0,
    memory: float = 0.8,
    effect: float = 1.0,
    cold_effect: float = 1.0,
    loss: float = 0.3,
    evicted: int = 100,
) -> Run:
    """A replay with sessions whose latencies are lognormal (sigma), partly a session's own and correlated
    with its neighbours' (memory), partly common to every run of the same seed. stream: of its own noise.
    effect, cold_effect: factors on the TTFT of hot and cold requests. loss: share of the match on arrival
    that is gone at admission, on average. Every fourth request is cold."""
    shared, own = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1, stream])
    turns = shared.geometric(1 / 8, sessions)
    session = np.repeat(np.arange(sessions), turns)
    count = len(session)
    arrival = session * 10.0 + shared.uniform(0, 100, count)
    cold = np.arange(count) % 4 == 3
    wait = np.exp(sigma * (0.7 * shared.normal(size=count) + 0.7 * own.normal(size=count)))
    walks = _walk(shared, sessions, memory) + _walk(own, sessions, memory)
    wait *= np.exp(0.7 * sigma * walks)[session]
    wait *= np.where(cold, cold_effect, effect)
    gone = np.rint(np.clip(loss + 0.1 * own.normal(size=count), 0, 1) * 80 * (loss > 0)).astype(int)
    gone = np.where(cold, 0, gone)
    hit = np.where(cold, 0, 80)
    frame = requests(*(request(i) for i in range(count))).with_columns(
        session=pl.Series([f"s{s}" for s in session]),
        ideal_tokens=pl.Series(hit + 0), matched_at_enqueue=pl.Series(hit),
        matched_at_admission=pl.Series(hit - gone), retained_tokens=pl.Series(hit - gone),
        recomputed_tokens=pl.Series(gone), cached_l1=pl.Series(hit - gone),
        computed_tokens=pl.Series(100 - hit + gone), arrival_s=pl.Series(arrival),
        admit_s=pl.Series(arrival + wait / 2), prefill_start_s=pl.Series(arrival + wait / 2),
        prefill_done_s=pl.Series(arrival + wait), first_token_s=pl.Series(arrival + wait),
        finish_s=pl.Series(arrival + wait + 1),
    )  # fmt: skip
    steps = 40
    time = windows(*(window(30.0 * i, steps=100, prefill_s=10.0, scheduler_s=1.0) for i in range(steps)))
    time = time.with_columns(
        evicted_pages=pl.Series(own.poisson(evicted / steps, steps)),
        scheduler_s=pl.Series(1 + 0.1 * own.random(steps)),
    )
    return Run(seed, frame, time, links(), page_tokens=16)


def _walk(rng: np.random.Generator, count: int, memory: float) -> np.ndarray:
    values = rng.normal(size=count)
    for at in range(1, count):
        values[at] = memory * values[at - 1] + (1 - memory**2) ** 0.5 * values[at]
    return values
