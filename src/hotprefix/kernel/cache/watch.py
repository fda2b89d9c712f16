"""Who may hear of a tree's pages. Owns: `TreeWatch`.

Rules: told of real pages only, never of planned ones; it must not change the tree.
"""

from __future__ import annotations

from typing import Protocol

from hotprefix.kernel.cache.node import Node


class TreeWatch(Protocol):
    """Hears of real pages that a lookup can find: sum(added) - sum(removing) is their number at any time."""

    def added(self, node: Node) -> None:
        """All pages of this node have just become real."""
        ...

    def removing(self, leaf: Node, count: int) -> None:
        """The last `count` pages of this leaf are about to go, or to be found no more."""
        ...
