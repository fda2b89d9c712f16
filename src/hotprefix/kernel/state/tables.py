"""What one running sequence holds of L1. Owns: every move of pages between a sequence's table and the
pool or the tree.

Rules: pages enter a table by `adopt` (the tree's pages, protected by the sequence's pin) or by `grow` (owned
pages). They cease to be owned by `publish` or `release`. A duplicate is remapped to the tree's page before
the sequence's own page is freed (rule 16). Only pages whose tokens all have KV are published (rule 8);
`plan_ahead` indexes, as planned, the pages that the step in flight completes, and these become real or are
taken back with that step. Layer groups (windows.py) follow every one of these moves.
"""

from __future__ import annotations

from hotprefix.errors import ProtocolError
from hotprefix.kernel.cache.node import Match
from hotprefix.kernel.cache.tier import Tier
from hotprefix.kernel.state.sequence import Sequence
from hotprefix.kernel.state.windows import Windows


class Tables:
    """Page-table operations over one L1.

    changes: grows whenever a table gets longer or is given back.
    given_back: grows whenever a sequence lets go of pages, or need not take all that it was owed.
    """

    def __init__(self, l1: Tier) -> None:
        self._l1 = l1
        self._page = l1.page_size
        self.changes = 0
        self.given_back = 0
        self.windows = Windows(l1.groups, l1.page_size)

    def lookup(self, seq: Sequence) -> Match | None:
        """The longest usable prefix of a waiting sequence's target; None if its namespace has nothing.

        The match is remembered. While it is current, the answer is that match, after one comparison.
        Otherwise the search goes on from the old match's end if that is still in the tree, and else from the
        root.
        """
        match = seq.memo
        if match is None or match.version != match.node.version:
            match = self._longest(seq)
        return self._usable(seq, match) if match is not None and self._l1.groups else match

    def _longest(self, seq: Sequence) -> Match | None:
        memo, tree, limit = seq.memo, self._l1.tree, seq.reuse_limit // self._page
        key, namespace = seq.target_key, seq.request.namespace
        seq.memo = (
            tree.lookup_again(memo, namespace, key, limit) if memo else tree.lookup(namespace, key, limit)
        )
        return seq.memo

    def _usable(self, seq: Sequence, longest: Match) -> Match | None:
        """As much of a match as every layer group can go on from; remembered like the match itself."""
        changes = self.windows.changes
        if seq.usable is not None:
            source, then, usable = seq.usable
            if source is longest and then == changes and usable is not None and usable.current:
                return usable
        pages = self.windows.usable(longest)
        found: Match | None = longest
        if pages < longest.pages:
            found = self._l1.tree.lookup(seq.request.namespace, seq.target_key, pages)
        seq.usable = (longest, changes, found)
        return found

    def peek(self, seq: Sequence) -> Match | None:
        """As `lookup`, and nothing is remembered of it, not even the memo."""
        match, tree = seq.memo, self._l1.tree
        key, namespace = seq.target_key, seq.request.namespace
        if match is None or match.version != match.node.version:
            match = tree.lookup(namespace, key, seq.reuse_limit // self._page)
        if match is None or not self._l1.groups:
            return match
        pages = self.windows.usable(match)
        return match if pages == match.pages else tree.lookup(namespace, key, pages)

    def further(self, seq: Sequence) -> Match:
        """The longest usable prefix of a running sequence's target, searched from the end of what the
        sequence shares already."""
        tree, limit = self._l1.tree, seq.reuse_limit // self._page
        match = tree.lookup_from(seq.pin, seq.shared, seq.target_key, limit)
        pages = self.windows.usable(match)
        if pages == match.pages:
            return match
        return tree.lookup_from(seq.pin, seq.shared, seq.target_key, pages)

    def touch(self, match: Match) -> None:
        """Make a waiting request's prefix the most recent one, and in each layer group the frames that it
        needs of that prefix."""
        self._l1.tree.touch(match)
        if self._l1.groups:
            self.windows.touch(match)

    def open(self, seq: Sequence) -> None:
        """Take the persistent pin of an admission, on the empty prefix."""
        tree = self._l1.tree
        self.windows.open(seq)
        seq.handle = tree.pin_root(seq.request.namespace)
        seq.dirty_from = 0
        self.changes += 1

    def adopt(self, seq: Sequence, match: Match) -> bool:
        """Use the tree's pages up to the end of `match` instead of computing them; False if it has no more
        than the sequence shares. The sequence's own pages in that range (a part-filled one) are freed after
        the remap. Raises ProtocolError if the sequence owns pages beyond the match."""
        before, after = seq.shared, match.pages
        if after <= before:
            return False
        replaced = seq.table[before:after]
        own_rest = seq.table[after:]
        if own_rest:
            raise ProtocolError(f"request {seq.request.id} owns pages beyond what it has computed")
        tree = self._l1.tree
        tree.use(match, seq.request.priority)
        # That may have split the node the match ended in; its pages are unchanged.
        match = tree.lookup_from(seq.pin, before, seq.target_key, after)
        seq.table[before:] = tree.pages_of(match)[before:]
        seq.handle = tree.repin(seq.pin, match)
        seq.shared = after
        self.changes += 1
        self.given_back += 1
        seq.dirty_from = min(seq.dirty_from, before)
        seq.computed = after * self._page
        self.windows.adopt(seq, before, after)
        self._l1.pool.release(replaced)
        return True

    def grow(self, seq: Sequence, tokens: int) -> bool:
        """Own enough pages for positions below `tokens`; False (and no change) if L1 has too few."""
        need = self.pages_for(tokens) - len(seq.table)
        if need <= 0:
            return True
        pages = self._l1.allocate(need)
        if pages is None:
            return False
        seq.dirty_from = min(seq.dirty_from, len(seq.table))
        seq.table += pages
        self.changes += 1
        return True

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page)

    def publish(self, seq: Sequence, tokens: int) -> int:
        """Index the complete pages below position `tokens`, which have all been computed; returns how many
        were added. Adds none if pages that the step in flight computes are in their place."""
        last = min(tokens, seq.publish_limit) // self._page
        if last <= seq.shared:
            return 0
        first = seq.shared
        own = seq.table[first:last]
        key, at = seq.key_at(first * self._page, last * self._page)
        inserted = self._l1.tree.insert(seq.pin, key, own, seq.request.priority, at=at)
        if not inserted.pages:
            return 0
        duplicates = own[: len(own) - inserted.added]
        self._l1.pool.index(own[len(duplicates) :])
        seq.handle = inserted.handle
        seq.shared = last
        if duplicates:
            self.given_back += 1
            self.windows.replace(seq, first, duplicates, inserted.pages[: len(duplicates)])
            seq.table[first:last] = inserted.pages
            seq.dirty_from = min(seq.dirty_from, first)
            self._l1.pool.release(duplicates)
        return inserted.added

    def plan_ahead(self, seq: Sequence, tokens: int) -> int:
        """Index, as planned, the pages that the chunk ending at position `tokens` completes.

        Returns how many were added. Adds none if another sequence's pages for the same tokens are there
        already: then both sequences compute them in this step, and `publish` keeps one copy afterwards.
        """
        limit = seq.share_limit
        last = (tokens if limit is None else min(tokens, limit)) // self._page
        first = seq.shared
        if last <= first:
            return 0
        key, at = seq.key_at(first * self._page, last * self._page)
        tree = self._l1.tree
        if tree.continues(seq.pin, key, at):
            return 0
        own = seq.table[first:last]
        inserted = tree.insert(seq.pin, key, own, seq.request.priority, planned=True, at=at)
        self._l1.pool.index(own)
        seq.handle = inserted.handle
        seq.shared = last
        return inserted.added

    def join_runs(self, seq: Sequence) -> None:
        """The sequence's planned pages have become real: join its runs in the tree where possible."""
        if seq.handle is not None:
            seq.handle = self._l1.tree.merge_up(seq.handle)

    def release(self, seq: Sequence) -> None:
        """Give back everything: the pin and the pages that were never published."""
        if seq.handle is None:
            return
        self.windows.release(seq)
        self._l1.pool.release(seq.owned)
        self._l1.tree.unpin(seq.handle)
        seq.handle = None
        seq.table = []
        seq.shared = 0
        self.changes += 1
        self.given_back += 1
