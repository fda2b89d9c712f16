"""No policy reuses more in the simulator than the clairvoyant bound allows for the order it admitted.

If requests run one at a time, this is a theorem. If they overlap it is an observation, and the order of
admission must be known from the table: requests that are admitted in the same step are in order of arrival
only with `fcfs`.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotprefix.kernel.config import Eviction, Flight, Order, Publication, Refresh
from hotprefix.lab.bound.clairvoyant import clairvoyant
from hotprefix.lab.bound.paths import read_paths
from hotprefix.lab.trace.trace_request import TraceRequest
from tests.support.replays import BLOCK, replay, request

LONGEST = 6
SMALLEST = 8  # pages: the longest prompt, its partial page, and what it generates

prompts = st.tuples(
    st.lists(st.sampled_from([0, 0, 1, 2]), min_size=1, max_size=LONGEST),
    st.integers(0, 2),  # how many of its last blocks are the answer
    st.integers(0, BLOCK - 1),
    st.sampled_from([0.0, 0.02, 0.2]),  # seconds after the one before
)
policies = st.fixed_dictionaries(
    {
        "eviction": st.sampled_from(Eviction), "order": st.sampled_from(Order),
        "refresh": st.sampled_from(Refresh), "publication": st.sampled_from(Publication),
        "flight": st.sampled_from(Flight), "max_batched_tokens": st.sampled_from([4, 12, 256]),
    }
)  # fmt: skip


def trace_of(words: list[tuple[list[int], int, int, float]]) -> list[TraceRequest]:
    names: dict[tuple[int, ...], int] = {}
    found: list[TraceRequest] = []
    now = 0.0
    for word, answer, tail, gap in words:
        now += gap
        ids = [names.setdefault(tuple(word[:k]), len(names)) for k in range(1, len(word) + 1)]
        cut = max(1, len(ids) - answer)
        if cut < len(ids):
            more = {"output_blocks": np.array(ids[cut:], dtype=np.int32)}
            outputs, tail = (len(ids) - cut) * BLOCK + 1, 0
        else:
            more, outputs = {}, 2
        found.append(request(str(len(found)), ids[:cut], outputs, tail=tail, arrival=now, **more))
    return found


def reused_and_bound(trace: list[TraceRequest], pages: int, **config: object) -> tuple[int, int]:
    """Prompt tokens reused in a replay, and the bound for the order in which it admitted."""
    done = replay(trace, total_pages=pages, **config).requests.sort("admit_s", "id")
    assert set(done["outcome"]) == {"finished"}
    admitted = read_paths((trace[int(name) - 1] for name in done["id"]), BLOCK, BLOCK)
    (bound,) = clairvoyant(admitted, [pages])
    return int(done["cached_l1"].sum()), bound.reused_tokens


@settings(max_examples=120)
@given(
    words=st.lists(prompts, min_size=2, max_size=14),
    pages=st.integers(SMALLEST, 14),
    config=policies,
)
def test_no_policy_beats_the_bound(
    words: list[tuple[list[int], int, int, float]], pages: int, config: dict[str, object]
) -> None:
    reused, bound = reused_and_bound(trace_of(words), pages, max_running=1, **config)
    assert reused <= bound


@settings(max_examples=60)
@given(words=st.lists(prompts, min_size=2, max_size=14), pages=st.integers(SMALLEST, 14), config=policies)
def test_nor_do_requests_that_overlap(
    words: list[tuple[list[int], int, int, float]], pages: int, config: dict[str, object]
) -> None:
    config = config | {"max_running": 3, "order": Order.FCFS}
    reused, bound = reused_and_bound(trace_of(words), pages, **config)
    assert reused <= bound


@pytest.mark.parametrize("eviction", Eviction)
def test_with_room_for_everything_each_policy_reaches_it(eviction: Eviction) -> None:
    words = [
        ([0, 1, 2], 0, 1, 0.2),
        ([0, 1, 2, 2], 1, 0, 0.2),
        ([0, 1, 2, 2, 1], 0, 1, 0.2),
    ]  # 2 of 3 pages, then 3 and the answer
    assert reused_and_bound(trace_of(words), 30, eviction=eviction) == (6 * BLOCK, 6 * BLOCK)


def test_a_cycle_that_lru_loses() -> None:
    """Three prompts of four pages come in turn, and there are ten pages. LRU finds one page each time, the
    head of the prompt whose tail it evicted. A cache that knows the future reuses 20 of the 24 pages that
    come back."""
    trace = [request(str(n), range(4 * (n % 3), 4 * (n % 3) + 4), 1, arrival=n) for n in range(9)]
    assert reused_and_bound(trace, 10, max_running=1) == (6 * BLOCK, 20 * BLOCK)
