"""The features of a step that cost time. Owns: `Features`, the four numbers that the cost model reads, and
how they are counted from a plan's chunks.

Rules: a chunk of one position counts as a decode, because it costs as much, even if it belongs to a prompt
(the last position of a prompt that was found whole in the cache). Every longer chunk counts as prefill. The
simulator and the calibration both count by `features`, so that a price means the same in both. Units: tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hotprefix.kernel.plan import Chunk


class Features(NamedTuple):
    """What one forward pass computes.

    prefill_tokens: positions computed in chunks of more than one position.
    prefill_context: the positions that these attend to, summed over them: n * start + n * (n + 1) / 2 for a
    chunk of n positions from `start`. Example: 3 positions from 5 attend to 6 + 7 + 8 = 21.
    decodes: chunks of one position.
    decode_context: the positions that those attend to, their own included.
    """

    prefill_tokens: int
    prefill_context: int
    decodes: int
    decode_context: int

    @property
    def regime(self) -> str:
        """What kind of step it is: prefill, decode or mixed."""
        if not self.decodes:
            return "prefill"
        return "mixed" if self.prefill_tokens else "decode"


def features(chunks: Iterable[Chunk]) -> Features:
    """The numbers of one forward pass over `chunks`."""
    tokens = context = decodes = decode_context = 0
    for chunk in chunks:
        start = chunk.start
        n = len(chunk.tokens) >> 2
        if n == 1:
            decodes += 1
            decode_context += start + 1
        else:
            tokens += n
            context += n * start + n * (n + 1) // 2
    return Features(tokens, context, decodes, decode_context)
