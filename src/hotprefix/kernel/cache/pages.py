"""L1's pages. Owns: which page is free, owned by one request, or indexed by the prefix tree.

Rules: a page is in exactly one of three states and moves only FREE -> OWNED -> INDEXED -> FREE or
OWNED -> FREE; any other move is a ProtocolError, so a double free or a page in two places cannot
pass unnoticed. How indexed pages divide into evictable and protected is the tree's knowledge. Layer
groups (frames.py) hear of every page that is given out or becomes free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

from hotprefix.errors import ProtocolError
from hotprefix.kernel.cache.frames import Frames


class PageState(IntEnum):
    FREE = 0
    OWNED = 1
    INDEXED = 2


class PagePool:
    """`total` pages with ids 0 .. total-1, and what each layer group keeps of them."""

    def __init__(self, total: int, groups: Sequence[Frames] = ()) -> None:
        self.total = total
        self._groups = groups
        self._state = bytearray(total)
        self._free = list(range(total - 1, -1, -1))
        self._indexed = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def indexed(self) -> int:
        return self._indexed

    @property
    def owned(self) -> int:
        return self.total - len(self._free) - self._indexed

    def state(self, page: int) -> PageState:
        return PageState(self._state[page])

    def allocate(self, n: int) -> list[int]:
        """n free pages become owned. Raises ProtocolError where fewer are free."""
        if n > len(self._free):
            raise ProtocolError(f"{n} pages wanted, {len(self._free)} free: evict first")
        if n <= 0:
            return []
        taken = self._free[-n:]
        del self._free[-n:]
        taken.reverse()
        self._move(taken, PageState.FREE, PageState.OWNED)
        for group in self._groups:
            group.open(taken)
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Owned pages become free."""
        self._move(pages, PageState.OWNED, PageState.FREE)
        self._freed(pages)

    def index(self, pages: Sequence[int]) -> None:
        """Owned pages become part of the tree."""
        self._move(pages, PageState.OWNED, PageState.INDEXED)
        self._indexed += len(pages)

    def unindex(self, pages: Sequence[int]) -> None:
        """Pages the tree gave up become free."""
        self._move(pages, PageState.INDEXED, PageState.FREE)
        self._indexed -= len(pages)
        self._freed(pages)

    def _freed(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))
        for group in self._groups:
            group.forget(pages)

    def _move(self, pages: Iterable[int], old: PageState, new: PageState) -> None:
        state = self._state
        for page in pages:
            if state[page] != old:
                raise ProtocolError(f"page {page} is {PageState(state[page]).name}, not {old.name}")
            state[page] = new
