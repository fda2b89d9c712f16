"""From block ids to what the kernel matches. Owns: `PromptMaker`.

Rules:
1. The kernel's token at position p is the id of the block in which p lies, so two prompts share tokens
   exactly as far as they share blocks.
2. Positions that no recorded block covers hold a filler that no other request has, so they are never reused.
   Fillers are counted down from the largest int32, which is twice the largest block id.

Example: blocks of 4 tokens, a prompt of 10 tokens with the blocks 7 and 3: its tokens are 7 7 7 7 3 3 3 3 f
f.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotprefix.kernel.tokens import TOKEN_BYTES, word
from hotprefix.lab.trace.trace_request import Blocks, TraceRequest

MAX_TOKEN = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """tokens: the prompt. outputs: what will be generated after it. Both are int32 bytes."""

    tokens: bytes
    outputs: bytes


class PromptMaker:
    """Makes the prompts of a trace with that block size. Each call takes the next filler."""

    def __init__(self, block_size: int) -> None:
        self._block = block_size
        self._serial = 0
        self._scratch: Blocks = np.empty(0, dtype="<i4")

    def make(self, request: TraceRequest) -> Prompt:
        """Tokens of a request's prompt and answer."""
        self._serial += 1
        filler, block = MAX_TOKEN - self._serial, self._block
        length, wanted = request.input_length, max(1, request.output_length)
        covered = request.blocks[: -(-length // block)]
        tokens = self._room(-(-length // block) * block)
        tokens.reshape(-1, block)[: len(covered)] = covered[:, None]
        tokens[len(covered) * block :] = filler
        outputs = word(filler) * wanted
        if request.output_blocks is not None and len(request.output_blocks):
            inside = length % block
            known = spread(request.output_blocks, block)[inside : inside + wanted].tobytes()
            outputs = known + outputs[len(known) :]
        return Prompt(tokens[:length].tobytes(), outputs)

    def _room(self, tokens: int) -> Blocks:
        """An array into which a prompt is written. It is the same each time, because new memory is slow."""
        if len(self._scratch) < tokens:
            self._scratch = np.empty(2 * tokens, dtype="<i4")
        return self._scratch[:tokens]


def spread(ids: Blocks, block: int) -> Blocks:
    """Each id `block` times, as np.repeat gives it, which is three times as slow."""
    out = np.empty((len(ids), block), dtype=np.int32)
    out[:] = ids[:, None]
    return out.reshape(-1)


def sampled(outputs: bytes, done: int, count: int) -> bytes:
    """`count` of the generated tokens after the first `done`."""
    return outputs[done * TOKEN_BYTES : (done + count) * TOKEN_BYTES]
