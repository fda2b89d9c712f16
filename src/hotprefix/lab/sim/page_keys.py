"""The numbers by which a fleet knows pages. Owns: `PageKeys`, from a prompt's tokens to 64-bit keys,
`PageNews`, which tells a kernel's pages by the same keys, and `StoreNews`, the same for the shared store.

Rules:
1. A key covers namespace and everything before the page, so equal keys mean equal prefixes (64 bits: a
   collision costs affinity, nothing else).
2. A chain is a running sum: each page adds a number made from its tokens and its position, and its key is the
   sum so far, mixed. So a chain can be continued from any page, and a whole prompt is computed at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hotprefix.fleet.records import Change, Keys, Shelf
from hotprefix.kernel.cache.keys import root_key
from hotprefix.kernel.cache.node import Node
from hotprefix.kernel.request import Namespace
from hotprefix.kernel.tokens import TOKEN_BYTES

Words = NDArray[np.uint64]
_ODD = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def mixed(words: Words) -> Words:
    """The words with their bits mixed, each by itself (the finaliser of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class PageKeys:
    """Makes keys of pages of `page_size` tokens."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._weights = mixed(np.arange(1, page_size + 1, dtype=np.uint64))
        self._roots: dict[Namespace, int] = {}

    def of_prompt(self, namespace: Namespace, tokens: bytes) -> Keys:
        """The keys of a prompt's complete pages. tokens: int32 bytes."""
        return tuple(mixed(self.sums(self.root(namespace), 0, tokens)).tolist())

    def root(self, namespace: Namespace) -> int:
        """The sum with which a namespace's chains begin."""
        found = self._roots.get(namespace)
        if found is None:
            found = int.from_bytes(root_key(namespace, self._size)[:8], "little")
            self._roots[namespace] = found
        return found

    def sums(self, above: int, first: int, tokens: bytes | bytearray) -> Words:
        """The running sums of the complete pages in `tokens`. above: the sum of the page before them.
        first: the position of the first of them, in pages."""
        pages = len(tokens) // (self._size * TOKEN_BYTES)
        ids = np.frombuffer(tokens, "<u4", pages * self._size).reshape(pages, self._size)
        places = np.arange(first + 1, first + pages + 1, dtype=np.uint64) * np.uint64(_ODD)
        # einsum makes no second array of the prompt's size: new memory is slow
        own = mixed(np.einsum("ij,j->i", ids, self._weights, dtype=np.uint64) + places)
        return np.cumsum(own, dtype=np.uint64) + np.uint64(above & _MASK)


class PageNews:
    """A `TreeWatch` of a kernel's L1 or L2: which pages came and went, by key, since `take` was last
    called."""

    def __init__(self, keys: PageKeys, shelf: Shelf = Shelf.L1) -> None:
        self._keys, self._shelf = keys, shelf
        self._known: dict[int, tuple[int, int, int]] = {}  # page -> its sum, its place, its key
        self._changes: list[Change] = []

    def take(self) -> tuple[Change, ...]:
        """What has changed, in order."""
        changes, self._changes = tuple(self._changes), []
        return changes

    def key(self, page: int) -> int:
        """The key of a page that is there."""
        return self._known[page][2]

    def added(self, node: Node) -> None:
        parent = node.parent
        if parent is None or node.pages[0] in self._known:
            return
        if parent.pages and parent.pages[-1] not in self._known:
            self.added(parent)  # it became real together with this node, and must be told first
        above, place = self._keys.root(node.namespace), 0
        if parent.pages:
            above, last, _ = self._known[parent.pages[-1]]
            place = last + 1
        sums = self._keys.sums(above, place, node.key)
        keys = tuple(mixed(sums).tolist())
        for page, own, key in zip(node.pages, sums.tolist(), keys, strict=True):
            self._known[page] = (own, place, key)
            place += 1
        self._changes.append(Change(self._shelf, stored=keys))

    def removing(self, leaf: Node, count: int) -> None:
        gone = leaf.pages[len(leaf.pages) - count :]
        removed = tuple(self._known.pop(page)[2] for page in reversed(gone))
        self._changes.append(Change(self._shelf, removed=removed))


class StoreNews:
    """Which pages came to the shared store and went, by key, since `take` was last called. Any instance may
    tell it."""

    def __init__(self) -> None:
        self._known: dict[bytes, int] = {}
        self._changes: list[Change] = []

    def take(self) -> tuple[Change, ...]:
        """What has changed, in order."""
        changes, self._changes = tuple(self._changes), []
        return changes

    def stored(self, name: bytes, key: int) -> None:
        """The store has taken a page. name: by which the store knows it."""
        self._known[name] = key
        self._changes.append(Change(Shelf.L3, stored=(key,)))

    def gone(self, name: bytes) -> None:
        """The store has given up a page."""
        self._changes.append(Change(Shelf.L3, removed=(self._known.pop(name),)))
