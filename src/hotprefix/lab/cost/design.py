"""Which batches a calibration runs. Owns: `Design`, lengths and counts sized to a machine's speed.

Rules: every term of the model is moved on its own: chunk size against what stands before it, sequences
against their contexts, and both at once. The texts are few and their beginnings are used again and again
(from the prefix cache), so that long contexts are paid for once and not for every batch. Units: tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

LONGEST, SHORTEST = 32768, 64
CHUNKS = (16, 64, 256, 1024)
TEXT_SHARE = 0.3  # of all that can be computed, at most, for texts that later batches find in the cache
ROUND_SHARE = 0.2  # and for one round of the batches
ROOM_SHARE = 0.8  # of the cache, for the texts and a round, so that the texts stay


@dataclass(frozen=True, slots=True)
class Decodes:
    """`count` sequences of about `context` tokens that decode together, for some steps alone, then with one
    prefill chunk of each of `chunks` in the same step."""

    count: int
    context: int
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Design:
    """prefixes: what stands before each of `chunks`."""

    prefixes: tuple[int, ...]
    chunks: tuple[int, ...]
    decodes: tuple[Decodes, ...]

    @property
    def texts(self) -> tuple[int, ...]:
        """Length of text i: the longest beginning of it that any batch uses."""
        lengths = [0] * max(scene.count for scene in self.decodes)
        lengths[0] = max(self.prefixes)
        for scene in self.decodes:
            for i in range(scene.count):
                lengths[i] = max(lengths[i], scene.context)
        return tuple(lengths)

    @property
    def extent(self) -> str:
        """How far the batches reach, for people: beyond it the prices are extrapolated."""
        most = max(scene.count for scene in self.decodes)
        return (
            f"contexts to {max(self.prefixes) + max(self.chunks)}, chunks to {max(self.chunks)}, "
            f"{most} decodes"
        )

    @property
    def round_tokens(self) -> int:
        """Tokens of all chunks that one round computes."""
        return len(self.prefixes) * sum(self.chunks) + sum(sum(scene.chunks) for scene in self.decodes)


def design(longest: int, largest: int, slots: int) -> Design:
    """Batches with contexts up to `longest`, chunks up to `largest` and so many slots."""
    chunks = tuple(n for n in CHUNKS if n <= largest) or (largest,)
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= slots]
    few = [n for n in counts if n <= 8]
    between = [n for n in counts if n not in (few[-1], counts[-1])]
    return Design(
        prefixes=(0, longest // 4, longest // 2, longest),
        chunks=chunks,
        decodes=(
            Decodes(1, longest // 16, ()),
            Decodes(1, longest, chunks[:1]),
            Decodes(few[-1], longest // 16, chunks[::2]),
            Decodes(few[-1], longest // 4, chunks[1::2]),
            Decodes(few[len(few) // 2], longest // 4, ()),
            Decodes(counts[-1], longest // 32, chunks[::2]),
            *(Decodes(n, longest // 32, ()) for n in between),
        ),
    )


def fitting(room: int, positions: int, budget: int, slots: int, tokens: float) -> Design:
    """The largest design for an engine with `room` tokens of cache, `positions` of context, a token budget
    and so many slots, on which about `tokens` tokens can be computed in all; chunks give way last."""
    powers = [LONGEST >> i for i in range(LONGEST.bit_length()) if LONGEST >> i >= SHORTEST]
    for largest, longest in product(reversed(CHUNKS), powers):
        found = design(longest, largest, slots)
        total = sum(found.texts)
        if (
            largest <= budget // 2
            and longest + 2 * largest <= positions
            and total + found.round_tokens <= ROOM_SHARE * room
            and total <= TEXT_SHARE * tokens
            and found.round_tokens <= ROUND_SHARE * tokens
        ):
            return found
    return design(SHORTEST, min(CHUNKS[0], max(1, budget // 2)), slots)
