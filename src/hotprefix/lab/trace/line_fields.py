"""Kinds of numbers in trace lines. Owns: their bounds, and naming blocks with dense int32 ids.

Rules: fields are strict: a boolean, a string or NaN is not a number.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Annotated, Final

import numpy as np
from pydantic import ConfigDict, Field

from hotprefix.lab.trace.trace_request import Blocks

INT32_MAX: Final = 2**31 - 1
MAX_SECONDS: Final = 1e12
MAX_BLOCK: Final = 2**30 - 1  # larger ids stand for positions that no block of the trace covers
STRICT: Final = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")

Tokens = Annotated[int, Field(ge=1, le=INT32_MAX)]
Outputs = Annotated[int, Field(ge=0, le=INT32_MAX)]
Stamp = Annotated[float, Field(le=1e19)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]

NO_BLOCKS: Final[Blocks] = np.empty(0, dtype=np.int32)
NO_BLOCKS.flags.writeable = False


class Names:
    """Dense ids, in order of first appearance, for a file's own names of blocks; one dictionary entry for
    each distinct block."""

    def __init__(self) -> None:
        self._ids: dict[Hashable, int] = {}

    def of(self, names: Iterable[Hashable]) -> Blocks:
        """The ids of these names, int32."""
        ids = self._ids
        return np.array([ids.setdefault(name, len(ids)) for name in names], dtype=np.int32)


def check_blocks(
    field: str, count: int, tokens: int, block_size: int, *, partial: bool | None = None
) -> None:
    """Raises ValueError unless a prompt has an id for each complete block. partial: whether its partial last
    block must have one too; None: it may."""
    complete, all_blocks = tokens // block_size, -(-tokens // block_size)
    allowed = {complete, all_blocks} if partial is None else {all_blocks if partial else complete}
    if count not in allowed:
        raise ValueError(
            f"{field}: {count} ids for {tokens} tokens, but blocks of {block_size} tokens make "
            f"{' or '.join(map(str, sorted(allowed)))}; is the block size right (--block-size)?"
        )
