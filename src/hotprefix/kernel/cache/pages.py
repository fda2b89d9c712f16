"""L1's pages. Owns: which page is free, owned by one request, or indexed by the prefix tree.

Rules: a page is in exactly one of three states and moves only FREE -> OWNED -> INDEXED -> FREE or
OWNED -> FREE. Any other move is a ProtocolError, so a double free or a page in two places cannot
pass unnoticed. Which indexed pages are evictable and which are protected, only the tree knows. Layer
groups (frames.py) are told of every page that is given out or becomes free. A page that is indexed gets the
number of that publication: page and number together name one content, for as long as the tree holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from hotprefix.errors import ProtocolError
from hotprefix.kernel.cache.frames import Frames

# What a page's state is stored as: plain numbers in a list, which native code reads and compares unboxed.
_FREE: Final = 0
_OWNED: Final = 1
_INDEXED: Final = 2


class PageState(IntEnum):
    FREE = _FREE
    OWNED = _OWNED
    INDEXED = _INDEXED


class PagePool:
    """`total` pages with ids 0 .. total-1.

    groups: the layer groups that keep frames for them.
    publications: how many times pages have been indexed; it grows with each `index`.
    published: for each page, the number of the last publication that it was in.
    """

    def __init__(self, total: int, groups: Sequence[Frames] = ()) -> None:
        self.total = total
        self._groups = groups
        self._state = [_FREE] * total
        self._free = list(range(total - 1, -1, -1))
        self._indexed = 0
        self.publications = 0
        self.published = [0] * total

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def owned(self) -> int:
        return self.total - len(self._free) - self._indexed

    def state(self, page: int) -> PageState:
        return PageState(self._state[page])

    def allocate(self, n: int) -> list[int]:
        """n free pages become owned. Raises ProtocolError if fewer are free."""
        if n > len(self._free):
            raise ProtocolError(f"{n} pages wanted, {len(self._free)} free: evict first")
        if n <= 0:
            return []
        taken = self._free[-n:]
        del self._free[-n:]
        taken.reverse()
        self._move(taken, _FREE, _OWNED)
        for group in self._groups:
            group.open(taken)
        return taken

    def release(self, pages: list[int]) -> None:
        """Owned pages become free."""
        self._move(pages, _OWNED, _FREE)
        self._freed(pages)

    def index(self, pages: list[int]) -> None:
        """Owned pages become part of the tree."""
        self.publications += 1
        number, state, published = self.publications, self._state, self.published
        for page in pages:
            if state[page] != _OWNED:
                raise self._is_not(page, _OWNED)
            state[page] = _INDEXED
            published[page] = number
        self._indexed += len(pages)

    def unindex(self, pages: list[int]) -> None:
        """Pages the tree gave up become free."""
        self._move(pages, _INDEXED, _FREE)
        self._indexed -= len(pages)
        self._freed(pages)

    def _freed(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))
        for group in self._groups:
            group.forget(pages)

    def _move(self, pages: list[int], old: int, new: int) -> None:
        state = self._state
        for page in pages:
            if state[page] != old:
                raise self._is_not(page, old)
            state[page] = new

    def _is_not(self, page: int, state: int) -> ProtocolError:
        return ProtocolError(f"page {page} is {self.state(page).name}, not {PageState(state).name}")
