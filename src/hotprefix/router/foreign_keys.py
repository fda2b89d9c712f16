"""Other engines' blocks as our pages. Owns: `ForeignKeys`, which turns one engine's events into changes of
our page keys.

Rules:
1. A block's hash says nothing here. What it holds is known from its token ids and from its parent, and stays
   true as long as the engine's process lives. Our keys are made of that by the engine's own function. So the
   sizes of blocks and the hash functions of engines may differ.
2. A page counts on a shelf while all blocks that it touches are there, in each of the model's groups of
   layers. Several blocks may hold a page: if 32 tokens are a block and 16 a page, two blocks whose first
   halves are equal do. It then counts as long as one of them is there.
3. A block that depends on more than token ids, salt and adapter (an image) is left out, with all that follow
   it. So is a block whose parent is not known.
4. What a block holds is remembered for a while after all media have lost it, as copies to other media are
   told late and without token ids.
5. At most `limit` blocks. If there are more, the oldest are forgotten and their pages taken out, as nothing
   could be said of them any more when they go.

Example: pages of 16, blocks of 8. Blocks A and B, stored one after the other, are one page. When A is
removed the page goes, and it comes again if A is stored again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hotprefix.fleet.records import Change, Keys, Shelf
from hotprefix.kernel.cache.keys import chain, root_key
from hotprefix.kernel.request import Namespace
from hotprefix.kernel.tokens import TOKEN_BYTES
from hotprefix.records.kvevents import block_hash
from hotprefix.records.kvwire import BlockHash, Cleared, Extra, PageEvent, Removed, Stored
from hotprefix.server.guard import salt as salt_text

LIMIT = 1 << 18
PAST_SHARE = 4
GROUP_BITS = 20

Name = tuple[int, BlockHash] | BlockHash
"""A block's group and hash. In the first group it is the hash alone, which takes less memory."""


def shelf_of(medium: str | None) -> Shelf:
    """The shelf of a medium. Engines name media differently (CPU, CPU_PINNED; STORAGE, DISK)."""
    name = "GPU" if medium is None else medium.upper()
    return Shelf.L1 if name.startswith("GPU") else Shelf.L2 if name.startswith("CPU") else Shelf.L3


class _Page:
    """A page that more than one block touches. parts: those blocks, the first one first."""

    __slots__ = ("key", "parts")

    def __init__(self, key: int, parts: tuple[_Block, ...]) -> None:
        self.key, self.parts = key, parts

    def on(self, bit: int) -> bool:
        return all(part.on & bit for part in self.parts)


class _Block:
    """What a block holds.

    state: the chain's key after the last page that is complete at its end. tail: the tokens behind that page.
    keys: of the pages that lie in it alone. None: of one, whose key `state` tells.
    pages: those that it shares with other blocks; None = there are none.
    above: the block before it, if a page reaches over the border.
    tokens: its own. on: a bit for each shelf that it is on.
    """

    __slots__ = ("above", "keys", "on", "pages", "state", "tail", "tokens")

    def __init__(self, state: bytes, tail: bytes, tokens: int, above: _Block | None) -> None:
        self.state, self.tail, self.tokens, self.above = state, tail, tokens, above
        self.keys: Keys | None = ()
        self.pages: dict[_Page, None] | None = None
        self.on = 0

    def own(self) -> Keys:
        return (block_hash(self.state),) if self.keys is None else self.keys


@dataclass(slots=True)
class ForeignCounters:
    """Blocks. mapped: those whose pages are known. unknown_parent, other_content: those that were left out
    (rule 3). unknown: copies and removals of blocks that were never known. forgotten: those above the
    limit."""

    mapped: int = 0
    unknown_parent: int = 0
    other_content: int = 0
    unknown: int = 0
    forgotten: int = 0


@dataclass(slots=True)
class _Net:
    """What a batch comes to: for each shelf the keys that it changed, each with how it ended."""

    cleared: bool = False
    shelves: dict[Shelf, dict[int, bool]] = field(default_factory=lambda: {shelf: {} for shelf in Shelf})

    def changes(self) -> Iterator[Change]:
        for shelf, keys in self.shelves.items():
            if keys or self.cleared:
                stored = tuple(key for key, there in keys.items() if there)
                gone = () if self.cleared else tuple(key for key, there in keys.items() if not there)
                yield Change(shelf, stored, gone, self.cleared)


class ForeignKeys:
    """See the module's rules. model: what our keys begin with (`Namespace.model`). page_size: of our pages.
    Not for several threads."""

    def __init__(self, model: str, page_size: int, limit: int = LIMIT) -> None:
        self._model, self._page_size, self._limit = model, page_size, limit
        self._width = page_size * TOKEN_BYTES
        self.counters = ForeignCounters()
        self.clear()

    def clear(self) -> None:
        """The engine has begun again."""
        self._bits: dict[int, int] = {}
        self._net = _Net()
        self._empty()

    def _empty(self) -> None:
        self._live: dict[Name, _Block] = {}
        self._past: dict[Name, _Block] = {}
        self._counts: dict[Shelf, dict[int, int]] = {shelf: {} for shelf in Shelf}

    def lose(self) -> None:
        """What is there is not known any more; what blocks hold still is."""
        for block in self._live.values():
            block.on = 0
        self._past |= self._live
        self._live = {}
        self._counts = {shelf: {} for shelf in Shelf}
        self._trim()

    def __len__(self) -> int:
        return len(self._live) + len(self._past)

    def apply(self, events: tuple[PageEvent, ...]) -> tuple[Change, ...]:
        """One batch, as changes of our pages: for each shelf how it ends, so no key comes twice."""
        self._net = _Net()
        for event in events:
            match event:
                case Stored():
                    self._store(event)
                case Removed():
                    self._remove(event)
                case Cleared():
                    self._empty()
                    self._net = _Net(cleared=True)
        self._trim()
        return tuple(self._net.changes())

    def everything(self) -> tuple[Change, ...]:
        """All that is there."""
        return tuple(
            Change(shelf, tuple(key for key, count in counts.items() if self._full(count)))
            for shelf, counts in self._counts.items()
        )

    # -- blocks -----------------------------------------------------------------------------------

    def _store(self, event: Stored) -> None:
        shelf, bit = shelf_of(event.medium), self._bit(event.group)
        if not event.tokens:
            for name in self._names(event.group, event.hashes):
                block = self._find(name)
                if block is None:
                    self.counters.unknown += 1
                else:
                    self._here(name, block, shelf, bit)
            return
        above: _Block | None = None
        if event.parent is not None:
            above = self._find(_name(event.group, event.parent))
            if above is None:
                self.counters.unknown_parent += len(event.hashes)
                return
        data = np.asarray(event.tokens, dtype="<u4").tobytes()
        size = len(data) // len(event.hashes)
        for at, name in enumerate(self._names(event.group, event.hashes)):
            block = self._find(name)
            if block is None:
                extra = event.extra[at] if event.extra else None
                block = self._made(event, above, extra, data[at * size : (at + 1) * size])
                if block is None:
                    self.counters.other_content += len(event.hashes) - at
                    return
                self.counters.mapped += 1
            above = block
            self._here(name, block, shelf, bit)

    def _made(self, event: Stored, above: _Block | None, extra: Extra, tokens: bytes) -> _Block | None:
        """A block below another; None if its content is not only tokens."""
        adapter = event.adapter or (None if event.adapter_id is None else f"id {event.adapter_id}")
        rest = list(extra or ())
        if adapter is not None and rest and rest[0] in (event.adapter, event.adapter_id):
            del rest[0]
        state, tail = b"", b""
        if above is not None:
            state, tail = above.state, above.tail
        elif len(rest) <= 1 and all(isinstance(each, str) for each in rest):
            salt = salt_text(None, rest.pop()) if rest else None
            state = root_key(Namespace(self._model, adapter, None, salt), self._page_size)
        if rest:
            return None
        data = tail + tokens
        pages = chain(state, data, self._page_size)
        kept = data[len(pages) * self._width :]
        reaches = above if tail else None
        block = _Block(pages[-1] if pages else state, kept, len(tokens) // TOKEN_BYTES, reaches)
        if len(pages) == 1 and not tail:
            block.keys = None
        else:
            block.keys = tuple(map(block_hash, pages[1:] if tail else pages))
        if tail and pages:
            self._join(block_hash(pages[0]), block, len(tail) // TOKEN_BYTES)
        return block

    def _join(self, key: int, last: _Block, before: int) -> None:
        """A page ends in block `last` and has `before` tokens in the blocks above it."""
        parts = [last]
        above = last.above
        while above is not None and before > 0:
            parts.append(above)
            before -= above.tokens
            above = above.above
        page = _Page(key, tuple(reversed(parts)))
        for part in parts:
            part.pages = part.pages or {}
            part.pages[page] = None

    def _remove(self, event: Removed) -> None:
        shelf, bit = shelf_of(event.medium), self._bit(event.group)
        for name in self._names(event.group, event.hashes):
            block = self._live.get(name)
            if block is None:
                self.counters.unknown += name not in self._past
                continue
            self._gone(block, shelf, bit)
            if not block.on:
                self._past[name] = self._live.pop(name)

    def _trim(self) -> None:
        """Keep to the limit."""
        while len(self._past) > self._limit // PAST_SHARE:
            self._forget(self._past.pop(next(iter(self._past))))
        while len(self._live) > self._limit:
            name = next(iter(self._live))
            block = self._live.pop(name)
            group = name[0] if isinstance(name, tuple) else 0
            for shelf in Shelf:
                self._gone(block, shelf, self._bit(group))
            self._forget(block)
            self.counters.forgotten += 1

    def _forget(self, block: _Block) -> None:
        """The pages that end in this block are no concern of the blocks above it any more."""
        for page in block.pages or ():
            if page.parts[-1] is block:
                for part in page.parts[:-1]:
                    if part.pages:
                        del part.pages[page]

    def _find(self, name: Name) -> _Block | None:
        return self._live.get(name) or self._past.get(name)

    def _names(self, group: int, hashes: tuple[BlockHash, ...]) -> Iterator[Name]:
        return iter(hashes) if not group else ((group, each) for each in hashes)

    # -- pages ------------------------------------------------------------------------------------

    def _here(self, name: Name, block: _Block, shelf: Shelf, bit: int) -> None:
        self._past.pop(name, None)
        self._live.pop(name, None)
        self._live[name] = block  # the newest
        mark = 1 << shelf
        if block.on & mark:
            return
        block.on |= mark
        self._count(shelf, bit, block.own(), 1)
        if block.pages:
            self._count(shelf, bit, tuple(page.key for page in block.pages if page.on(mark)), 1)

    def _gone(self, block: _Block, shelf: Shelf, bit: int) -> None:
        mark = 1 << shelf
        if not block.on & mark:
            return
        if block.pages:
            self._count(shelf, bit, tuple(page.key for page in block.pages if page.on(mark)), -1)
        block.on &= ~mark
        self._count(shelf, bit, block.own(), -1)

    def _count(self, shelf: Shelf, bit: int, keys: Keys, more: int) -> None:
        """So many blocks more of one group hold these pages."""
        counts, net = self._counts[shelf], self._net.shelves[shelf]
        for key in keys:
            old = counts.get(key, 0)
            new = old + (more << bit)
            if new:
                counts[key] = new
            else:
                del counts[key]
            there = self._full(new)
            if there != self._full(old):
                net[key] = there

    def _full(self, count: int) -> bool:
        """Whether each group holds the page."""
        if len(self._bits) == 1:
            return count > 0
        return all(count >> bit & ((1 << GROUP_BITS) - 1) for bit in self._bits.values())

    def _bit(self, group: int) -> int:
        """Where the group's number of blocks stands in a page's count. With a group that was not known, no
        page is complete that was so before."""
        bit = self._bits.get(group)
        if bit is None:
            for shelf, counts in self._counts.items():
                net = self._net.shelves[shelf]
                net.update((key, False) for key, count in counts.items() if self._full(count))
            bit = self._bits[group] = GROUP_BITS * len(self._bits)
        return bit


def _name(group: int, hash_: BlockHash) -> Name:
    return (group, hash_) if group else hash_
