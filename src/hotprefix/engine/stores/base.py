"""The external store contract. Owns: `Store`, what every L3 store does.

Rules: a store maps 32-byte page keys to wrapped pages (`envelope.py`). All that it understands of a page is
which page comes before it. Its methods block; worker threads (`worker.py`) call them, several at once, and
the engine's own thread never does. They raise `PageError` for trouble with one page, `LinkError` for trouble
with the store, and nothing else. Creating a store object contacts nothing. A page put under a key replaces
what was there, whole or not at all: no reader ever sees half a page.
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
        """The wrapped pages of `keys`, in order. None: it is absent. An error: it is there, but unusable.

        The list may be shorter than `keys`, but is never empty: the caller asks again for the rest. If the
        store fails at the first key, the failure is raised; if it fails at a later one, the list ends there.
        """
        ...

    def put(self, key: bytes, wrapped: bytes) -> None:
        """Store one wrapped page.

        A store that evicts by itself never evicts a page before the pages that come after it. It refuses a
        page whose parent it lacks (reason missing), and a page for which the parent would have to be evicted
        (reason full). So whatever it holds can be reused from the first page on.
        """
        ...

    def present(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` that is there. Moves no recency."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make the run the most recently used: eviction takes its tail after all other tails, and before its
        head. Absent keys are ignored. Does nothing if the store decides recency by itself."""
        ...

    def remove(self, key: bytes) -> None:
        """Remove one page that proved unusable. Absent keys are ignored."""
        ...

    def close(self) -> None:
        """Close files and sockets. Calls in progress in other threads soon end with an error."""
        ...

    def describe(self) -> str:
        """Where the store is, for people; never contains a secret."""
        ...

    def passed_over(self) -> Mapping[Reason, int]:
        """How many pages could not be deleted when eviction came to them, by reason. They stay, and other
        pages are evicted instead."""
        ...
