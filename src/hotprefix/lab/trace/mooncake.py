"""Mooncake's published traces. Owns: the importer for `timestamp`, `input_length`, `output_length`,
`hash_ids` lines.

Rules (Mooncake, FAST'25): timestamps are in ms, and blocks have 512 tokens. A prompt has ceil(input_length /
512) ids, so its partial last block has one too. Ids are chained: an id stands for everything before it. There
are no sessions: open loop only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import numpy as np
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from hotprefix.lab.trace.line_fields import MAX_BLOCK, STRICT, Names, Outputs, Stamp, Tokens, check_blocks
from hotprefix.lab.trace.timestamps import Clock
from hotprefix.lab.trace.trace_request import Blocks, TraceRequest

BLOCK_SIZE: Final = 512
NOTES: Final = (
    "blocks: the file's hash_ids (numbered anew where they exceed 2**30); the partial last block has one",
    "answers: their blocks are not recorded, so nothing of an answer is reused",
    "no sessions: arrivals are fixed (open loop)",
)


@dataclass(config=STRICT, slots=True)
class _Line:
    timestamp: Stamp
    input_length: Tokens
    output_length: Outputs
    hash_ids: list[Annotated[int, Field(ge=0)]]


_LINE: Final = TypeAdapter(_Line)


class Mooncake:
    """Importer for one reading. block_size: tokens."""

    def __init__(self, block_size: int, clock: Clock) -> None:
        self._block_size = block_size
        self._clock = clock
        self._names: Names | None = None
        self._begun = False

    def take(self, line: int, raw: bytes) -> Sequence[TraceRequest]:
        row = _LINE.validate_json(raw)
        check_blocks("hash_ids", len(row.hash_ids), row.input_length, self._block_size, partial=True)
        if len(set(row.hash_ids)) < len(row.hash_ids):
            raise ValueError("hash_ids: the same id stands twice, but an id tells all that precedes it")
        request = TraceRequest(
            id=str(line),
            input_length=row.input_length,
            output_length=row.output_length,
            blocks=self._blocks(row.hash_ids),
            arrival_s=self._clock.seconds(row.timestamp, "timestamp"),
        )
        return (request,)

    def _blocks(self, hashes: list[int]) -> Blocks:
        """Block ids of hashes. They are the file's own numbers, which needs no memory, unless the file's
        first numbers are too large: then they are numbered anew."""
        largest = max(hashes)
        if not self._begun:
            self._begun = True
            self._names = Names() if largest > MAX_BLOCK else None
        if self._names is not None:
            return self._names.of(hashes)
        if largest > MAX_BLOCK:
            raise ValueError(f"hash_ids: {largest} is beyond {MAX_BLOCK}, and the file's first ids were not")
        return np.array(hashes, dtype=np.int32)
