"""Where tensors come from. Owns: the `Weights` protocol, names as Hugging Face spells them.

Rules: `get` gives a CPU tensor in the file's own precision; it may be a view of mapped memory, so the
taker copies what it keeps.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Weights(Protocol):
    """A model's tensors by name."""

    def __contains__(self, name: object) -> bool: ...

    def get(self, name: str) -> Tensor:
        """The tensor; raises ModelLoadError where it is absent or unreadable."""
        ...
