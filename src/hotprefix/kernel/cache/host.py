"""L2, the host tier. Owns: which prefixes have a copy in host memory, and the copies a plan must make.

Rules:
1. L2 is a pool and a tree as L1 is, so every prefix in it is complete: a save copies whatever L2 lacks of the
   whole prefix, not only the page that L1 is about to lose.
2. The pages that a save makes are planned. If the step that carries the copies is committed they become real;
   if it fails they are taken back.
3. Every L2 page that a queued or carried move reads or writes stays pinned until that step has been committed
   or has failed, so no page is overwritten before it was read (rule 35).
4. Pages for which L2 has no room are not saved, and counted. What was not copied is lost, never treated as
   saved (rule 34).
5. A step does its moves in this order: stores, saves, restores, forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hotprefix.errors import ProtocolError
from hotprefix.kernel.cache.keys import chain, root_key
from hotprefix.kernel.cache.node import Match, Node
from hotprefix.kernel.cache.tier import Tier
from hotprefix.kernel.plan import Copy, StorePage
from hotprefix.kernel.request import Namespace
from hotprefix.kernel.tokens import TOKEN_BYTES


@dataclass(slots=True)
class HostCounters:
    """Pages moved, and pages that could not be.

    saved: copied from L1 to L2, in steps that were committed.
    restored: copied from L2 to L1, in steps that were committed.
    landed: fetched pages that got a place in L2.
    stored: given to the store, in steps that were committed.
    save_no_room: not saved, for lack of room in L2.
    land_no_room: fetched, and dropped for lack of room in L2 or of the pages before them.
    """

    saved: int = 0
    restored: int = 0
    landed: int = 0
    stored: int = 0
    save_no_room: int = 0
    land_no_room: int = 0


@dataclass(frozen=True, slots=True)
class Moves:
    """What one plan carries between the tiers; see StepPlan."""

    stores: tuple[StorePage, ...] = ()
    saves: tuple[Copy, ...] = ()
    restores: tuple[Copy, ...] = ()
    touches: tuple[tuple[bytes, ...], ...] = ()


class Landed(NamedTuple):
    """published: L2's publication in which a page came from L3. fetch: that brought it."""

    published: int
    fetch: int


class HostTier:
    """Book-keeping of L2 over one `Tier`. store: whether pages that have become real in L2 also go to L3."""

    def __init__(self, tier: Tier, store: bool) -> None:
        self.tier = tier
        self.counters = HostCounters()
        self._store = store
        self._saves: list[Copy] = []
        self._restores: list[Copy] = []
        self._stores: list[StorePage] = []
        self._touch_later: list[tuple[bytes, ...]] = []
        self._touches: list[tuple[bytes, ...]] = []
        self._queued: list[Node] = []
        self._carried: list[Node] = []
        self._carrying = Moves()
        self._landed: dict[int, Landed] = {}

    # -- L1 -> L2 ---------------------------------------------------------------------------------

    def save(self, namespace: Namespace, key: bytes, pages: list[int]) -> None:
        """Queue the copies of the pages that L2 lacks of a prefix, as far as L2 has room.

        key: the prefix's token bytes, page-aligned.
        pages: the prefix's L1 pages, first page first.
        """
        tree = self.tier.tree
        self._touch(namespace, key, len(pages))
        match = tree.lookup(namespace, key, len(pages))
        have = match.pages if match else 0
        if have == len(pages):
            return
        handle = tree.pin(match) if match and have else tree.pin_root(namespace)
        room = min(len(pages) - have, self.tier.available)
        self.counters.save_no_room += len(pages) - have - room
        copies = self._insert(handle, key, have, room, planned=True)
        self._saves += [Copy(pages[have + i], page) for i, page in enumerate(copies)]

    def save_evicted(self, leaf: Node) -> None:
        """Save the prefix of a leaf that L1's tree is about to take pages off (policy `back`). The whole
        prefix is saved, because L2 holds no page without its parents; pages that L1 takes off this leaf later
        are then in L2 already."""
        if not leaf.planned:
            self.save(leaf.namespace, leaf.path_key(), leaf.path_pages())

    def _insert(self, handle: Node, key: bytes, have: int, room: int, planned: bool) -> list[int]:
        """Index `room` new pages below a pinned handle; returns them, or [] if L2's tree takes none. The pin
        is returned, except if a plan has yet to fill the pages: then it is kept until that plan has run."""
        tree = self.tier.tree
        pages = self.tier.allocate(room) or []
        if pages:
            at = have * self.tier.page_size * TOKEN_BYTES
            inserted = tree.insert(handle, key, pages, planned=planned, at=at)
            handle = inserted.handle
            if inserted.added:
                self.tier.pool.index(pages)
            else:
                self.tier.pool.release(pages)
                pages = []
        if pages and planned:
            self._queued.append(handle)
        else:
            tree.unpin(handle)
        return pages

    # -- L2 -> L1 ---------------------------------------------------------------------------------

    def match(self, namespace: Namespace, key: bytes, limit: int) -> Match | None:
        """The longest prefix, of at most `limit` pages, whose pages are real in L2; None if the namespace has
        nothing there. Pages that are only being saved do not count."""
        found = self.tier.tree.lookup(namespace, key, limit)
        if found is not None and found.planned:
            found = self.tier.tree.lookup(namespace, key, found.pages - found.planned)
        return found

    def hold(self, namespace: Namespace, key: bytes, pages: int) -> Node:
        """Pin the first `pages` pages of a prefix that `match` found. Call it before L1 makes room for them:
        what L1 evicts may be saved, and that save must not push these pages out of L2. The pin goes to
        `restore` or `drop`. Raises ProtocolError if L2 does not have the pages."""
        self._touch(namespace, key, pages)
        found = self.tier.tree.lookup(namespace, key, pages)
        if found is None or found.pages < pages:
            raise ProtocolError("pages to restore are not in L2")
        return self.tier.tree.pin(found)

    def drop(self, pin: Node) -> None:
        """Return the pin of a prefix that is not restored after all."""
        self.tier.tree.unpin(pin)

    def restore(self, pin: Node, first: int, into: list[int]) -> list[int]:
        """Queue copies of a held prefix into L1, for the step that is being planned; returns the L2 pages
        that are copied.

        first: the index, in the prefix, of the first page to copy; all pages after it are copied too.
        into: the L1 pages that the copies go to.
        """
        sources = pin.path_pages()[first:]
        self._queued.append(pin)
        self._restores += [Copy(source, page) for source, page in zip(sources, into, strict=True)]
        return sources

    def landed(self, page: int) -> Landed | None:
        """How this page came from L3; None where it was copied from L1."""
        landed = self._landed.get(page)
        return landed if landed is not None and landed.published == self.tier.pool.published[page] else None

    def _touch(self, namespace: Namespace, key: bytes, pages: int) -> None:
        match = self.tier.tree.lookup(namespace, key, pages)
        if match is not None:
            self.tier.tree.touch(match)

    # -- L3 -> L2 ---------------------------------------------------------------------------------

    def land(
        self, namespace: Namespace, key: bytes, first: int, count: int, fetch: int
    ) -> tuple[dict[int, int], Node | None]:
        """Make room in L2 for the `count` pages of a prefix, from page index `first` on, that this fetch has
        brought.

        Returns two things. A mapping from a page's index within the fetch to the L2 page that its payload
        must be written to now; pages that L2 has by now are not in it, nor are pages at the end for which
        there is no room. And a pin on the whole prefix that has landed, None if there is none. If L2 no
        longer holds the pages before `first`, nothing lands.
        """
        tree = self.tier.tree
        match = tree.lookup(namespace, key, first + count)
        have = match.pages if match else 0
        if have < first and first > 0:
            self.counters.land_no_room += count
            return {}, None
        handle = tree.pin(match) if match and have else tree.pin_root(namespace)
        room = min(first + count - have, self.tier.available)
        self.counters.land_no_room += first + count - have - room
        pages = self._insert(handle, key, have, room, planned=False)
        self.counters.landed += len(pages)
        self._landed |= dict.fromkeys(pages, Landed(self.tier.pool.publications, fetch))
        # Not on pages that are only being saved: a failed step takes those back.
        whole = self.match(namespace, key, have + len(pages))
        pin = tree.pin(whole) if whole is not None and whole.pages else None
        return {have - first + i: page for i, page in enumerate(pages)}, pin

    # -- plans ------------------------------------------------------------------------------------

    def take(self) -> Moves:
        """The moves that the plan being made carries; they are no longer queued."""
        self.tier.tree.tidy()
        moves = Moves(tuple(self._stores), tuple(self._saves), tuple(self._restores), tuple(self._touches))
        self._stores, self._saves, self._restores, self._touches = [], [], [], []
        self._carried, self._queued = self._queued, []
        self._carrying = moves
        return moves

    @property
    def pending(self) -> bool:
        """True while stores, saves or touches wait for a plan to carry them."""
        return bool(self._stores or self._saves or self._touches)

    def commit(self) -> None:
        """The plan that carried the copies has run."""
        self.counters.saved += len(self._carrying.saves)
        self.counters.restored += len(self._carrying.restores)
        self.counters.stored += len(self._carrying.stores)
        settled = self.tier.tree.settle()
        if self._store:
            for node in sorted(settled, key=Node.depth):  # a store takes no page before its parent
                self._queue_stores(node)
        self._unpin_carried()
        self._touches, self._touch_later = self._touches + self._touch_later, []

    def fail(self) -> None:
        """The plan that carried the copies has failed: its saves never happened."""
        self._unpin_carried()
        self.tier.pool.unindex(self.tier.tree.discard_planned())
        self._touches, self._touch_later = self._touches + self._touch_later, []

    def forget_queued(self) -> None:
        """Drop the copies that no plan has taken yet. To be called only while no step is in flight."""
        for node in self._queued:
            self.tier.tree.unpin(node)
        self._queued, self._saves, self._stores = [], [], []
        self.tier.pool.unindex(self.tier.tree.discard_planned())

    def _unpin_carried(self) -> None:
        for node in self._carried:
            self.tier.tree.unpin(node)
        self._carried = []

    def _queue_stores(self, node: Node) -> None:
        self._queued.append(self.tier.tree.pin_again(node))
        above = node.parent
        parent = self._name(above) if above is not None and above.parent is not None else None
        for key, page in zip(self._keys(node), node.pages, strict=True):
            self._stores.append(StorePage(key, page, parent))
            parent = key

    def _name(self, node: Node) -> bytes:
        """The key of a node's last page; for a root, the key of its namespace. Each node remembers it, so
        that a prefix that grows page by page is not hashed from its start each time."""
        return node.digest or self._keys(node)[-1]

    def _keys(self, node: Node) -> list[bytes]:
        """The keys of a node's pages."""
        parent = node.parent
        if parent is None:
            return [root_key(node.namespace, self.tier.page_size)]
        keys = chain(self._name(parent), node.key, self.tier.page_size)
        node.digest = keys[-1]
        return keys

    def used(self, namespace: Namespace, key: bytes) -> None:
        """A request with this prefix has ended: queue a touch of the whole chain in L3, so that a store that
        evicts takes the chain's tail before its root (rule 40). If saves are still queued, the touch waits
        until their pages have been stored."""
        names = tuple(chain(root_key(namespace, self.tier.page_size), key, self.tier.page_size))
        (self._touch_later if self._saves else self._touches).append(names)
