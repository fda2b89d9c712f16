"""The shape of the prefix tree. Owns: the radix trees (one per namespace), the runs they are made of, and how
many nodes and pages these are.

Rules: a run is cut, lengthened, shortened and joined here and nowhere else, so the counts, the versions that
matches compare (node.py), the planned marks and the watch follow on every path. Who is pinned, wanted or
evicted is decided elsewhere (tree.py); here it only moves along: the upper part of a cut is as protected as
what hangs below it, and a parent inherits what its leaving child was used for (decision 3).
"""

from __future__ import annotations

from collections.abc import Iterator

from hotprefix.errors import ProtocolError
from hotprefix.kernel.cache.node import Node
from hotprefix.kernel.cache.watch import TreeWatch
from hotprefix.kernel.request import Namespace

MERGE_FROM = 8
UNUSED = 1 << 30


class Forest:
    """roots: by namespace. retired: roots that no namespace leads to any more. planned: nodes that the step
    in flight computes; those without pages are gone. nodes, pages: how many there are, roots aside. watch:
    see TreeWatch."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._serial = 0
        self.roots: dict[Namespace, Node] = {}
        self.retired: set[Node] = set()
        self.planned: list[Node] = []
        self.nodes = 0
        self.pages = 0
        self.watch: TreeWatch | None = None

    def root(self, namespace: Namespace) -> Node:
        """The namespace's root, which is made where there is none."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(namespace, None, b"", [])
        return root

    def drop_if_empty(self, root: Node) -> None:
        """A root that holds nothing, and that nobody holds, goes."""
        if not root.children and not root.pins:
            root.version += 1
            root.cuts += 1
            if root.retired:
                self.retired.discard(root)
            else:
                self.roots.pop(root.namespace, None)

    def walk_nodes(self) -> Iterator[Node]:
        """Every node except roots, parents before children; those that are retired last."""
        for roots in (self.roots.values(), self.retired):
            stack = [child for root in roots for child in root.children.values()]
            while stack:
                node = stack.pop()
                yield node
                stack.extend(node.children.values())

    def retire(self) -> None:
        """From now on nothing of what is here is found, nor what is put below it. Whoever holds a pin keeps
        what it protects. Each namespace starts anew."""
        for node in reversed([*self.roots.values(), *self.walk_nodes()]):
            if self.watch is not None and node.pages and not (node.planned or node.retired):
                self.watch.removing(node, len(node.pages))
            node.retired = True
            node.version += 1
            node.cuts += 1
            # First to go under every policy, as soon as it is not pinned any more.
            node.last_access = node.created = node.hits = node.round = 0
            node.visited, node.expected, node.priority = False, None, UNUSED
        self.retired.update(self.roots.values())
        self.roots = {}

    # -- growing ----------------------------------------------------------------------------------

    def add_child(self, parent: Node, key: bytes, pages: list[int], planned: bool) -> Node:
        """A new run below `parent`, which has none that begins with the same page."""
        node = Node(parent.namespace, parent, key, pages, self._next_serial())
        node.planned = planned
        node.retired = parent.retired
        node.priority = UNUSED
        parent.children[key[: self._page_bytes]] = node
        parent.version += 1
        self.nodes += 1
        self.pages += len(pages)
        if planned:
            self.planned.append(node)
        elif self.watch is not None and not node.retired:
            self.watch.added(node)
        return node

    def planned_nodes(self) -> list[Node]:
        """Those that are still there."""
        return [node for node in self.planned if node.pages]

    def settle(self) -> list[Node]:
        """The step that computes the planned pages has run: they are real. Returns their nodes."""
        settled, self.planned = self.planned_nodes(), []
        for node in settled:
            node.planned = False
            node.version += 1
            if self.watch is not None and not node.retired:
                self.watch.added(node)
        return settled

    # -- cutting and joining ----------------------------------------------------------------------

    def split(self, node: Node, at: int) -> Node:
        """Cut a node after `at` pages; returns the upper part. The lower part stays `node`, so pins on it
        keep their meaning."""
        parent = node.parent
        if parent is None or not 0 < at < len(node.pages):
            raise ProtocolError(f"cannot split a node of {len(node.pages)} pages at {at}")
        cut = at * self._page_bytes
        upper = Node(node.namespace, parent, node.key[:cut], node.pages[:at], self._next_serial())
        upper.pins = 1 if node.pins else 0
        upper.planned = node.planned
        upper.retired = node.retired
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
            self.planned.append(upper)
        return upper

    def merge_up(self, node: Node) -> Node:
        """Join a pinned run with those above it where nothing tells them apart; returns where its end is now.

        A request that extends its own prefix page by page should leave one run, not a chain. Only where
        nobody could tell: the parent is real, has this child alone, is pinned through it alone, and was or
        will be used by nobody but its publisher. Short runs gather until they are worth copying a long
        parent for, so that an answer of n pages costs n log n, not n².
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

    # -- shrinking --------------------------------------------------------------------------------

    def shrink(self, leaf: Node, count: int) -> Node:
        """Take `count` pages off an unpinned leaf's tail; an empty leaf leaves the tree. Returns the node
        that ends there now: the leaf or its parent."""
        if self.watch is not None and not (leaf.planned or leaf.retired):
            self.watch.removing(leaf, count)
        self.pages -= count
        leaf.version += 1
        leaf.cuts += 1
        keep = len(leaf.pages) - count
        if not keep:
            return self._remove(leaf)
        del leaf.pages[keep:], leaf.key[keep * self._page_bytes :]
        leaf.digest = None
        return leaf

    def _remove(self, leaf: Node) -> Node:
        """The parent stands for the leaf from now on. Expected uses are not handed on here."""
        parent = leaf.parent
        if parent is None:
            raise ProtocolError("a root has no pages to give")
        del parent.children[self._name(leaf)]
        leaf.pages = []
        parent.version += 1
        parent.last_access = max(parent.last_access, leaf.last_access)
        parent.hits += leaf.hits
        parent.round = max(parent.round, leaf.round)
        parent.priority = min(parent.priority, leaf.priority)
        self.nodes -= 1
        if parent.parent is None:
            self.drop_if_empty(parent)
        return parent

    def _name(self, node: Node) -> bytes:
        """Its first page's tokens: what its parent knows it by."""
        return bytes(node.key[: self._page_bytes])

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial
