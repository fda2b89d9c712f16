"""One run of pages in the prefix tree. Owns: `Node`, `Match`, and the walk that finds a match.

Rules: a node's key is the token bytes of its pages, page-aligned, never empty except at a root. Key and
pages are the node's own and grow and shrink at their end, where a long run gains and loses page by page.
Runs that branches had cut are joined again when these have left (forest.py); what the upper ones were used
for stays written down in the joined run's seams, so that it loses its pages in the order in which they would.
What a walk finds is a frozen `Match`; walking changes nothing. `version` grows whenever what a match that
ends in this node could see has changed (split, child added or removed, tail evicted, node gone), so
"is this match still the longest?" is one comparison (kernel.md: memoise and re-validate). `cuts` grows
with those of them that touch the node's own run: while it stands still, a match need only be followed on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hotprefix.errors import ProtocolError
from hotprefix.kernel.cache.expect import Expected
from hotprefix.kernel.request import Namespace
from hotprefix.kernel.tokens import TOKEN_BYTES


class Seam:
    """Where uses ended inside a run that was cut there once, `end` pages from its start. What it says holds
    of the pages from the seam before it on, as a node's own figures do of the pages behind its last seam."""

    __slots__ = ("created", "end", "hits", "last_access", "priority", "round", "visited")

    def __init__(self, end: int, node: Node) -> None:
        self.end = end
        self.last_access = node.last_access
        self.created = node.created
        self.hits = node.hits
        self.priority = node.priority
        self.visited = node.visited
        self.round = node.round


class Node:
    """pages[i] holds the KV of key[i*page_bytes:(i+1)*page_bytes], given everything above it.

    pins: handles whose deepest node this is, plus children that are protected; > 0 means protected.
    planned: its pages are computed by the step in flight (`schedule`/`coalesced`), not yet real.
    last_access, hits, priority belong to uses that *ended* here; a parent inherits its children's when
    they leave, so a touch is one write and yet no parent ever looks older than its children. hits counts
    uses by others: publishing is none, or a prompt prefilled in chunks would look hotter than another.
    visited, round: whether a use ended here since the eviction's hand last came by, and in which of its
    rounds it comes next. expected: the next use of what ends here. The last two pass to the parent too.
    retired: no lookup finds it any more; it goes with its last pin. seams: see Seam, in order. queued: the
    eviction heap's mark. serial: unique within the tree, for order policies. digest: the name of its last
    page outside this process (keys.py), once it was asked for.
    """

    __slots__ = (
        "children", "created", "cuts", "digest", "expected", "hits", "key", "last_access", "namespace",
        "pages", "parent", "pins", "planned", "priority", "queued", "retired", "round", "seams", "serial",
        "version",
        "visited",
    )  # fmt: skip

    def __init__(
        self, namespace: Namespace, parent: Node | None, key: bytes | bytearray, pages: list[int],
        serial: int = 0,
    ) -> None:  # fmt: skip
        self.serial = serial
        self.namespace = namespace
        self.parent = parent
        self.key = bytearray(key)
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.pins = 0
        self.planned = False
        self.retired = False
        self.last_access = 0
        self.created = 0
        self.hits = 0
        self.priority = 0
        self.visited = False
        self.round = 0
        self.expected: Expected | None = None
        self.seams: list[Seam] = []
        self.queued: tuple[float, ...] | None = None
        self.version = 0
        self.cuts = 0
        self.digest: bytes | None = None

    @property
    def evictable(self) -> bool:
        """An unpinned leaf that is still part of its tree."""
        return not self.pins and not self.children and bool(self.pages)

    def depth(self) -> int:
        """Pages from the root to this node's end."""
        pages, node = 0, self
        while node.parent is not None:
            pages += len(node.pages)
            node = node.parent
        return pages

    def path(self) -> list[Node]:
        """Nodes from the root to this one."""
        nodes = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def path_pages(self) -> list[int]:
        """Page ids from the root to this node's end."""
        return [page for node in self.path() for page in node.pages]

    def pages_below(self, above: Node) -> list[int]:
        """Page ids from the end of `above` to this node's end. Raises ProtocolError where `above` is neither
        this node nor above it."""
        runs: list[list[int]] = []
        node = self
        while node is not above:
            runs.append(node.pages)
            if node.parent is None:
                raise ProtocolError("the pinned node is not an ancestor of what was matched below it")
            node = node.parent
        return [page for run in reversed(runs) for page in run]

    def path_key(self) -> bytes:
        """Token bytes from the root to this node's end."""
        return b"".join(node.key for node in self.path())


class Match(NamedTuple):
    """The longest indexed prefix of a key: `pages` pages, of which the last `planned` are only being
    computed by the step in flight. Ends `inside` pages into `node` (as of `version` and `cuts`); whole:
    that is the node's end."""

    node: Node
    inside: int
    pages: int
    planned: int
    version: int
    cuts: int
    whole: bool

    @property
    def current(self) -> bool:
        """True while nothing that could lengthen or shorten the match has happened."""
        return self.version == self.node.version

    @property
    def intact(self) -> bool:
        """True while what was matched is still there; more may follow by now."""
        return self.cuts == self.node.cuts


def match_at(node: Node, inside: int, pages: int) -> Match:
    """The match of `pages` pages that ends `inside` pages into a node, as of now."""
    whole = inside == len(node.pages)
    return Match(node, inside, pages, _planned(node, inside), node.version, node.cuts, whole)


def walk(root: Node, above: int, key: bytes, start: int, end: int, page_bytes: int) -> Match:
    """Follow key[start:end] (bytes, page-aligned) from the end of `root`, which lies `above` pages deep."""
    node, at, inside = root, start, len(root.pages)
    while at < end:
        child = node.children.get(key[at : at + page_bytes])
        if child is None:
            break
        node = child
        run = node.key
        stop = at + len(run)
        if stop <= end and key.startswith(run, at):
            at, inside = stop, len(node.pages)
            continue
        inside = common_pages(key, at, run, min(end - at, len(run)), page_bytes)
        at += inside * page_bytes
        break
    return match_at(node, inside, above + (at - start) // page_bytes)


def common_pages(key: bytes, at: int, run: bytearray, length: int, page_bytes: int) -> int:
    """Whole pages that key[at:at+length] and run[:length] have in common."""
    if key.startswith(run if length == len(run) else run[:length], at):
        return length // page_bytes
    words = length // TOKEN_BYTES
    ours = np.frombuffer(key, dtype=np.int32, count=words, offset=at)
    theirs = np.frombuffer(run, dtype=np.int32, count=words)
    return int((ours != theirs).argmax()) * TOKEN_BYTES // page_bytes


def _planned(node: Node, inside: int) -> int:
    """Planned pages at the end of a match: planned nodes hang only below real ones."""
    pages = 0
    while node.planned and node.parent is not None:
        pages += inside
        node = node.parent
        inside = len(node.pages)
    return pages
