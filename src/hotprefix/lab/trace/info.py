"""The figures of a trace. Owns: `info`, one pass over it.

Rules: the pass holds the ids that an endless cache would know, and three numbers for each request.
Percentiles are numpy's linear ones. What a trace does not record is None.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hotprefix.lab.trace.ideal import EndlessCache
from hotprefix.lab.trace.trace_request import Trace, TraceRequest

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """A trace's figures, in tokens, blocks and seconds.

    ideal_reuse_share: the share of all prompt blocks that an endless cache would have had; None if no
    prefixes are recorded.
    span_s: from the first arrival to the last; None if arrivals are not recorded.
    input_length, output_length, think_s: percentiles by name (p50, ..., max).
    """

    name: str
    requests: int
    sessions: int
    input_tokens: int
    output_tokens: int
    block_size: int | None
    blocks: int
    distinct_blocks: int
    ideal_reused_blocks: int
    ideal_reuse_share: float | None
    span_s: float | None
    input_length: dict[str, float]
    output_length: dict[str, float]
    think_s: dict[str, float]
    has_prefixes: bool
    has_sessions: bool
    source: str
    format: str
    notes: tuple[str, ...]


def info(trace: Trace, seen: Callable[[TraceRequest], None] = lambda request: None) -> TraceInfo:
    """Read the whole trace and count. seen: called with each request. Raises what reading raises."""
    cache = EndlessCache(trace.block_size)
    inputs, outputs, thinks = array("q"), array("q"), array("d")
    sessions: set[str] = set()
    blocks = reused = 0
    earliest, latest = float("inf"), float("-inf")
    for request in trace:
        seen(request)
        inputs.append(request.input_length)
        outputs.append(request.output_length)
        blocks += len(request.blocks)
        reused += -(-cache.add(request).tokens // trace.block_size)
        if request.session is not None:
            sessions.add(request.session)
        if request.think_s is not None:
            thinks.append(request.think_s)
        if request.arrival_s is not None:
            earliest, latest = min(earliest, request.arrival_s), max(latest, request.arrival_s)
    return TraceInfo(
        name=trace.name,
        requests=len(inputs),
        sessions=len(sessions),
        input_tokens=sum(inputs),
        output_tokens=sum(outputs),
        block_size=trace.block_size if trace.has_prefixes else None,
        blocks=blocks,
        distinct_blocks=cache.distinct,
        ideal_reused_blocks=reused,
        ideal_reuse_share=reused / blocks if blocks else None,
        span_s=latest - earliest if latest >= earliest else None,
        input_length=_percentiles(inputs),
        output_length=_percentiles(outputs),
        think_s=_percentiles(thinks),
        has_prefixes=trace.has_prefixes,
        has_sessions=trace.has_sessions,
        source=trace.provenance.source,
        format=trace.provenance.format,
        notes=trace.provenance.notes,
    )


def _percentiles(values: array[int] | array[float]) -> dict[str, float]:
    """The percentiles by name; empty if there are no values."""
    if not values:
        return {}
    found = np.percentile(np.asarray(values), (*PERCENTILES, 100)).tolist()
    return dict(zip([*(f"p{p}" for p in PERCENTILES), "max"], found, strict=True))
