"""One run of pages in the prefix tree. Owns: `Node`, `Match`, and the walk that finds a match.

Rules:
1. A node's key is the token bytes of its pages, page-aligned, never empty except at a root. Key and pages are
   the node's own, and grow and shrink at their end.
2. A run that was cut for a branch is joined again when the branch is gone (forest.py). The joined run keeps,
   in its *seams*, what each of its parts was used for, so it loses its pages in the order in which the parts
   would have lost them.
3. What a walk finds is a frozen `Match`; walking changes nothing.
4. `version` grows with every change that a match ending in this node could notice: a split, a child added or
   removed, a tail evicted, the node gone. So "is this match still the longest?" is one comparison.
5. `cuts` grows with those changes only that touch the node's own run. While it stands still, what was matched
   is still there, and a match is brought up to date by searching on from its end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hotprefix.errors import ProtocolError
from hotprefix.kernel.cache.expected_reuse import Expected
from hotprefix.kernel.request import Namespace
from hotprefix.kernel.tokens import TOKEN_BYTES


class Seam:
    """A place inside a joined run at which one of its parts ended, and what that part was used for.

    end: the place, in pages from the run's start.
    The other fields are the part's, as in `Node`. They hold for the pages between the seam before this one
    (or the run's start) and `end`; the node's own fields hold for the pages behind its last seam.
    Example: a part of 4 pages joined with one of 2 is a run of 6 pages with one seam, whose `end` is 4.
    """

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
    """One run: pages[i] holds the KV of the tokens key[i*page_bytes:(i+1)*page_bytes], given everything
    above.

    Place and content:
    serial: unique within the tree; order policies sort by it.
    pins: the handles whose deepest node this is, plus the children that are protected. > 0 means protected.
    planned: the step in flight computes the pages (publication `schedule`); they are not real yet.
    retired: no lookup finds the node any more; it is evicted when its last pin is returned.
    seams: the seams inside the run, in order of their places.
    digest: the name of the last page outside this process (keys.py); None until it was asked for.
    version, cuts: see the module's rules.
    queued: the key of the node's valid entry in the eviction heap; only the heap writes it.

    Uses. These fields belong to uses that *ended* at this node's end. When a child leaves the tree its parent
    takes over all of them but created and visited. So a touch is one write, and yet no parent ever looks
    older than its children.
    last_access: the tick of the latest touch or use.
    created: the tick at which the run was published.
    hits: uses by other requests than the one that published the run. Publishing counts as none; otherwise a
    prompt that was prefilled in chunks would look hotter than one that was prefilled at once.
    priority: the most important (smallest) priority of the requests that used it.
    visited: whether a use ended here since the hand of eviction `sieve` last came by.
    round: the round of that hand in which this node's turn comes.
    expected: the next use that is expected here; None if none is.
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
        """Page ids from the end of `above` to this node's end. Raises ProtocolError if `above` is neither
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
    """The longest indexed prefix of a key.

    node: the node in which it ends.
    inside: how many of the node's pages belong to it.
    pages: its length in pages, from the root.
    planned: how many pages at its end are not real yet, because the step in flight computes them.
    version, cuts: the node's, at the moment of the walk.
    whole: whether it ends at the node's end.
    """

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
