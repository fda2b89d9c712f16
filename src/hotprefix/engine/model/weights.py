"""Where tensors come from. Owns: the protocols `Weights` and `BlockSource`. Names are Hugging Face's.

Rules: `get` gives a CPU tensor in the file's own precision. It may be a view of mapped memory, so the caller
copies what it keeps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Weights(Protocol):
    """A model's tensors by name."""

    def __contains__(self, name: object) -> bool: ...

    def names(self) -> Collection[str]:
        """The names of all tensors that the model must use. A decoder that leaves one unused is wrong."""
        ...

    def get(self, name: str) -> Tensor:
        """The tensor, of dtype float32, float16 or bfloat16. Raises ModelLoadError if it is absent,
        unreadable or of another dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight [rows, columns] as a GGUF file quantises it.

    form: GGUF's name for the type.
    data: the blocks, uint8[rows, columns / 32 * bytes of a block].
    """

    form: str
    data: Tensor

    @staticmethod
    def join(parts: Sequence[Blocks | None]) -> Blocks | None:
        """The parts, one below the other; None if one is absent or of another form."""
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts) or len({part.form for part in whole}) != 1:
            return None
        return Blocks(whole[0].form, torch.cat([part.data for part in whole]))


class BlockSource(Protocol):
    """A model's quantised tensors by name."""

    def blocks(self, name: str) -> Blocks | None:
        """The tensor's blocks, with rows in the order of `Weights.get`; None if it is not quantised."""
        ...
