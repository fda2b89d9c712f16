"""Pages a session keeps between its requests. Owns: the holds, their bound and their time limit.

Rules:
1. A hold is a pin on the prefix of an ended request. A session has at most one, until its time is up.
2. All holds together have at most `limit` pages; a page that several holds share counts for each.
3. In layer groups a hold keeps the frames of the prefix's last window.
4. Holds give way if nothing else can run. They are a preference, never a reason for a stall.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hotprefix.kernel.cache.frames import Frames
from hotprefix.kernel.cache.node import Node
from hotprefix.kernel.cache.tree import PrefixTree
from hotprefix.kernel.request import Namespace
from hotprefix.kernel.state.windows import Tail

Key = tuple[Namespace, str]


@dataclass(frozen=True, slots=True)
class Hold:
    handle: Node
    pages: int
    expires: float
    tail: Tail = ()


class Returned(NamedTuple):
    """What holds would give back.

    pages: how many pages nothing else protects.
    frames: for each layer group, how many frames no other window covers.
    """

    pages: int
    frames: Mapping[Frames, int]


class SessionHolds:
    """Holds by session, oldest first."""

    def __init__(self, tree: PrefixTree, limit: int) -> None:
        self._tree = tree
        self._limit = limit
        self._holds: dict[Key, Hold] = {}
        self.pages = 0

    def __len__(self) -> int:
        return len(self._holds)

    def tails(self) -> list[Tail]:
        """What the holds cover in the layer groups."""
        return [hold.tail for hold in self._holds.values()]

    def take(self, key: Key, handle: Node, pages: int, expires: float, tail: Tail = ()) -> bool:
        """Turn a request's pin into its session's hold, in place of an earlier one. False if the bound
        forbids it; the caller keeps the pin then.

        handle: the pinned node.
        pages: how many pages the pin protects.
        expires: the time at which the hold ends.
        tail: what it keeps of the layer groups.
        """
        self.drop(key)
        if not pages or self.pages + pages > self._limit:
            return False
        self._holds[key] = Hold(handle, pages, expires, tail)
        self.pages += pages
        for group, held in tail:
            group.hold(held)
        return True

    def drop(self, key: Key) -> None:
        """Return a session's hold, if it has one."""
        hold = self._holds.pop(key, None)
        if hold is not None:
            self.pages -= hold.pages
            self._tree.unpin(hold.handle)
            for group, held in hold.tail:
                group.drop(reversed(held))

    def expire(self, now: float) -> None:
        if not self._holds:
            return
        for key in [k for k, hold in self._holds.items() if hold.expires <= now]:
            self.drop(key)

    def expired(self, now: float) -> Returned:
        """What the holds whose time is up would give back. They end with the next plan, and an idle kernel
        makes none. Changes nothing."""
        gone = [hold for hold in self._holds.values() if hold.expires <= now]
        pins: dict[Node, int] = {}
        pages = 0
        for hold in gone:
            node: Node | None = hold.handle
            while node is not None:
                pins[node] = pins.get(node, node.pins) - 1
                if pins[node]:
                    break
                pages += len(node.pages)
                node = node.parent
        covered: dict[Frames, Counter[int]] = {}
        for hold in gone:
            for group, held in hold.tail:
                covered.setdefault(group, Counter()).update(held)
        return Returned(pages, {group: group.only_held_by(times) for group, times in covered.items()})

    def drop_oldest(self) -> bool:
        """Drop the oldest hold. False if there is none."""
        if not self._holds:
            return False
        self.drop(next(iter(self._holds)))
        return True
