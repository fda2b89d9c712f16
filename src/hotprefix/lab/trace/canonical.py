"""Our own trace format. Owns: its lines, and how block ids are written so that sessions stay small.

Rules:
1. A trace is JSON lines. The first line is a header (`hotprefix_trace`: the version), each further one a
   request. A field with its default value is left out.
2. Block ids are numbers or, for consecutive ids, pairs [first, count]. Example: [7, [20, 3]] means 7, 20, 21,
   22.
3. With `base` and `keep`, a prompt begins with the first `keep` blocks of the context (prompt and answer) of
   request `base`, an earlier one of its session. That request must be one of the session's last OF_SESSION,
   and the session one of the last SESSIONS seen, so writer and reader need the same bounded memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from hotprefix.lab.trace.line_fields import INT32_MAX, MAX_BLOCK, STRICT, Outputs, Seconds, Tokens
from hotprefix.lab.trace.trace_request import Blocks, TraceRequest

VERSION: Final = 1
OF_SESSION: Final = 8
SESSIONS: Final = 1024
_FORBID: Final[ConfigDict] = {**STRICT, "extra": "forbid"}

BlockId = Annotated[int, Field(ge=0, le=MAX_BLOCK)]
Run = BlockId | tuple[BlockId, Annotated[int, Field(ge=1, le=INT32_MAX)]]


@dataclass(config=STRICT, slots=True, kw_only=True)
class Header:
    """The first line. block_size: tokens. source, notes: the provenance of the trace that was converted."""

    hotprefix_trace: Literal[1]
    block_size: Tokens
    name: str
    has_prefixes: bool
    has_sessions: bool
    source: str = ""
    notes: tuple[str, ...] = ()


@dataclass(config=_FORBID, slots=True, kw_only=True)
class Line:
    """A request as written; fields as in `TraceRequest`."""

    id: str
    input_length: Tokens
    output_length: Outputs
    arrival_s: Seconds | None = None
    session: str | None = None
    parent: str | None = None
    think_s: Seconds | None = None
    base: str | None = None
    keep: Outputs = 0
    blocks: list[Run] = Field(default_factory=list)
    output_blocks: list[Run] | None = None
    namespace: str = ""
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] = 0
    hold_s: Seconds = 0.0
    kind: str | None = None
    tools: dict[str, Any] | None = None


HEADER: Final = TypeAdapter(Header)
LINE: Final = TypeAdapter(Line)


class Recent:
    """The contexts that a later prompt of the same session may begin with."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, OrderedDict[str, Blocks]] = OrderedDict()

    def add(self, request: TraceRequest, block_size: int) -> None:
        """Remember the context of a request, if it has a session."""
        if request.session is None:
            return
        own = self._sessions.setdefault(request.session, OrderedDict())
        self._sessions.move_to_end(request.session)
        own[request.id] = context(request, block_size)
        if len(own) > OF_SESSION:
            own.popitem(last=False)
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)

    def of(self, session: str | None) -> OrderedDict[str, Blocks]:
        """A session's contexts by request id, the latest last."""
        return self._sessions.get(session, OrderedDict()) if session is not None else OrderedDict()


def context(request: TraceRequest, block_size: int) -> Blocks:
    """The blocks of a prompt and its answer."""
    if request.output_blocks is None or not len(request.output_blocks):
        return request.blocks
    return np.concatenate((request.blocks[: request.input_length // block_size], request.output_blocks))


def best_base(blocks: Blocks, contexts: OrderedDict[str, Blocks]) -> tuple[str | None, int]:
    """The request whose context has the longest common beginning with `blocks` (of equals the latest), and
    the length of that beginning in blocks."""
    best, keep = None, 0
    for name, held in reversed(contexts.items()):
        most = min(len(held), len(blocks))
        if most <= keep:
            continue
        differs = held[:most] != blocks[:most]
        common = int(differs.argmax()) if differs.any() else most
        if common > keep:
            best, keep = name, common
    return best, keep


def to_runs(blocks: Blocks) -> Iterator[int | list[int]]:
    """The ids as they are written: consecutive ones as [first, count]."""
    if not len(blocks):
        return
    cuts = np.flatnonzero(np.diff(blocks) != 1) + 1
    starts = [0, *cuts.tolist()]
    for start, stop in zip(starts, [*starts[1:], len(blocks)], strict=True):
        first, count = int(blocks[start]), stop - start
        yield first if count == 1 else [first, count]


def from_runs(runs: Iterable[int | tuple[int, int]], field: str, most: int) -> Blocks:
    """The ids of written runs, int32. Raises ValueError if there are more than `most`, or one is above
    MAX_BLOCK."""
    parts, total = [], 0
    for run in runs:
        first, count = run if isinstance(run, tuple) else (run, 1)
        total += count
        if total > most:
            raise ValueError(f"{field}: more than the {most} ids its tokens allow")
        if first + count - 1 > MAX_BLOCK:
            raise ValueError(
                f"{field}: id {first + count - 1} is beyond {MAX_BLOCK}: number the blocks from 0"
            )
        parts.append(np.arange(first, first + count, dtype=np.int32))
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
