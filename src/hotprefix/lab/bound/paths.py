"""A trace as paths of units. Owns: `Paths`, `Bound`, and which units of a request may be reused.

Rules:
1. A unit is a block of the trace or, if a page size is given, a page. An id stands for everything before it
   (see `TraceRequest`), so a request is a path from the root of a tree, and a unit is at the same place in
   the path of every request that has it.
2. By blocks: each block of the prompt that has an id counts, and a partial last block counts with the tokens
   that it has. This is the rule of Mooncake's published shares.
3. By pages, the engine's rule: only complete pages count, one prompt token is always computed (rule 10), and
   the last sampled token has no KV (rule 9).
4. If an answer's blocks are recorded, they are in the cache afterwards. The prompt's partial block then
   counts if it has the id of the block that it grows into.
5. Requests come in the order given, each all at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotprefix.errors import ConfigError
from hotprefix.lab.trace.trace_request import TraceRequest

Units = NDArray[np.int32] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Paths:
    """Holds 4 bytes (8 if pages are smaller than a block) for each unit of each path.

    units[r]: ids on the path of request r, including what it generates.
    counted[r]: how many of these, from the first on, are the prompt's and may be reused.
    lengths[r]: prompt tokens.
    unit_tokens: tokens of a unit.
    ids: all unit ids are below it.
    """

    units: list[Units]
    counted: NDArray[np.int64]
    lengths: NDArray[np.int64]
    unit_tokens: int
    ids: int

    def bound(self, capacity: int, hits: list[int]) -> Bound:
        """The figures of one capacity. hits: reused units of each request."""
        tokens = np.minimum(np.asarray(hits, dtype=np.int64) * self.unit_tokens, self.lengths)
        return Bound(
            capacity, sum(hits), int(self.counted.sum()), int(tokens.sum()), int(self.lengths.sum()), tokens
        )


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """What a cache with one rule of keeping reuses.

    capacity, reused_units, total_units: units; the total is of those that may be reused.
    reused_tokens, total_tokens: prompt tokens.
    by_request: reused tokens of each request in the order given, int64.
    """

    capacity: int
    reused_units: int
    total_units: int
    reused_tokens: int
    total_tokens: int
    by_request: NDArray[np.int64]

    @property
    def share(self) -> float:
        """Reused units / units that may be reused; 0 if there are none."""
        return self.reused_units / self.total_units if self.total_units else 0.0


def read_paths(requests: Iterable[TraceRequest], block_size: int, page_size: int | None = None) -> Paths:
    """The paths of a trace's requests. page_size: tokens; None: units are blocks. Raises ConfigError if it
    does not divide block_size."""
    if page_size is not None and (page_size < 1 or block_size % page_size):
        raise ConfigError(
            f"page_size={page_size}: give a divisor of the block size {block_size}", param="page_size"
        )

    def take(request: TraceRequest) -> tuple[Units, int]:
        return _blocks(request, block_size) if page_size is None else _pages(request, block_size, page_size)

    units: list[Units] = []
    counted: list[int] = []
    lengths: list[int] = []
    for request in requests:
        path, count = take(request)
        units.append(path)
        counted.append(min(count, len(path)))
        lengths.append(request.input_length)
    ids = max((int(path.max()) + 1 for path in units if len(path)), default=0)
    return Paths(
        units,
        np.array(counted, dtype=np.int64),
        np.array(lengths, dtype=np.int64),
        page_size or block_size,
        ids,
    )


def _blocks(request: TraceRequest, block_size: int) -> tuple[Units, int]:
    """The ids of the blocks on the request's path, and how many of them its prompt may take from the
    cache."""
    blocks, answer = request.blocks, request.output_blocks
    if answer is None or not len(answer):
        return blocks, len(blocks)
    full = request.input_length // block_size
    grows = len(blocks) > full and blocks[full] == answer[0]
    return np.concatenate((blocks[:full], answer)), full + int(grows)


def _pages(request: TraceRequest, block_size: int, page_size: int) -> tuple[Units, int]:
    """As `_blocks`, for complete pages that have KV."""
    blocks, count = _blocks(request, block_size)
    answer = request.output_blocks
    generated = max(1, request.output_length) - 1 if answer is not None and len(answer) else 0
    each = block_size // page_size
    if each > 1:
        blocks = (blocks.astype(np.int64)[:, None] * each + np.arange(each)).ravel()
    pages = blocks[: (request.input_length + generated) // page_size]
    return pages, min(count * each, (request.input_length - 1) // page_size)
