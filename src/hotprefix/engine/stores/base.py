"""The external store contract. Owns: `Store`, what every L3 store does.

Rules: a store maps 32-byte page keys to framed pages (`frame.py`), of which it understands no more than which
page comes before which. Its methods block and are called from worker threads (`worker.py`), several at once;
the engine's own thread never calls them. They raise `LinkError`, or `PageError` if it is the trouble of this
page alone, and nothing else. Making a store contacts nothing. A page put under a key replaces what was there,
whole or not at all: no reader ever sees half a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from hotprefix.engine.stores.errors import PageError, Reason

KEY_BYTES = 32
NOTHING: Mapping[Reason, int] = {}


class Store(Protocol):
    """One external store. Runs of keys are in chain order: a page's parent comes before it."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | PageError | None]:
        """The framed pages of `keys` in order, None = not there, an error = there but of no use. May be
        shorter than `keys`, though never empty: the caller asks again for the rest. A failure of the store
        behind the first key ends the list; one at the first key is raised."""
        ...

    def put(self, key: bytes, framed: bytes) -> None:
        """Store one framed page. A store that evicts by itself gives up no page before those that come after
        it, and takes none whose parent it lacks (missing), nor one for which the parent would have to go
        (full): what it holds can be reused from the first page on."""
        ...

    def present(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` that is there. Moves no recency."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make the run the most recently used, so that eviction takes its tail last of all tails, and before
        its head. Absent keys are ignored. Does nothing where recency is not ours to
        set."""
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

    def passed_over(self) -> Mapping[Reason, int]:
        """How many pages could not be deleted when their turn came, by reason: they stay, and others go."""
        ...
