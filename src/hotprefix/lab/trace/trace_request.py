"""One request of a trace. Owns: `TraceRequest`, `Provenance`, `Trace`: what readers yield and replays read.

Rules: lengths are in tokens, times in seconds. A block is `block_size` consecutive token positions. Its id is
unique within the trace and stands for its tokens *and* everything before it, so equal ids mean equal
prefixes. A trace holds no text and no token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request.

    id: unique within the trace.
    input_length: tokens, >= 1.
    output_length: tokens, >= 0. 0: none recorded; a replay samples the one token that ends a prefill.
    blocks: ids of the prompt's blocks, int32 from 0 to 2**30 - 1, shape (input_length // block_size,), or one
    more if the partial last block has an id (which may be the id of the block that it grows into). Empty if
    the trace records no prefixes.
    output_blocks: ids of the blocks of prompt and answer from block input_length // block_size on, so that
    the next turn's prompt finds what was generated. The first of them is the prompt's partial block,
    completed. None: not recorded; nothing that was generated is ever reused.
    arrival_s: since the trace's start, for open-loop replay and for a session's first request.
    parent, think_s: for closed-loop replay: the request arrives think_s after its parent's completion. The
    parent comes earlier in the trace and is of the same session.
    hold_s: how long its session asks that its pages stay for the next turn.
    kind: what the request adds ("user", "tool"); None if that is not recorded.
    """

    id: str
    input_length: int
    output_length: int
    blocks: Blocks
    arrival_s: float | None = None
    session: str | None = None
    parent: str | None = None
    think_s: float | None = None
    output_blocks: Blocks | None = None
    namespace: str = ""
    priority: int = 0
    hold_s: float = 0.0
    kind: str | None = None
    tools: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a trace comes from.

    source: the file, or the generator with its parameters.
    format: how it is written.
    notes: how ids, lengths and times were formed, and what was assumed; for readers of a report.
    """

    source: str
    format: str
    notes: tuple[str, ...] = ()


class Trace(Protocol):
    """A trace that can be read any number of times; each reading streams. The requests of a session come
    together or in order of arrival, and a parent always comes before its children.

    has_prefixes: blocks are recorded.
    has_sessions: closed-loop replay is possible.
    """

    @property
    def name(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def has_prefixes(self) -> bool: ...
    @property
    def has_sessions(self) -> bool: ...
    @property
    def provenance(self) -> Provenance: ...
    def __iter__(self) -> Iterator[TraceRequest]: ...
