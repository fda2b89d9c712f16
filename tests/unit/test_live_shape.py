"""Traces made small for a live run, clocks, and how two runs are compared: by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import pytest

from hotprefix.errors import ConfigError, InputError
from hotprefix.kernel import tokens as tk
from hotprefix.lab.live.against import Options
from hotprefix.lab.live.compare import Reuse, compare
from hotprefix.lab.live.live_and_simulated import Run, prompt_ids
from hotprefix.lab.live.run_clock import CpuClock, WallClock
from hotprefix.lab.live.small_trace import arriving, at, one_by_one, small
from hotprefix.lab.sim.rows import REQUEST_COLUMNS
from hotprefix.lab.trace.trace_request import TraceRequest


def request(name: str, tokens: int, outputs: int, blocks: Sequence[int], **fields: Any) -> TraceRequest:
    return TraceRequest(name, tokens, outputs, np.array(blocks, dtype=np.int32), **fields)


@dataclass
class MadeTrace:
    requests: list[TraceRequest]
    block_size: int = 64
    name: str = "made"
    has_prefixes: bool = True
    has_sessions: bool = False
    provenance: object = field(default=None)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)


def test_lengths_shrink_and_blocks_keep_their_ids() -> None:
    """130 tokens are 2 blocks of 64 and 2 more; at 16 a block 2 * 16 + ceil(2 * 16 / 64) = 33; 100 outputs
    become 25, of which 20 are left."""
    made = small(MadeTrace([request("a", 130, 100, [7, 8, 9], output_blocks=np.array([1]))]), 16, 99, 20, 5)
    (one,) = made.requests
    assert (one.input_length, one.output_length, one.output_blocks) == (33, 20, None)
    assert one.blocks.tolist() == [7, 8, 9]
    assert (made.largest, made.distinct_tokens, made.left_out) == (53, 48, 0)


def test_what_is_too_long_is_left_out_and_counted() -> None:
    trace = MadeTrace([request("a", 640, 1, []), request("b", 64, 1, [1]), request("c", 64, 1, [1])])
    made = small(trace, 16, 20, 4, 1)
    assert [r.id for r in made.requests] == ["b"]
    assert made.left_out == 1
    with pytest.raises(InputError, match="none of 3 requests fits 10 positions at 16 tokens a block"):
        small(trace, 16, 10, 4, 1)
    trace.has_prefixes = False
    with pytest.raises(InputError, match="made: no prefixes are recorded"):
        small(trace, 16, 99, 4, 1)


def test_sessions_take_turns_unless_arrivals_are_recorded() -> None:
    three = [request(n, 8, 1, [], session=n[0]) for n in ("a1", "a2", "b1")]
    ids = [r.id for r in small(MadeTrace(three), 16, 99, 4, 9).requests]
    assert ids == ["a1", "b1", "a2"]
    timed = [request("late", 8, 1, [], arrival_s=2.0), request("early", 8, 1, [], arrival_s=1.0)]
    assert [r.id for r in small(MadeTrace(timed), 16, 99, 4, 9).requests] == ["early", "late"]


def test_arrivals() -> None:
    requests = small(MadeTrace([request(f"r{i}", 8, 1, []) for i in range(5)]), 16, 99, 4, 9).requests
    times = [r.arrival_s for r in arriving(requests, 10.0, seed=3)]
    assert times == sorted(times)  # type: ignore[type-var]
    assert times[-1] == pytest.approx(10.0)
    assert times == [r.arrival_s for r in arriving(requests, 10.0, seed=3)]
    assert times != [r.arrival_s for r in arriving(requests, 10.0, seed=4)]
    assert [r.arrival_s for r in at(requests, [0.0, 1.0, 2.0, 3.0, 4.0])] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [r.parent for r in one_by_one(requests)] == [None, "r0", "r1", "r2", "r3"]


def test_prompts_share_ids_exactly_as_far_as_they_share_blocks() -> None:
    def ids(*blocks: int) -> tuple[int, ...]:
        return prompt_ids(tk.encode([b for b in blocks for _ in range(16)]), 50_000)

    assert ids(3, 4)[:16] == ids(3, 5)[:16]
    assert not set(ids(3, 4)[16:]) & set(ids(3, 5)[16:])
    assert ids(3, 4)[16:] != ids(4, 3)[:16], "a block's ids depend on where it stands"
    assert ids(-1)[:16] != ids(-2)[:16]
    small_ids = prompt_ids(tk.encode(range(1000)), 7)
    assert set(small_ids) == set(range(7))


def test_the_processor_clock_skips_waits_and_ignores_sleep() -> None:
    clock = CpuClock()
    clock.wait_until(1000.0)
    after = clock()
    assert 1000.0 <= after < 1001.0
    time.sleep(0.05)
    assert clock() - after < 0.04
    clock.wait_until(5.0)
    assert clock() >= after
    wall = WallClock()
    wall.wait_until(0.02)
    assert wall() >= 0.02


def run(reused: list[int], firsts: list[float], events: list[dict[str, Any]]) -> Run:
    rows = [
        dict.fromkeys(REQUEST_COLUMNS)
        | {
            "id": f"{i}", "input_tokens": 100, "cached_l1": cached, "arrival_s": 1.0, "admit_s": 1.0,
            "first_token_s": first, "finish_s": first + 1.0,
        }
        for i, (cached, first) in enumerate(zip(reused, firsts, strict=True))
    ]  # fmt: skip
    return Run(pl.DataFrame(rows, schema=REQUEST_COLUMNS), events)


def test_a_comparison_by_hand() -> None:
    """TTFT live 1, 2, 3, simulated 1.5, 2.5, 2.25: medians 2 and 2.25, p95 2.9 and 2.475."""
    steps = [{"k": "step", "step": i} for i in range(3)]
    live = run([0, 16, 32], [2.0, 3.0, 4.0], steps)
    guess = run([0, 16, 48], [2.5, 3.5, 3.25], [*steps[:2], {"k": "step", "step": 9}, {"k": "x"}])
    found = compare("by hand", 0.7, live, guess, order_parity=False)
    assert found.differ == (Reuse("2", 32, 48),)
    assert (found.reused, found.input_tokens, found.makespan_s) == (48, 300, 5.0)
    assert (found.steps_live, found.steps_simulated, found.steps_equal) == (3, 3, 2)
    assert not found.events_equal
    assert found.diverged == ("step (step 2)", "step (step 9)")
    ttft, queue, completion = found.times
    assert (ttft.live_p50_s, ttft.error_p50_s, ttft.relative_p50) == (2.0, 0.25, 0.125)
    assert ttft.error_p95_s == pytest.approx(2.475 - 2.9)
    assert ttft.relative_p95 == pytest.approx((2.475 - 2.9) / 2.9)
    assert ttft.typical_s == 0.5
    assert (queue.live_p50_s, queue.relative_p50) == (0.0, None)
    assert completion.live_p50_s == 3.0
    same = compare("same", None, live, live, order_parity=None)
    assert (same.differ, same.events_equal, same.diverged, same.steps_equal) == ((), True, None, 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"limit": 0}, "limit=0: give a whole number >= 1"),
        ({"block": 0}, "block=0"),
        ({"seconds": 0.0}, r"seconds=0\.0: give seconds > 0"),
        ({"clock": "sun"}, "clock='sun': give one of wall, cpu"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options(**wrong)
