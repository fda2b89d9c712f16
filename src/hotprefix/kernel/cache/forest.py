"""The shape of the prefix tree. Owns: the radix trees (one per namespace), the runs they are made of, and how
many nodes and pages these are.

Rules:
1. A run is cut, lengthened, shortened and joined here and nowhere else, so the counts, the versions that
   matches compare (node.py), the planned marks and the watch are right after each of these.
2. What is pinned, and what is evicted next, is decided in tree.py; here such facts are only carried along.
   The upper part of a cut is as protected as the part below it, and a parent takes over what a leaving child
   was used for (decision 3).
3. `tidy` joins runs that nothing tells apart any more. It is called only when no match is about to be used.
4. The work of joining is paid for by events (a page evicted, a use, a publication), JOIN_WORK units each. A
   unit is a node looked at or a page copied. A chain of runs is joined only when the whole of it is paid for,
   so a long chain is copied once for many branches that have left, not once for each.
"""

from __future__ import annotations

from collections.abc import Iterator

from hotprefix.errors import ProtocolError
from hotprefix.kernel.cache.node import Node, Seam
from hotprefix.kernel.cache.tree_watch import TreeWatch
from hotprefix.kernel.request import Namespace

MERGE_FROM = 8
JOIN_WORK = 256
UNUSED = 1 << 30


class Forest:
    """The trees of all namespaces.

    roots: the root of each namespace that has one.
    retired: the roots of trees that no lookup finds any more (see `retire`), until they have neither children
    nor pins.
    planned: the nodes that the step in flight computes. A node in it without pages has left the tree.
    nodes, pages: how many there are; roots do not count.
    watch: the observer of real pages; None if there is none.
    events: how many events have paid for joins so far.
    work: how many units of work joins have cost so far.
    """

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._serial = 0
        self.roots: dict[Namespace, Node] = {}
        self.retired: set[Node] = set()
        self.planned: list[Node] = []
        self.nodes = 0
        self.pages = 0
        self.watch: TreeWatch | None = None
        self.events = 0
        self.work = 0
        self._cut: dict[Node, None] = {}
        self._credit = 0
        self._price = 0

    def root(self, namespace: Namespace) -> Node:
        """The namespace's root; it is made if there is none."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(namespace, None, b"", [])
        return root

    def drop_if_empty(self, root: Node) -> None:
        """Drop a root that has no children and no pins."""
        if not root.children and not root.pins:
            root.version += 1
            root.cuts += 1
            if root.retired:
                self.retired.discard(root)
            else:
                self.roots.pop(root.namespace, None)

    def walk_nodes(self) -> Iterator[Node]:
        """Every node except roots, parents before children; those of retired trees last."""
        for roots in (self.roots.values(), self.retired):
            stack = [child for root in roots for child in root.children.values()]
            while stack:
                node = stack.pop()
                yield node
                stack.extend(node.children.values())

    def retire(self) -> None:
        """Make all trees invisible to lookups, together with everything that is put below them later. Each
        namespace starts with a new tree. Pinned pages stay until their last pin is returned, and are then the
        first to be evicted."""
        for node in reversed([*self.roots.values(), *self.walk_nodes()]):
            if self.watch is not None and node.pages and not (node.planned or node.retired):
                self.watch.removing(node, len(node.pages))
            node.retired = True
            node.version += 1
            node.cuts += 1
            # The first to be evicted under every policy, as soon as its last pin is returned.
            node.last_access = node.created = node.hits = node.round = 0
            node.visited, node.expected, node.priority = False, None, UNUSED
        self.retired.update(self.roots.values())
        self.roots = {}

    # -- growing ----------------------------------------------------------------------------------

    def add_child(self, parent: Node, key: bytes, pages: list[int], planned: bool) -> Node:
        """Add a run below `parent`, which must have no child that begins with the same page."""
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
        """The planned nodes that are still in the tree."""
        return [node for node in self.planned if node.pages]

    def settle(self) -> list[Node]:
        """The step that computes the planned pages has run: make them real. Returns their nodes."""
        settled, self.planned = self.planned_nodes(), []
        for node in settled:
            node.planned = False
            node.version += 1
            if node.parent is not None and node.parent.hits:
                self.note(node.parent)
            if self.watch is not None and not node.retired:
                self.watch.added(node)
        return settled

    # -- cutting and joining ----------------------------------------------------------------------

    def split(self, node: Node, at: int) -> Node:
        """Cut a node after `at` pages; returns the new upper part. The lower part stays `node`, so a pin on
        it still protects the same prefix. Raises ProtocolError unless 0 < at < the node's pages."""
        parent = node.parent
        if parent is None or not 0 < at < len(node.pages):
            raise ProtocolError(f"cannot split a node of {len(node.pages)} pages at {at}")
        cut = at * self._page_bytes
        upper = Node(node.namespace, parent, node.key[:cut], node.pages[:at], self._next_serial())
        upper.pins = 1 if node.pins else 0
        upper.planned = node.planned
        upper.retired = node.retired
        self._split_seams(node, upper, at)
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

    def _split_seams(self, node: Node, upper: Node, at: int) -> None:
        """Divide a cut node's seams, and set what the upper part was used for. If it ends at a seam, that is
        what the seam says. If not, no use has ended there: the upper part has the creation and priority of
        the pages around the cut, and takes over the rest from its child when that leaves."""
        below = [seam for seam in node.seams if seam.end > at]
        around = below[0] if below else node
        upper.created, upper.priority = around.created, around.priority
        upper.seams = node.seams[: len(node.seams) - len(below)]
        node.seams = below
        for seam in below:
            seam.end -= at
        if upper.seams and upper.seams[-1].end == at:
            _figures(upper, upper.seams.pop())

    def merge_up(self, node: Node) -> Node:
        """Join a pinned run with those above it if nothing tells them apart; returns the node that holds its
        end now.

        A request that extends its own prefix page by page should leave one run, not a chain of runs. Two runs
        are joined only if no result could show it: the parent is real, has this child alone and is pinned
        only through it; no request but the publisher has used either run, and none is expected at the
        parent's end. A run waits until it has at least 1 / MERGE_FROM of its parent's pages, so that an
        answer of n pages costs n log n copies and not n².
        """
        parent = node.parent
        while not (
            parent is None or parent.parent is None or node.planned or parent.planned
            or len(parent.children) != 1 or parent.pins != 1 or parent.hits or node.hits or parent.expected
            or node.pins != 1 or node.seams or parent.priority != node.priority
            or MERGE_FROM * len(node.pages) < len(parent.pages)
        ):  # fmt: skip
            self._join(parent, node)
            node, parent = parent, parent.parent
        return node

    def _join(self, parent: Node, node: Node) -> None:
        """Append a run to its parent; `node` leaves the tree."""
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

    # -- joining what was cut ---------------------------------------------------------------------

    def note(self, node: Node) -> None:
        """Remember a run that may have a single child which nothing tells apart from it: `tidy` looks at
        it."""
        if len(node.children) == 1 and node.parent is not None:
            self._cut[node] = None

    def earn(self, events: int) -> None:
        """Count events that pay for joins (see the module's rules)."""
        self.events += events
        if self._cut:
            self._credit += JOIN_WORK * events

    def tidy(self) -> None:
        """Join noted runs with the runs above and below them, as far as that is paid for."""
        while self._cut and self._credit >= self._price:
            node = next(iter(self._cut))
            chain = self._chain(node)
            self._price = len(chain) + (sum(len(each.pages) for each in chain) if len(chain) > 1 else 0)
            if self._price > self._credit:
                self._spend(len(chain))
                return
            self._spend(self._price)
            self._price = 0
            if len(chain) > 1:
                self._join_chain(chain)
            self._cut.pop(node, None)
        if not self._cut:
            self._credit = self._price = 0

    def _spend(self, work: int) -> None:
        self._credit -= work
        self.work += work

    def _chain(self, node: Node) -> list[Node]:
        """The runs around a noted one that could be one run, top first: each is the only child of the one
        before it. The noted run alone if it cannot be joined or has left the tree."""
        if not node.pages:
            return [node]
        chain = [node]
        while chain[-1].parent is not None and _joinable(chain[-1].parent, chain[-1]):
            chain.append(chain[-1].parent)
        chain.reverse()
        while len(chain[-1].children) == 1:
            child = next(iter(chain[-1].children.values()))
            if not _joinable(chain[-1], child):
                break
            chain.append(child)
        return chain

    def _join_chain(self, chain: list[Node]) -> None:
        """Make a chain one run. The last run takes over the pages of all above it, so that a pin on its end
        still protects the same prefix; the ends of the others have no pins."""
        bottom, top = chain[-1], chain[0]
        above = top.parent
        assert above is not None
        above.children[self._name(top)] = bottom
        bottom.parent = above
        pages: list[int] = []
        seams: list[Seam] = []
        for node in chain:
            for seam in node.seams:
                seam.end += len(pages)
            pages += node.pages
            seams += node.seams
            if node is not bottom:
                seams.append(Seam(len(pages), node))
        bottom.key = bytearray().join([node.key for node in chain])
        bottom.pages, bottom.seams = pages, seams
        for node in chain:
            node.version += 1
            node.cuts += 1
            if node is not bottom:
                node.pages, node.pins, node.children, node.seams = [], 0, {}, []
                self._cut.pop(node, None)
        self.nodes -= len(chain) - 1

    # -- shrinking --------------------------------------------------------------------------------

    def shrink(self, leaf: Node, count: int) -> Node:
        """Take `count` pages off an unpinned leaf's tail, at most as many as lie behind its last seam. An
        empty leaf leaves the tree. Returns the node that ends there now: the leaf or its parent."""
        if self.watch is not None and not (leaf.planned or leaf.retired):
            self.watch.removing(leaf, count)
        self.pages -= count
        leaf.version += 1
        leaf.cuts += 1
        keep = len(leaf.pages) - count
        if keep:
            del leaf.pages[keep:], leaf.key[keep * self._page_bytes :]
            leaf.digest = None
            if leaf.seams and leaf.seams[-1].end == keep:
                seam = leaf.seams.pop()
                _inherit(seam, leaf)
                _figures(leaf, seam)
        end = leaf if keep else self._remove(leaf)
        self.earn(count)
        return end

    def _remove(self, leaf: Node) -> Node:
        """Take an empty leaf out of the tree. Its parent takes over what it was used for, but not its
        expected use, which `PrefixTree._take` passes on. Returns the parent."""
        parent = leaf.parent
        if parent is None:
            raise ProtocolError("a root has no pages to give")
        del parent.children[self._name(leaf)]
        leaf.pages = []
        parent.version += 1
        _inherit(parent, leaf)
        self.nodes -= 1
        if parent.parent is None:
            self.drop_if_empty(parent)
        self.note(parent)
        return parent

    def _name(self, node: Node) -> bytes:
        """The tokens of a node's first page, by which its parent knows it."""
        return bytes(node.key[: self._page_bytes])

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial


def _joinable(upper: Node, lower: Node) -> bool:
    """Whether a run and its only child could be one run: both are real, the upper one's end has no pin of its
    own, and no use is expected there."""
    return (
        upper.parent is not None
        and len(upper.children) == 1
        and not (upper.planned or lower.planned)
        and upper.pins == (1 if lower.pins else 0)
        and upper.expected is None
    )


def _inherit(upper: Node | Seam, lower: Node) -> None:
    """The pages behind `upper`'s end leave: take over what they (`lower`) were used for."""
    upper.last_access = max(upper.last_access, lower.last_access)
    upper.hits += lower.hits
    upper.round = max(upper.round, lower.round)
    upper.priority = min(upper.priority, lower.priority)


def _figures(node: Node, seam: Seam) -> None:
    """Give a node that ends at this seam now what the seam says."""
    node.last_access, node.created, node.hits = seam.last_access, seam.created, seam.hits
    node.priority, node.visited, node.round = seam.priority, seam.visited, seam.round
