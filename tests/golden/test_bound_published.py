"""LRU, FIFO and clairvoyant reuse on Mooncake's traces equal kvcache-simulator's, token by token.

The figures are those of kvcache-simulator 0.1.3 (PyPI, KVCache.AI), policies `fifo`, `lru` and `optimal`, of
its measured second half of the requests. docs/decisions/0013 tells how they were made.
"""

from __future__ import annotations

import numpy as np
import pytest

from hotprefix.lab.bound.clairvoyant import clairvoyant
from hotprefix.lab.bound.paths import Paths, read_paths
from hotprefix.lab.bound.recency import fifo, lru
from hotprefix.lab.trace.open_trace import open_trace
from tests.support.traces import ideal, shared

CONVERSATION = "mooncake_fast25_conversation_b512.jsonl.gz"
SYNTHETIC = "mooncake_fast25_synthetic_b512.jsonl.gz"
AGENTS = "cc_weka_sessions_b64.jsonl.gz"

PEER = [  # file, first requests, capacity in blocks: tokens reused by fifo, lru, optimal
    (CONVERSATION, 12031, 1000, (3_105_848, 3_173_822, 13_381_287)),
    (CONVERSATION, 12031, 4000, (5_646_252, 5_837_031, 23_305_276)),
    (CONVERSATION, 12031, 16000, (16_277_891, 18_770_545, 27_038_068)),
    (CONVERSATION, 12031, 64000, (24_369_059, 26_053_492, 27_038_068)),
    (CONVERSATION, 5000, 100, (1_048_576, 1_280_000, 2_223_910)),
    (CONVERSATION, 5000, 500, (1_254_912, 1_311_744, 4_360_136)),
    (CONVERSATION, 5000, 4000, (2_559_901, 2_598_301, 10_153_316)),
    (CONVERSATION, 5000, 30000, (9_095_953, 10_181_344, 11_749_235)),
    (SYNTHETIC, 3993, 1000, (4_447_597, 4_755_642, 13_311_599)),
    (SYNTHETIC, 3993, 4000, (12_710_380, 12_902_320, 23_739_240)),
    (SYNTHETIC, 3993, 16000, (24_960_718, 26_495_784, 31_535_563)),
]


@pytest.fixture(scope="module")
def published() -> dict[str, Paths]:
    return {}


def paths(published: dict[str, Paths], name: str) -> Paths:
    if name not in published:
        trace = open_trace(shared(name))
        published[name] = read_paths(trace, trace.block_size)
    return published[name]


def first(whole: Paths, count: int) -> Paths:
    return Paths(
        whole.units[:count], whole.counted[:count], whole.lengths[:count], whole.unit_tokens, whole.ids
    )


@pytest.mark.parametrize(("name", "count", "capacity", "tokens"), PEER)
def test_equal_to_the_public_simulator(
    published: dict[str, Paths], name: str, count: int, capacity: int, tokens: tuple[int, int, int]
) -> None:
    trace = first(paths(published, name), count)
    assert len(trace.units) == count
    found = (fifo(trace, capacity), lru(trace, capacity), clairvoyant(trace, [capacity])[0])
    assert tuple(int(b.by_request[count // 2 :].sum()) for b in found) == tokens


@pytest.mark.parametrize(
    ("name", "count", "reused", "total"),
    [
        (CONVERSATION, 12031, 105_710, 288_500),  # 36.64 %
        (CONVERSATION, 5000, 43_319, 129_968),  # 33.33 %
        (SYNTHETIC, 3993, 77_953, 121_877),  # 63.96 %
    ],
)
def test_with_room_for_everything_all_three_are_the_published_share(
    published: dict[str, Paths], name: str, count: int, reused: int, total: int
) -> None:
    trace = first(paths(published, name), count)
    room = trace.ids + 1
    for bound in (fifo(trace, room), lru(trace, room), *clairvoyant(trace, [room])):
        assert (bound.reused_units, bound.total_units) == (reused, total)


def test_more_capacity_never_lowers_it_on_conversation(published: dict[str, Paths]) -> None:
    trace = paths(published, CONVERSATION)
    capacities = [100, 300, 1000, 3000, 10_000, 30_000, 100_000]
    reuse = [bound.reused_units for bound in clairvoyant(trace, capacities)]
    assert reuse == sorted(reuse)
    assert reuse[-1] == 105_710 > reuse[0] > 0


@pytest.mark.slow
def test_the_coding_agent_file_with_room_for_everything(published: dict[str, Paths]) -> None:
    """94 million references; by request it is what an endless cache reuses."""
    trace = open_trace(shared(AGENTS))
    whole = read_paths(trace, trace.block_size)
    (bound,) = clairvoyant(whole, [whole.ids])
    assert (len(whole.units), whole.ids, bound.total_units) == (49_334, 3_372_875, 94_310_647)
    endless = np.array([found.tokens for found in ideal(trace)])
    assert np.array_equal(bound.by_request, endless)
