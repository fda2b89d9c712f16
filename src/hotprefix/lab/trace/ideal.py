"""What an endless cache would reuse. Owns: `EndlessCache`, request by request in the trace's order.

Rules: a request reuses its leading blocks, up to the first block that no earlier request had in its prompt or
its answer. The partial last block counts if it has an id. This is the share published for Mooncake's traces.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hotprefix.lab.trace.trace_request import Blocks, TraceRequest


class Ideal(NamedTuple):
    """What one request finds in an endless cache.

    tokens: how many leading tokens earlier requests had, at most input_length.
    heat: how many earlier requests had this prompt's first block; 0 if it has no block.
    """

    tokens: int
    heat: int


class EndlessCache:
    """Remembers every block that it was ever shown. It holds a byte for each block id, and a counter for each
    block that was the first of a prompt.

    late: tokens of answers that were known before they were given. A prompt that had them was counted as new,
    though it might have found them in another order. Nothing else lets requests of any order reuse more in
    all than the sum of what is found here.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._seen = np.zeros(1024, dtype=np.bool_)
        self._firsts: dict[int, int] = {}
        self.late = 0

    @property
    def distinct(self) -> int:
        """How many blocks it knows."""
        return int(self._seen.sum())

    def add(self, request: TraceRequest) -> Ideal:
        """What this request finds; its blocks are remembered afterwards."""
        blocks = request.blocks
        self._grow(blocks)
        known = self._seen[blocks]
        hit = int(known.argmin()) if len(known) else 0
        if len(known) and known[hit]:  # all blocks are known
            hit = len(known)
        if request.output_blocks is not None:
            self._grow(request.output_blocks)
            self.late += int(self._seen[request.output_blocks].sum()) * self._block_size
            self._seen[request.output_blocks] = True
        self._seen[blocks[hit:]] = True
        heat = 0
        if len(blocks):
            first = int(blocks[0])
            heat = self._firsts.get(first, 0)
            self._firsts[first] = heat + 1
        return Ideal(min(hit * self._block_size, request.input_length), heat)

    def _grow(self, blocks: Blocks) -> None:
        need = int(blocks.max()) + 1 if len(blocks) else 0
        if need > len(self._seen):
            more = np.zeros(max(need, 2 * len(self._seen)), dtype=np.bool_)
            more[: len(self._seen)] = self._seen
            self._seen = more
