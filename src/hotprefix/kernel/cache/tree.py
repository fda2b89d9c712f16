"""The prefix tree over a tier's pages. Owns: the operations on it, its pins, its recency and the order of
eviction. The tree's shape (nodes, cuts, joins) is forest.py's.

Rules (rules 3 and 15):
1. `lookup` changes nothing.
2. `touch` makes the matched pages the most recent, and no others. `use` does the same and counts a use.
3. `pin` and `unpin` move pages between evictable and protected.
4. `insert` publishes pages.
5. `evict` frees whole pages from the tails of unpinned leaves, exactly as many as are asked for if there are
   as many, and a parent never before its child.
6. There is no clock: recency is a counter that grows with each touch and use.
7. If a match ends inside a node, `touch`, `use`, `pin` and `insert` split the node there; a lookup does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from hotprefix.errors import ProtocolError
from hotprefix.kernel.cache.evict import EvictionHeap, Policy
from hotprefix.kernel.cache.expected_reuse import Expected, Lapsing
from hotprefix.kernel.cache.forest import Forest
from hotprefix.kernel.cache.node import Match, Node, match_at, walk
from hotprefix.kernel.cache.tree_watch import TreeWatch
from hotprefix.kernel.request import Namespace
from hotprefix.kernel.tokens import TOKEN_BYTES

_NOTHING: Mapping[Node, int] = {}


class Inserted(NamedTuple):
    """What `insert` did.

    handle: the pinned node at which the published range ends now.
    pages: the range's pages as the tree has them; empty if nothing was published.
    added: how many of these are new to the tree, always the last ones. The first len(pages) - added were
    there already, so the caller's own copies of them are duplicates.
    """

    handle: Node
    pages: list[int]
    added: int


class PrefixTree:
    """Radix trees of page-aligned int32 token runs, one for each namespace.

    protected_pages: the number of pages that a pin protects.
    unprotected: grows whenever the last pin on a run is returned.
    before_evict: called with (leaf, count) before an eviction takes `count` pages off the leaf's tail. It
    must not change the tree.
    """

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
        """Tell `watch` of every real page that comes or goes, whichever operation it comes or goes by."""
        self._forest.watch = watch

    # -- lookup: pure -----------------------------------------------------------------------------

    def lookup(self, namespace: Namespace, key: bytes, limit: int) -> Match | None:
        """The longest indexed prefix of `key` (token bytes) within its first `limit` pages; None if the
        namespace has no tree."""
        root = self._forest.roots.get(namespace)
        if root is None:
            return None
        end = min(limit, len(key) // self.page_bytes) * self.page_bytes
        return walk(root, 0, key, 0, end, self.page_bytes)

    def lookup_again(self, match: Match, namespace: Namespace, key: bytes, limit: int) -> Match | None:
        """The same result as `lookup`, for the key and limit that gave `match` before; compares only what may
        have changed since."""
        if not match.intact:
            return self.lookup(namespace, key, limit)
        if not match.whole:
            return match_at(match.node, match.inside, match.pages)
        return self.lookup_from(match.node, match.pages, key, limit)

    def lookup_from(self, handle: Node, above: int, key: bytes, limit: int) -> Match:
        """The same result as `lookup`, searched from a pinned node that is known to hold the first `above`
        pages of this key."""
        end = min(limit, len(key) // self.page_bytes) * self.page_bytes
        return walk(handle, above, key, above * self.page_bytes, end, self.page_bytes)

    def continues(self, handle: Node, key: bytes, at: int) -> bool:
        """Whether a run below the pinned node begins with the page whose tokens start at byte `at` of
        `key`."""
        return key[at : at + self.page_bytes] in handle.children

    def pages_of(self, match: Match) -> list[int]:
        """Page ids of the matched prefix, first page first."""
        above = [] if match.node.parent is None else match.node.parent.path_pages()
        return above + match.node.pages[: match.inside]

    # -- recency ----------------------------------------------------------------------------------

    def touch(self, match: Match) -> None:
        """Make the matched pages the most recently used ones. Pages below the match stay as they are, and no
        use is counted."""
        if match.pages:
            node = match.node
            if match.version != node.version or not match.whole:
                node = self._end_of(match)
            self._tick += 1
            node.last_access = self._tick

    def use(self, match: Match, priority: int = 0) -> None:
        """A request takes the matched pages: they become the most recent ones, and the use is counted.
        priority: the request's; the pages keep the most important of their users' priorities."""
        if match.pages:
            node = self._end_of(match)
            self._count_use(node)
            self._used(node, priority)

    def expect(self, handle: Node, expected: Expected) -> None:
        """The prefix that ends with this pinned node is expected to be used again."""
        if handle.pages:
            self._lapsing.expect(handle, expected)

    def lapse(self, now: float) -> None:
        """Forget the expected uses that have lapsed by `now` (expected_reuse.py)."""
        for node in self._lapsing.lapse(now):
            self._forest.note(node)
            if node.evictable:
                self._heap.push(node)

    def tidy(self) -> None:
        """Join runs that were cut for branches which are gone. To be called only between operations: a match
        that ends in a joined run is no longer current and has to be looked up again before it is used."""
        self._forest.tidy()

    # -- pins -------------------------------------------------------------------------------------

    def pin(self, match: Match) -> Node:
        """Protect the matched prefix. The handle returned must go to `unpin` exactly once."""
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
        """Move a pin to the end of `match`, below `handle`, without a moment in which the old prefix is
        unprotected. The use that was counted at `handle` moves along, so that one request counts as one use
        of each page, in however many pieces it took them."""
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

        The caller's pin moves to the end of the range. Pages whose tokens are indexed already are not
        added; the tree's own pages are returned in their place.
        planned: the step in flight computes the pages; `settle` makes them real, or `discard_planned` takes
        them back. Real pages never replace planned ones, nor hang below them: if planned pages are in the
        way, nothing is published, no pages are returned and the pin stays at `handle`.
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
        if handle.hits:  # without hits its short runs are joined by merge_up
            self._forest.note(handle)
        return Inserted(reached, kept + fresh, len(fresh))

    def _add(self, parent: Node, key: bytes, pages: list[int], planned: bool) -> Node:
        node = self._forest.add_child(parent, key, pages, planned)
        node.created = self._tick + 1
        node.round = self._heap.round
        return node

    def settle(self) -> list[Node]:
        """The step that computes the planned pages has run: make them real. Returns their nodes."""
        return self._forest.settle()

    def merge_up(self, handle: Node) -> Node:
        """Join a pinned run with those above it if nothing tells them apart (see `Forest.merge_up`); returns
        the pin's node now."""
        return self._forest.merge_up(handle)

    def discard_planned(self) -> list[int]:
        """The step failed: take the pages that it would have computed out of the tree and return them. Raises
        ProtocolError if one of them is still pinned."""
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
        """Free up to `count` evictable pages, from the tails of the leaves with the smallest keys; returns
        them.

        last: for a node, how many of its leading pages are taken only when nothing else is left (the prefixes
        of waiting requests, refresh `queue_informed`). This delays an eviction and prevents none.
        tell: whether `before_evict` is called.
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
        """Take `count` pages off an unpinned leaf's tail, and queue the node that ends there now. If the
        whole leaf goes, its expected use passes to its parent."""
        end = self._forest.shrink(leaf, count)
        if end is not leaf and leaf.expected is not None and end.parent is not None:
            self._lapsing.expect(end, leaf.expected)
        if end.evictable:
            self._heap.push(end)

    def _prune_heap(self) -> None:
        if len(self._heap) > 2 * self._forest.nodes + 64:
            self._heap.prune()

    def retire(self) -> None:
        """Make everything in the trees invisible to lookups; pinned pages stay until their last pin is
        returned."""
        self._forest.retire()

    # -- inside -----------------------------------------------------------------------------------

    def _end_of(self, match: Match) -> Node:
        """The node that ends exactly where the match ends; splits a node if the match ends inside it. Raises
        ProtocolError if the match is not current."""
        if not match.current:
            raise ProtocolError("a match from before a change of the tree was used")
        if match.whole:
            return match.node
        return self._forest.split(match.node, match.inside)

    def _count_use(self, node: Node) -> None:
        """Count a use that ended here, by a request that did not publish the node. It answers the use that
        was expected here, if any was."""
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
