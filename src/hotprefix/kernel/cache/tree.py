"""The prefix tree over a tier's pages. Owns: what may be done with it, and its pins, recency and order of
eviction; its shape is `forest.py`'s.

Rules (kernel.md): `lookup` is pure. `touch` moves recency only, of what matched only; `use` counts a
use as well. `pin`/`unpin` move pages between evictable and protected. `insert` publishes. `evict` frees
whole pages from the tail of unpinned leaves, exactly as many as asked, a parent never before its child.
No clock: recency is a counter. A lookup that ends inside a node stays pure; `touch`, `use`, `pin` and
`insert` split it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from hotprefix.errors import ProtocolError
from hotprefix.kernel.cache.evict import EvictionHeap, Policy
from hotprefix.kernel.cache.expect import Expected, Lapsing
from hotprefix.kernel.cache.forest import Forest
from hotprefix.kernel.cache.node import Match, Node, match_at, walk
from hotprefix.kernel.cache.watch import TreeWatch
from hotprefix.kernel.request import Namespace
from hotprefix.kernel.tokens import TOKEN_BYTES

_NOTHING: Mapping[Node, int] = {}


class Inserted(NamedTuple):
    """handle: the pinned node where the published range now ends. pages: the range's pages as the tree
    has them. added: how many of them are new to the tree (a suffix); the first len(pages) - added were
    there already, so the caller's own copies are duplicates."""

    handle: Node
    pages: list[int]
    added: int


class PrefixTree:
    """Radix trees of page-aligned int32 token runs. before_evict(leaf, pages): told before an eviction takes
    that many pages off a leaf's tail; it may not change the tree. unprotected: grows when a run is pinned no
    longer. protected_pages: those that a pin protects."""

    def __init__(self, page_size: int, policy: Policy) -> None:
        self.page_bytes = page_size * TOKEN_BYTES
        self._forest = Forest(self.page_bytes)
        self._heap: EvictionHeap[Node] = EvictionHeap(policy)
        self._lapsing: Lapsing[Node] = Lapsing()
        self._tick = 0
        self.protected_pages = 0
        self.unprotected = 0
        self.before_evict: Callable[[Node, int], None] | None = None

    @property
    def evictable_pages(self) -> int:
        return self._forest.pages - self.protected_pages

    @property
    def total_pages(self) -> int:
        return self._forest.pages

    @property
    def nodes(self) -> int:
        return self._forest.nodes

    @property
    def namespaces(self) -> int:
        return len(self._forest.roots)

    def walk_nodes(self) -> Iterator[Node]:
        """Every node except roots, parents before children."""
        return self._forest.walk_nodes()

    def watch_pages(self, watch: TreeWatch) -> None:
        """Tell `watch` of every real page that comes and goes, on every path."""
        self._forest.watch = watch

    # -- lookup: pure -----------------------------------------------------------------------------

    def lookup(self, namespace: Namespace, key: bytes, limit: int) -> Match | None:
        """Longest indexed prefix of key within its first `limit` pages; None where the namespace holds
        nothing at all."""
        root = self._forest.roots.get(namespace)
        if root is None:
            return None
        end = min(limit, len(key) // self.page_bytes) * self.page_bytes
        return walk(root, 0, key, 0, end, self.page_bytes)

    def lookup_again(self, match: Match, namespace: Namespace, key: bytes, limit: int) -> Match | None:
        """As `lookup`, of the key and limit that gave `match`; only what may have changed is compared."""
        if not match.intact:
            return self.lookup(namespace, key, limit)
        if not match.whole:
            return match_at(match.node, match.inside, match.pages)
        return self.lookup_from(match.node, match.pages, key, limit)

    def lookup_from(self, handle: Node, above: int, key: bytes, limit: int) -> Match:
        """As `lookup`, from a pinned node that is known to end at page `above` of this key."""
        end = min(limit, len(key) // self.page_bytes) * self.page_bytes
        return walk(handle, above, key, above * self.page_bytes, end, self.page_bytes)

    def continues(self, handle: Node, key: bytes, at: int) -> bool:
        """Whether the page of the tokens from byte `at` of `key` on is indexed below a pinned node."""
        return key[at : at + self.page_bytes] in handle.children

    def pages_of(self, match: Match) -> list[int]:
        """Page ids of the matched prefix, first page first."""
        above = [] if match.node.parent is None else match.node.parent.path_pages()
        return above + match.node.pages[: match.inside]

    # -- recency ----------------------------------------------------------------------------------

    def touch(self, match: Match) -> None:
        """Make the matched pages the most recently used ones; pages below the match gain nothing, and
        no use is counted."""
        if match.pages:
            node = match.node
            if match.version != node.version or not match.whole:
                node = self._end_of(match)
            self._tick += 1
            node.last_access = self._tick

    def use(self, match: Match, priority: int = 0) -> None:
        """A request takes the matched pages: they become most recent, and the use is counted."""
        if match.pages:
            node = self._end_of(match)
            self._count_use(node)
            self._used(node, priority)

    def expect(self, handle: Node, expected: Expected) -> None:
        """The prefix that ends with this pinned node is expected to be used again."""
        if handle.pages:
            self._lapsing.expect(handle, expected)

    def lapse(self, now: float) -> None:
        """Nobody is expected any more where it has become too late (see `expect`)."""
        for node in self._lapsing.lapse(now):
            self._forest.note(node)
            if node.evictable:
                self._heap.push(node)

    def tidy(self) -> None:
        """Join runs that branches had cut and have left. To be called when nobody is about to use a match: it
        changes none, but those that end in joined runs have to be looked up again."""
        self._forest.tidy()

    # -- pins -------------------------------------------------------------------------------------

    def pin(self, match: Match) -> Node:
        """Protect the matched prefix. The handle returned goes to `unpin` exactly once."""
        node = self._end_of(match)
        self._protect(node)
        return node

    def pin_root(self, namespace: Namespace) -> Node:
        """A handle on the empty prefix of a namespace, from which `insert` can start."""
        root = self._forest.root(namespace)
        self._protect(root)
        return root

    def pin_again(self, handle: Node) -> Node:
        """One more pin on the prefix that ends with this node (a handle, or a node that has just settled)."""
        self._protect(handle)
        return handle

    def repin(self, handle: Node, match: Match) -> Node:
        """Move a pin deeper, without a moment in which the old prefix is unprotected. The use that was
        counted above moves along: one holder counts once for each page, in however many pieces it came."""
        node = self.pin(match)
        handle.hits -= 1
        self.unpin(handle)
        return node

    def unpin(self, handle: Node) -> None:
        """Return a pin. What no other pin protects becomes evictable."""
        self._unprotect(handle)
        self._forest.note(handle)

    def _unprotect(self, handle: Node) -> None:
        node: Node | None = handle
        while node is not None:
            if node.pins <= 0:
                raise ProtocolError("a pin was returned twice")
            node.pins -= 1
            if node.pins:
                return
            self.protected_pages -= len(node.pages)
            self.unprotected += 1
            if node.parent is None:
                self._forest.drop_if_empty(node)
            elif not node.children:
                self._heap.push(node)
            node = node.parent

    # -- publication ------------------------------------------------------------------------------

    def insert(
        self, handle: Node, key: bytes, pages: list[int], priority: int = 0, planned: bool = False,
        at: int = 0,
    ) -> Inserted:  # fmt: skip
        """Publish pages below the pinned node `handle`; their tokens are those of `key` from byte `at` on.

        Moves the caller's pin to the end of the range. Pages whose tokens are indexed already are not
        added; the tree's own are returned for them. planned: the step in flight computes them;
        `settle` makes them real or `discard_planned` takes them back. Real pages never replace, nor hang
        below, planned ones: where these are in the way, nothing is published (no pages returned).
        """
        end = at + len(pages) * self.page_bytes
        found = walk(handle, 0, key, at, end, self.page_bytes)
        if found.planned and not planned:
            return Inserted(handle, [], 0)
        kept: list[int] = []
        node = handle
        if found.pages:
            node = self._end_of(found)
            kept = node.pages_below(handle)
            self._count_use(node)
            handle.hits -= 1
        fresh = pages[len(kept) :]
        if fresh:
            node = self._add(node, key[at + len(kept) * self.page_bytes : end], fresh, planned)
        self._used(node, priority)
        self._protect(node)
        self._unprotect(handle)
        reached = self._forest.merge_up(node)
        if handle.hits:  # else its short runs gather, see merge_up
            self._forest.note(handle)
        return Inserted(reached, kept + fresh, len(fresh))

    def _add(self, parent: Node, key: bytes, pages: list[int], planned: bool) -> Node:
        node = self._forest.add_child(parent, key, pages, planned)
        node.created = self._tick + 1
        node.round = self._heap.round
        return node

    def settle(self) -> list[Node]:
        """The step that computes the planned pages has run: they are real. Returns their nodes."""
        return self._forest.settle()

    def merge_up(self, handle: Node) -> Node:
        """Join a settled run with the run above it where nothing tells them apart; returns the pin."""
        return self._forest.merge_up(handle)

    def discard_planned(self) -> list[int]:
        """The step failed: take back the pages it would have computed. All their pins must be gone."""
        freed: list[int] = []
        for node in sorted(self._forest.planned_nodes(), key=Node.depth, reverse=True):
            if node.pins:
                raise ProtocolError("a page of a failed step is still pinned")
            freed.extend(node.pages)
            self._take(node, len(node.pages))
        self._forest.planned = []
        self._prune_heap()
        return freed

    # -- eviction ---------------------------------------------------------------------------------

    def evict(self, count: int, last: Mapping[Node, int] = _NOTHING, tell: bool = True) -> list[int]:
        """Free up to `count` evictable pages, tails of the least wanted leaves first.

        last: leading pages of a node that are taken only when nothing else is left (the prefixes of
        waiting requests, refresh `queue_informed`); never a pin. tell: whether `before_evict` is told.
        """
        freed: list[int] = []
        spared: list[Node] = []
        while len(freed) < count:
            leaf = self._heap.pop()
            if leaf is None:
                if not spared:
                    break
                for node in spared:
                    self._heap.push(node)
                spared, last = [], _NOTHING
                continue
            size = len(leaf.pages)
            keep = last.get(leaf, 0)
            if leaf.seams and keep < leaf.seams[-1].end:
                keep = leaf.seams[-1].end
            take = min(count - len(freed), size - keep)
            if take <= 0:
                spared.append(leaf)
                continue
            if tell and self.before_evict is not None and not leaf.retired:
                self.before_evict(leaf, take)
            freed.extend(reversed(leaf.pages[size - take :]))
            self._take(leaf, take)
        for node in spared:
            self._heap.push(node)
        self._prune_heap()
        return freed

    def _take(self, leaf: Node, count: int) -> None:
        """Take pages off an unpinned leaf's tail; what then ends there is the next that may go."""
        end = self._forest.shrink(leaf, count)
        if end is not leaf and leaf.expected is not None and end.parent is not None:
            self._lapsing.expect(end, leaf.expected)
        if end.evictable:
            self._heap.push(end)

    def _prune_heap(self) -> None:
        if len(self._heap) > 2 * self._forest.nodes + 64:
            self._heap.prune()

    def retire(self) -> None:
        """Nobody finds what is here any more; pinned pages stay until their last pin is gone."""
        self._forest.retire()

    # -- inside -----------------------------------------------------------------------------------

    def _end_of(self, match: Match) -> Node:
        """The node that ends exactly where the match ends, after a split if need be."""
        if not match.current:
            raise ProtocolError("a match from before a change of the tree was used")
        if match.whole:
            return match.node
        return self._forest.split(match.node, match.inside)

    def _count_use(self, node: Node) -> None:
        """By another than its publisher; it is what was expected here."""
        node.hits += 1
        node.visited = True
        if node.expected is not None:
            node.expected = None
            self._forest.note(node)
            if node.evictable:
                self._heap.push(node)

    def _used(self, node: Node, priority: int) -> None:
        self._tick += 1
        node.last_access = self._tick
        node.priority = min(node.priority, priority)
        self._forest.earn(1)

    def _protect(self, handle: Node) -> None:
        node: Node | None = handle
        while node is not None:
            node.pins += 1
            if node.pins > 1:
                return
            self.protected_pages += len(node.pages)
            node = node.parent
