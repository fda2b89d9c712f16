"""Another engine's cache, simple enough to be right: what it says, and which of our pages are there then.

Its blocks are named by any injective function of their whole prefix. `Naive` follows events by brute force.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hotprefix.fleet.records import Change, Shelf
from hotprefix.records.kvwire import Cleared, Extra, PageEvent, Removed, Stored
from tests.support.feeds import page_keys

Tokens = tuple[int, ...]
Prefix = tuple[str | None, Tokens]
"""Salt, and all tokens up to the block's end."""

SHELVES = {None: Shelf.L1, "GPU": Shelf.L1, "CPU": Shelf.L2, "STORAGE": Shelf.L3}


@dataclass
class Blocks:
    """Names and events of one group of layers. seed: of the engine's process. as_bytes: how hashes are
    told."""

    size: int
    group: int = 0
    seed: int = 0
    as_bytes: bool = False

    def name(self, prefix: Prefix) -> int | bytes:
        text = f"{self.seed} {self.group} {self.size} {prefix}".encode()
        digest = hashlib.blake2b(text, digest_size=32).digest()
        return digest if self.as_bytes else int.from_bytes(digest[:8], "big")

    def names(self, prompt: Sequence[int], salt: str | None = None) -> list[int | bytes]:
        """Of the prompt's complete blocks."""
        ends = range(self.size, len(prompt) + 1, self.size)
        return [self.name((salt, tuple(prompt[:end]))) for end in ends]

    def stored(
        self, prompt: Sequence[int], salt: str | None = None, medium: str | None = "GPU",
        first: int = 0, last: int | None = None, adapter: str | None = None,
    ) -> Stored:  # fmt: skip
        """The prompt's complete blocks from number `first` to before `last`."""
        names = self.names(prompt, salt)
        last = len(names) if last is None else last
        head: Extra = tuple(each for each in (adapter, salt) if each is not None) or None
        rest: Extra = None if adapter is None else (adapter,)
        extra = tuple(rest if at else head for at in range(first, last))
        return Stored(
            tuple(names[first:last]), names[first - 1] if first else None,
            tuple(prompt[first * self.size : last * self.size]), self.size, extra, adapter, medium,
            self.group,
        )  # fmt: skip

    def copied(self, names: Iterable[int | bytes], medium: str) -> Stored:
        """As offloaded blocks are told: without their tokens and parents."""
        names = tuple(names)
        return Stored(names, None, (), 0, (), None, medium, self.group)

    def removed(self, names: Iterable[int | bytes], medium: str | None = "GPU") -> Removed:
        return Removed(tuple(names), medium, self.group)


@dataclass
class Naive:
    """What is there after events, found out anew each time it is asked. blocks: by group."""

    page_size: int
    blocks: dict[int, Blocks]
    known: dict[tuple[int, int | bytes], Prefix] = field(default_factory=dict)
    here: set[tuple[int, Shelf, int | bytes]] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)

    def apply(self, events: Iterable[PageEvent]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                self.known, self.here = {}, set()
                continue
            self.groups.add(event.group)
            at = {(event.group, SHELVES[event.medium], name) for name in event.hashes}
            if isinstance(event, Removed):
                self.here -= at
                continue
            if event.tokens:
                self._learn(event)
            self.here |= {each for each in at if (each[0], each[2]) in self.known}

    def _learn(self, event: Stored) -> None:
        salt, tokens = None, ()
        if event.parent is not None:
            if (event.group, event.parent) not in self.known:
                return
            salt, tokens = self.known[event.group, event.parent]
        elif event.extra[0]:
            salt = event.extra[0][-1]
        for name in event.hashes:
            end = len(tokens) + event.page_size
            start = event.hashes.index(name) * event.page_size
            tokens = (*tokens, *event.tokens[start : start + event.page_size])
            assert len(tokens) == end
            self.known.setdefault((event.group, name), (salt, tokens))

    def pages(self) -> set[tuple[Shelf, int]]:
        found = set()
        for shelf in Shelf:
            by_group = [self._of(group, shelf) for group in self.groups]
            found |= {(shelf, key) for key in set.intersection(*by_group)} if by_group else set()
        return found

    def _of(self, group: int, shelf: Shelf) -> set[int]:
        there = {self.known[g, name] for g, s, name in self.here if (g, s) == (group, shelf)}
        size, found = self.blocks[group].size, set()
        for salt, tokens in there:
            keys = page_keys(tokens, self.page_size, salt)
            for page, key in enumerate(keys):
                first, end = page * self.page_size // size, (page + 1) * self.page_size
                if end <= len(tokens) - size:
                    continue  # it ends in an earlier block
                touched = range(first, len(tokens) // size)
                if all((salt, tokens[: (block + 1) * size]) in there for block in touched):
                    found.add(key)
        return found


def applied(pages: set[tuple[Shelf, int]], changes: Iterable[Change]) -> set[tuple[Shelf, int]]:
    """What is there after changes, as the fleet takes them."""
    for shelf, stored, removed, cleared in changes:
        pages = {each for each in pages if not (cleared and each[0] == shelf)}
        pages = (pages - {(shelf, key) for key in removed}) | {(shelf, key) for key in stored}
    return pages
