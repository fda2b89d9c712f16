"""Token strings as bytes. Owns: the one representation of token ids inside the kernel.

Rules:
1. A token is four bytes, int32 little-endian.
2. A run of tokens is `bytes`, because these are immutable, hashable and compared at memory speed, never in a
   Python loop over tokens.
3. Executors turn it into arrays with `view`, which copies nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

TOKEN_BYTES = 4
_DTYPE = np.dtype("<i4")
assert sys.byteorder == "little", "hotprefix stores token ids little-endian in host order"


def encode(ids: Iterable[int]) -> bytes:
    """Token ids -> bytes. Raises OverflowError if an id does not fit int32."""
    return np.fromiter(ids, dtype=_DTYPE).tobytes()


def view(tokens: bytes | bytearray) -> npt.NDArray[np.int32]:
    """Read-only int32 array, shape [len(tokens) / 4], over the same memory."""
    return np.frombuffer(tokens, dtype=_DTYPE)


def count(tokens: bytes | bytearray) -> int:
    """Number of tokens."""
    return len(tokens) // TOKEN_BYTES


def word(token: int) -> bytes:
    """The four bytes of one token."""
    return token.to_bytes(TOKEN_BYTES, "little", signed=True)


def last(tokens: bytes) -> int:
    """The last of at least one token."""
    return int.from_bytes(tokens[-TOKEN_BYTES:], "little", signed=True)
