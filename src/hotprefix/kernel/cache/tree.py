"""The prefix tree over L1's pages. Owns: the radix trees (one per namespace), their pins, recency
and eviction.

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
from hotprefix.kernel.cache.node import Match, Node, match_at, walk
from hotprefix.kernel.cache.watch import TreeWatch
from hotprefix.kernel.request import Namespace
from hotprefix.kernel.tokens import TOKEN_BYTES

_NOTHING: Mapping[Node, int] = {}
MERGE_FROM = 8


class Inserted(NamedTuple):
    """handle: the pinned node where the published range now ends. pages: the range's pages as the tree
    has them. added: how many of them are new to the tree (a suffix); the first len(pages) - added were
    there already, so the caller's own copies are duplicates."""

    handle: Node
    pages: list[int]
    added: int


class PrefixTree:
    """Radix trees of page-aligned int32 token runs. before_evict(leaf, pages): told before an eviction takes
    that many pages off a leaf's tail. watch: told of every real page that comes and goes, on every path.
    Neither may change the tree. unprotected: grows when a run is pinned no longer."""

    def __init__(self, page_size: int, policy: Policy) -> None:
        self.page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[Namespace, Node] = {}
        self._heap: EvictionHeap[Node] = EvictionHeap(policy)
        self._lapsing: Lapsing[Node] = Lapsing()
        self._planned: list[Node] = []
        self._tick = 0
        self._serial = 0
        self.nodes = 0
        self.total_pages = 0
        self.protected_pages = 0
        self.unprotected = 0
        self.before_evict: Callable[[Node, int], None] | None = None
        self.watch: TreeWatch | None = None

    @property
    def evictable_pages(self) -> int:
        return self.total_pages - self.protected_pages

    # -- lookup: pure -----------------------------------------------------------------------------

    def lookup(self, namespace: Namespace, key: bytes, limit: int) -> Match | None:
        """Longest indexed prefix of key within its first `limit` pages; None where the namespace holds
        nothing at all."""
        root = self._roots.get(namespace)
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

    def continues(self, handle: Node, key: bytes) -> bool:
        """Whether the first page of `key` is indexed below a pinned node."""
        return key[: self.page_bytes] in handle.children

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
            if node.evictable:
                self._heap.push(node)

    # -- pins -------------------------------------------------------------------------------------

    def pin(self, match: Match) -> Node:
        """Protect the matched prefix. The handle returned goes to `unpin` exactly once."""
        node = self._end_of(match)
        self._protect(node)
        return node

    def pin_root(self, namespace: Namespace) -> Node:
        """A handle on the empty prefix of a namespace, from which `insert` can start."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(namespace, None, b"", [])
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
                self._drop_root_if_empty(node)
            elif not node.children:
                self._heap.push(node)
            node = node.parent

    # -- publication ------------------------------------------------------------------------------

    def insert(
        self, handle: Node, key: bytes, pages: list[int], priority: int = 0, planned: bool = False
    ) -> Inserted:
        """Publish the pages of `key` (page-aligned bytes) below the pinned node `handle`.

        Moves the caller's pin to the end of the range. Pages whose tokens are indexed already are not
        added; the tree's own are returned for them. planned: the step in flight computes them;
        `settle` makes them real or `discard_planned` takes them back. Real pages never replace, nor hang
        below, planned ones: where these are in the way, nothing is published (no pages returned).
        """
        found = walk(handle, 0, key, 0, len(key), self.page_bytes)
        if found.planned and not planned:
            return Inserted(handle, [], 0)
        kept: list[int] = []
        node = handle
        if found.pages:
            node = self._end_of(found)
            kept = self._between(handle, node)
            self._count_use(node)
            handle.hits -= 1
        fresh = pages[len(kept) :]
        if fresh:
            node = self._add_child(node, key[len(kept) * self.page_bytes :], fresh, planned)
        self._used(node, priority)
        self._protect(node)
        self.unpin(handle)
        return Inserted(self._merge_up(node), kept + fresh, len(fresh))

    def settle(self) -> list[Node]:
        """The step that computes the planned pages has run: they are real. Returns their nodes."""
        settled, self._planned = [node for node in self._planned if node.pages], []
        for node in settled:
            node.planned = False
            node.version += 1
            if self.watch is not None:
                self.watch.added(node)
        return settled

    def merge_up(self, handle: Node) -> Node:
        """Join a settled run with the run above it where nothing tells them apart; returns the pin."""
        return self._merge_up(handle)

    def discard_planned(self) -> list[int]:
        """The step failed: take back the pages it would have computed. All their pins must be gone."""
        freed: list[int] = []
        for node in sorted((n for n in self._planned if n.pages), key=Node.depth, reverse=True):
            if node.pins:
                raise ProtocolError("a page of a failed step is still pinned")
            freed.extend(node.pages)
            self._shrink(node, len(node.pages))
        self._planned = []
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
            take = min(count - len(freed), len(leaf.pages) - last.get(leaf, 0))
            if take <= 0:
                spared.append(leaf)
                continue
            if tell and self.before_evict is not None:
                self.before_evict(leaf, take)
            freed.extend(reversed(leaf.pages[len(leaf.pages) - take :]))
            self._shrink(leaf, take)
        for node in spared:
            self._heap.push(node)
        self._prune_heap()
        return freed

    # -- inside -----------------------------------------------------------------------------------

    def _end_of(self, match: Match) -> Node:
        """The node that ends exactly where the match ends, after a split if need be."""
        if not match.current:
            raise ProtocolError("a match from before a change of the tree was used")
        if match.whole:
            return match.node
        return self._split(match.node, match.inside)

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node after `at` pages. The lower part stays `node`, so pins on it keep their meaning."""
        parent = node.parent
        if parent is None or not 0 < at < len(node.pages):
            raise ProtocolError(f"cannot split a node of {len(node.pages)} pages at {at}")
        cut = at * self.page_bytes
        upper = Node(node.namespace, parent, node.key[:cut], node.pages[:at], self._next_serial())
        upper.pins = 1 if node.pins else 0
        upper.planned = node.planned
        upper.created = node.created
        upper.priority = node.priority
        parent.children[self._name(upper)] = upper
        node.parent = upper
        del node.key[:cut], node.pages[:at]
        upper.children[self._name(node)] = node
        node.version += 1
        node.cuts += 1
        self.nodes += 1
        if upper.planned:
            self._planned.append(upper)
        return upper

    def _add_child(self, parent: Node, key: bytes, pages: list[int], planned: bool) -> Node:
        node = Node(parent.namespace, parent, key, pages, self._next_serial())
        node.planned = planned
        node.created = self._tick + 1
        node.round = self._heap.round
        node.priority = 1 << 30
        parent.children[key[: self.page_bytes]] = node
        parent.version += 1
        self.nodes += 1
        self.total_pages += len(pages)
        if planned:
            self._planned.append(node)
        elif self.watch is not None:
            self.watch.added(node)
        return node

    def _name(self, node: Node) -> bytes:
        """Its first page's tokens: what its parent knows it by."""
        return bytes(node.key[: self.page_bytes])

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _count_use(self, node: Node) -> None:
        """By another than its publisher; it is what was expected here."""
        node.hits += 1
        node.visited = True
        if node.expected is not None:
            node.expected = None
            if node.evictable:
                self._heap.push(node)

    def _used(self, node: Node, priority: int) -> None:
        self._tick += 1
        node.last_access = self._tick
        node.priority = min(node.priority, priority)

    def _protect(self, handle: Node) -> None:
        node: Node | None = handle
        while node is not None:
            node.pins += 1
            if node.pins > 1:
                return
            self.protected_pages += len(node.pages)
            node = node.parent

    def _merge_up(self, node: Node) -> Node:
        """A request that extends its own prefix page by page should leave one run, not a chain.

        Only where nobody could tell: the parent is real, has this child alone, is pinned through it
        alone, and was or will be used by nobody but its publisher. Short runs gather until they are worth
        copying a long parent for, so that an answer of n pages costs n log n, not n².
        """
        parent = node.parent
        while not (
            parent is None or parent.parent is None or node.planned or parent.planned
            or len(parent.children) != 1 or parent.pins != 1 or parent.hits or node.hits or parent.expected
            or node.pins != 1 or parent.priority != node.priority
            or MERGE_FROM * len(node.pages) < len(parent.pages)
        ):  # fmt: skip
            self._join(parent, node)
            node, parent = parent, parent.parent
        return node

    def _join(self, parent: Node, node: Node) -> None:
        """A run goes on where the one below it ended."""
        parent.key += node.key
        parent.pages += node.pages
        parent.children = node.children
        for child in parent.children.values():
            child.parent = parent
        parent.last_access = max(parent.last_access, node.last_access)
        parent.digest = node.digest
        parent.version += 1
        parent.cuts += 1
        node.version += 1
        node.cuts += 1
        node.pages, node.pins, node.children = [], 0, {}
        self.nodes -= 1

    def _prune_heap(self) -> None:
        if len(self._heap) > 2 * self.nodes + 64:
            self._heap.prune()

    def _between(self, above: Node, node: Node) -> list[int]:
        """Pages from the end of `above` to the end of `node`."""
        runs: list[list[int]] = []
        while node is not above:
            runs.append(node.pages)
            if node.parent is None:
                raise ProtocolError("the pinned node is not an ancestor of what was matched below it")
            node = node.parent
        return [page for run in reversed(runs) for page in run]

    def _shrink(self, leaf: Node, count: int) -> None:
        """Take `count` pages off an unpinned leaf's tail; an empty leaf leaves the tree."""
        if self.watch is not None and not leaf.planned:
            self.watch.removing(leaf, count)
        self.total_pages -= count
        leaf.version += 1
        leaf.cuts += 1
        keep = len(leaf.pages) - count
        if keep:
            del leaf.pages[keep:], leaf.key[keep * self.page_bytes :]
            leaf.digest = None
            self._heap.push(leaf)
            return
        parent = leaf.parent
        if parent is None:
            raise ProtocolError("a root has no pages to give")
        del parent.children[self._name(leaf)]
        leaf.pages = []
        parent.version += 1
        parent.last_access = max(parent.last_access, leaf.last_access)
        parent.hits += leaf.hits
        parent.round = max(parent.round, leaf.round)
        if leaf.expected is not None and parent.parent is not None:
            self._lapsing.expect(parent, leaf.expected)
        parent.priority = min(parent.priority, leaf.priority)
        self.nodes -= 1
        if parent.parent is None:
            self._drop_root_if_empty(parent)
        elif parent.evictable:
            self._heap.push(parent)

    def _drop_root_if_empty(self, root: Node) -> None:
        if not root.children and not root.pins:
            root.version += 1
            root.cuts += 1
            self._roots.pop(root.namespace, None)

    # -- inspection -------------------------------------------------------------------------------

    def walk_nodes(self) -> Iterator[Node]:
        """Every node except roots, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    @property
    def namespaces(self) -> int:
        return len(self._roots)
