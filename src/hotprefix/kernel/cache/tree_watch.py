"""The observer of a tree's pages. Owns: `TreeWatch`.

Rules: a watch is told of real pages only, never of planned ones, and must not change the tree.
"""

from __future__ import annotations

from typing import Protocol

from hotprefix.kernel.cache.node import Node


class TreeWatch(Protocol):
    """Hears of real pages that a lookup can find, as they come and go. Pages added less pages removed are the
    number of such pages, at any time (rule 60)."""

    def added(self, node: Node) -> None:
        """All pages of this node have just become real."""
        ...

    def removing(self, leaf: Node, count: int) -> None:
        """The last `count` pages of this leaf are about to go, or can no longer be found."""
        ...
