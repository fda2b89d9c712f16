"""A trace small enough to be run for real. Owns: `small`, and the two ways in which its requests arrive.

Rules: a block of the trace becomes a block of fewer tokens and keeps its id, so prompts share what they
shared, and only lengths shrink. Recorded answers are left out, because prompts must not depend on what a
model says. Requests that the engine could never run are left out and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotprefix.errors import InputError
from hotprefix.lab.trace.trace_request import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Small:
    """A trace that is small enough to be run.

    requests: in order of arrival.
    block_size: tokens of a block.
    left_out: how many requests are longer than the engine's context.
    """

    requests: tuple[TraceRequest, ...]
    block_size: int
    left_out: int

    @property
    def largest(self) -> int:
        """Positions of the longest request."""
        return max(r.input_length + r.output_length for r in self.requests)

    @property
    def distinct_tokens(self) -> int:
        """Tokens of all distinct blocks."""
        return len({(r.namespace, int(b)) for r in self.requests for b in r.blocks}) * self.block_size

    def first(self, count: int) -> Small:
        return replace(self, requests=self.requests[:count])


def small(trace: Trace, block: int, positions: int, outputs: int, limit: int) -> Small:
    """The first `limit` requests that fit. If arrivals are not recorded, sessions take turns. Raises
    InputError if the trace has no prefixes, or if none of its requests fits.

    block: how many tokens a block becomes.
    positions: the length of the engine's context.
    outputs: the largest number of output tokens of a request.
    """
    if not trace.has_prefixes:
        raise InputError(f"{trace.name}: no prefixes are recorded, so there is no reuse to compare")
    shrunk, left_out = [], 0
    for request in trace:
        made = _shrunk(request, trace.block_size, block, outputs)
        if made.input_length + made.output_length > positions:
            left_out += 1
            continue
        shrunk.append(made)
        if len(shrunk) == limit:
            break
    if not shrunk:
        raise InputError(
            f"{trace.name}: none of {left_out} requests fits {positions} positions at {block} tokens a "
            "block: give a smaller block",
            param="block",
        )
    return Small(tuple(_without_sessions(shrunk)), block, left_out)


def _shrunk(request: TraceRequest, recorded: int, block: int, outputs: int) -> TraceRequest:
    full, rest = divmod(request.input_length, recorded)
    return replace(
        request,
        input_length=full * block + -(-rest * block // recorded),
        output_length=max(1, min(outputs, -(-request.output_length * block // recorded))),
        output_blocks=None,
    )


def _without_sessions(requests: Sequence[TraceRequest]) -> Iterable[TraceRequest]:
    """The requests without their sessions: in order of arrival or, if that is not recorded, with sessions
    taking turns."""
    plain = [replace(r, session=None, parent=None, think_s=None, kind=None) for r in requests]
    if all(r.arrival_s is not None for r in requests):
        return sorted(plain, key=lambda r: r.arrival_s or 0.0)
    queues: dict[str | None, deque[TraceRequest]] = {}
    for request, alone in zip(requests, plain, strict=True):
        queues.setdefault(request.session, deque()).append(alone)
    order = []
    while queues:
        for session in list(queues):
            order.append(queues[session].popleft())
            if not queues[session]:
                del queues[session]
    return order


def arriving(requests: Sequence[TraceRequest], span_s: float, seed: int) -> tuple[TraceRequest, ...]:
    """The requests with random arrivals (exponential gaps), the last one at `span_s`."""
    gaps = np.random.default_rng(seed).exponential(size=len(requests))
    times = span_s * np.cumsum(gaps) / gaps.sum()
    return at(requests, [float(t) for t in times])


def at(requests: Sequence[TraceRequest], times: Sequence[float]) -> tuple[TraceRequest, ...]:
    """The requests with the given arrival times."""
    return tuple(replace(r, arrival_s=t) for r, t in zip(requests, times, strict=True))


def one_by_one(requests: Sequence[TraceRequest]) -> tuple[TraceRequest, ...]:
    """The requests as one session without think times: each arrives as soon as the one before has ended
    (closed loop)."""
    before = [None, *(r.id for r in requests[:-1])]
    return tuple(
        replace(
            r, session="one by one", parent=parent, arrival_s=0.0 if parent is None else None, think_s=0.0
        )
        for r, parent in zip(requests, before, strict=True)
    )
