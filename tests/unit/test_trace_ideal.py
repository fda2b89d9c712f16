"""What an endless cache would reuse, and a trace's sums."""

from __future__ import annotations

import numpy as np

from hotprefix.lab.trace.ideal import EndlessCache, Ideal
from hotprefix.lab.trace.info import info
from hotprefix.lab.trace.trace_request import TraceRequest
from tests.support.traces import ideal
from tests.unit.test_trace_canonical import ids, made, request


def test_leading_blocks_only_and_answers_too() -> None:
    trace = made(
        request("a", 40, 5, 6, output_blocks=ids(7)),
        request("b", 50, 5, 6, 7, 9),  # the answer is found; the partial last block is new
        request("c", 50, 5, 8, 7, 9),  # nothing counts behind a miss
        request("d", 50, 5, 6, 7, 9),  # all of it, with the partial block: 50 tokens, not 64
        request("e", 10, 10**6),
    )
    assert list(ideal(trace)) == [(0, 0), (48, 1), (16, 2), (50, 3), (0, 0)]
    found = info(trace)
    assert (found.blocks, found.ideal_reused_blocks, found.distinct_blocks) == (15, 8, 6)
    assert found.ideal_reuse_share == 8 / 15


def test_a_prompt_without_blocks_is_cold() -> None:
    cache = EndlessCache(16)
    empty = TraceRequest(id="a", input_length=5, output_length=1, blocks=ids())
    assert cache.add(empty) == Ideal(0, 0) == cache.add(empty)
    assert cache.distinct == 0


def test_agreement_with_a_plain_set() -> None:
    """On random chains, the result equals that of the rule written out block by block."""
    random = np.random.default_rng(5)
    seen: set[int] = set()
    firsts: list[int] = []
    cache = EndlessCache(4)
    for n in range(500):
        blocks = np.cumsum(random.integers(1, 3, size=random.integers(1, 12))).astype(np.int32)
        expected = next((i for i, b in enumerate(blocks.tolist()) if b not in seen), len(blocks))
        found = cache.add(request(str(n), 4 * len(blocks), *blocks.tolist()))
        assert found == (4 * expected, firsts.count(int(blocks[0])))
        seen |= set(blocks.tolist())
        firsts.append(int(blocks[0]))
        assert cache.distinct == len(seen)


def test_sums_and_percentiles() -> None:
    trace = made(
        request("a", 32, 1, 2, arrival_s=1.0, session="s"),
        request("b", 40, 1, 2, arrival_s=9.0, session="s", parent="a", think_s=3.0),
        request("c", 35, 7, 8, arrival_s=4.0, session="t"),
    )
    found = info(trace)
    assert (found.requests, found.sessions, found.input_tokens, found.output_tokens) == (3, 2, 107, 27)
    assert found.span_s == 8.0
    assert found.input_length == {"p50": 35.0, "p90": 39.0, "p99": 39.9, "max": 40.0}
    assert found.think_s == {"p50": 3.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    assert info(made()).ideal_reuse_share is None
    assert info(made()).span_s is None
