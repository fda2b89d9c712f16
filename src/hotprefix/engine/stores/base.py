"""The external store contract. Owns: `Store`, what every L3 store does.

Rules: a store maps 32-byte page keys to framed pages (`frame.py`) and understands neither. Its methods
block and are called from worker threads (`worker.py`), several at once; the engine's own thread never
calls them. They raise `LinkError` and nothing else. Making a store contacts nothing. A page put under a
key replaces what was there, whole or not at all: no reader ever sees half a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

KEY_BYTES = 32


class Store(Protocol):
    """One external store. Runs of keys are in chain order: a page's parent comes before it."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The framed pages of `keys` in order, None = not there. May be shorter than `keys`, though
        never empty: the caller asks again for the rest. A failure behind the first key ends the list;
        a failure at the first key is raised."""
        ...

    def put(self, key: bytes, framed: bytes) -> None:
        """Store one framed page."""
        ...

    def present(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` that is there. Moves no recency."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make the run the most recently used, its first key most of all, so that eviction takes its
        tail first (handed cases 56, 57). Absent keys are ignored. Does nothing where recency is not
        ours to set."""
        ...

    def remove(self, key: bytes) -> None:
        """Forget one page: it proved unusable. Absent keys are ignored."""
        ...

    def close(self) -> None:
        """Let go of files and sockets. Calls in progress in other threads end soon, by an error."""
        ...

    def describe(self) -> str:
        """Where the store is, for people; never holds a secret."""
        ...
