"""One instance with an endless cache reuses exactly a trace's ideal share, block by block.

Prompts are rounded to whole blocks and one token: a partial last block counts in the share,
and the kernel always computes one token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from hotprefix.kernel.config import KernelConfig
from hotprefix.lab.sim.arrivals import Loop
from hotprefix.lab.sim.replay import Replay
from hotprefix.lab.sim.simulate import simulate
from hotprefix.lab.trace.cc_sessions import Assumed
from hotprefix.lab.trace.open_trace import open_trace
from hotprefix.lab.trace.trace_request import Trace, TraceRequest
from tests.support.replays import price
from tests.support.traces import shared


def whole_blocks(trace: Trace) -> Iterator[TraceRequest]:
    for r in trace:
        yield replace(r, input_length=len(r.blocks) * trace.block_size + 1, output_length=1)


def reused_blocks(trace: Trace, loop: Loop, pages: int) -> tuple[int, int]:
    """(reused, all) blocks of a replay in which nothing is ever evicted."""
    kernel = KernelConfig(
        total_pages=pages, page_size=trace.block_size, max_batched_tokens=8192, max_running=256
    )
    tables = simulate(
        Replay(kernel, price(prefill_token_s=3e-5, prefill_context_s=1e-10), loop=loop),
        whole_blocks(trace), block_size=trace.block_size,
    )  # fmt: skip
    assert tables.requests["outcome"].unique().to_list() == ["finished"]
    assert sum(c.evicted_pages for c in tables.counters) == 0
    required = tables.requests["input_tokens"].sum() - tables.requests.height
    return tables.requests["cached_l1"].sum() // trace.block_size, required // trace.block_size


@pytest.mark.parametrize(
    ("name", "limit", "share", "blocks"),
    [
        ("mooncake_fast25_conversation_b512.jsonl.gz", 5000, 43_319, 129_968),
        ("mooncake_fast25_synthetic_b512.jsonl.gz", None, 77_953, 121_877),
    ],
)
def test_mooncake(name: str, limit: int | None, share: int, blocks: int) -> None:
    trace = open_trace(shared(name), limit=limit)
    assert reused_blocks(trace, Loop.OPEN, 200_000) == (share, blocks)


@pytest.mark.slow
def test_mooncake_conversation_whole() -> None:
    trace = open_trace(shared("mooncake_fast25_conversation_b512.jsonl.gz"))
    reused, blocks = reused_blocks(trace, Loop.OPEN, 400_000)
    assert f"{reused / blocks:.4%}" == "36.6412%"


def test_coding_agents() -> None:
    """The first sessions; all of them: `test_all_coding_agents`."""
    trace = open_trace(
        shared("cc_weka_sessions_b64.jsonl.gz"), limit=1500, assumed=Assumed(shared_prefix=False)
    )
    reused, blocks = reused_blocks(trace, Loop.CLOSED, 400_000)
    assert (reused, blocks) == (2_256_626, 2_367_702)


@pytest.mark.slow
def test_all_coding_agents() -> None:
    trace = open_trace(shared("cc_weka_sessions_b64.jsonl.gz"), assumed=Assumed(shared_prefix=False))
    reused, blocks = reused_blocks(trace, Loop.CLOSED, 4_000_000)
    assert f"{reused / blocks:.1%}" == "96.3%"
