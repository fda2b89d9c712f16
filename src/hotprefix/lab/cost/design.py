"""Which batches a calibration runs. Owns: `Design`, lengths and counts sized to a machine's speed.

Rules: every term of the model is varied by itself: the size of a chunk, and the length of the cached prefix
before it; the number of decoding sequences, and the length of their contexts; and prefill beside decodes.
There are few texts, and batches use their beginnings again and again from the prefix cache, so a long context
is computed once and not for every batch. Units: tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

LONGEST, SHORTEST = 32768, 64
CHUNKS = (16, 64, 256, 1024)
TEXT_SHARE = 0.3  # of all tokens that can be computed, at most this share is for the texts that batches reuse
ROUND_SHARE = 0.2  # and at most this share for one round of the batches
ROOM_SHARE = 0.8  # at most this share of the cache is for the texts and a round, so that the texts stay in it


@dataclass(frozen=True, slots=True)
class Decodes:
    """`count` sequences of about `context` tokens decode together. First they decode alone for some steps;
    then a step for each of `chunks` computes a prefill chunk of that size too."""

    count: int
    context: int
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Design:
    """The batches of a calibration.

    prefixes, chunks: for each pair, a batch computes a chunk of that size after a cached prefix of that
    length.
    decodes: batches of sequences that decode.
    """

    prefixes: tuple[int, ...]
    chunks: tuple[int, ...]
    decodes: tuple[Decodes, ...]

    @property
    def texts(self) -> tuple[int, ...]:
        """The length of each text: the longest beginning of it that any batch uses."""
        lengths = [0] * max(scene.count for scene in self.decodes)
        lengths[0] = max(self.prefixes)
        for scene in self.decodes:
            for i in range(scene.count):
                lengths[i] = max(lengths[i], scene.context)
        return tuple(lengths)

    @property
    def extent(self) -> str:
        """How large the batches get, for people. Prices of larger steps are extrapolated."""
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
    """Batches with contexts up to `longest` tokens, chunks up to `largest` tokens and up to `slots`
    sequences."""
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
    """The largest design that an engine can run. If not everything fits, chunks are made smaller last.

    room: tokens of the cache.
    positions: the length of the context.
    budget: tokens that a step may compute.
    slots: sequences that may run together.
    tokens: about how many tokens can be computed in all.
    """
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
