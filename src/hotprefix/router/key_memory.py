"""Keys of prompts, those of what was seen before from memory. Owns: `ChainedKeys`.

Rules: a page's key covers everything before it. So pages are remembered `STRIDE` at a time, by the chain's
state before them and by their own tokens, and a prompt that begins like an earlier one is only looked up.
"""

from __future__ import annotations

from hotprefix.fleet.records import Keys
from hotprefix.kernel.cache.keys import chain
from hotprefix.kernel.tokens import TOKEN_BYTES
from hotprefix.records.kvevents import block_hash
from hotprefix.router.remembered import Remembered

STRIDE = 32
LIMIT = 64 * 1024 * 1024
KEY_BYTES, ENTRY_BYTES = 48, 500

Stretch = tuple[Keys, bytes]
"""The keys of `STRIDE` pages, and the chain's state after them."""


class ChainedKeys:
    """Keys of pages of `page_size` tokens. limit: bytes of all that is remembered, about."""

    def __init__(self, page_size: int, limit: int = LIMIT) -> None:
        self._page_size = page_size
        self._known: Remembered[tuple[bytes, bytes], Stretch] = Remembered(limit, _weight)

    def keys(self, state: bytes, tokens: bytes) -> Keys:
        """Of the complete pages of `tokens` (int32 bytes). state: the namespace's `root_key`."""
        found: list[int] = []
        width = STRIDE * self._page_size * TOKEN_BYTES
        for at in range(0, len(tokens), width):
            part = tokens[at : at + width]
            if len(part) < width:
                found += map(block_hash, chain(state, part, self._page_size))
                break
            stretch = self._known.get((state, part))
            if stretch is None:
                digests = chain(state, part, self._page_size)
                stretch = tuple(map(block_hash, digests)), digests[-1]
                self._known.put((state, part), stretch)
            found += stretch[0]
            state = stretch[1]
        return tuple(found)


def _weight(key: tuple[bytes, bytes], stretch: Stretch) -> int:
    return len(key[1]) + KEY_BYTES * len(stretch[0]) + ENTRY_BYTES
