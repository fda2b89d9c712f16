"""What running sequences hold of the layer groups. Owns: every move of a sequence's windows, and how much of
a match all groups can go on from.

Rules: in each group a sequence holds its table from the first page that its next position looks back to
(`seq.windows`) to the end; `slide` lets go of what lies before, after each step. A match counts only as
far as every group has the frames to go on from its end. Where a prompt or a request ended, or hits did again,
others may go on: those windows outlast the ones merely passed. With no groups nothing here does anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from hotprefix.kernel.cache.frames import Frames
from hotprefix.kernel.cache.node import Match
from hotprefix.kernel.plan import PageFrame
from hotprefix.kernel.sequence import Sequence as Seq

Tail = tuple[tuple[Frames, list[int]], ...]


class Windows:
    """Over one L1's layer groups."""

    def __init__(self, groups: Sequence[Frames], page_size: int) -> None:
        self.groups = groups
        self._page = page_size

    @property
    def changes(self) -> int:
        """Grows whenever what a match is worth may have changed without a change of the tree."""
        return sum(group.changes for group in self.groups)

    # -- matches ----------------------------------------------------------------------------------

    def usable(self, match: Match) -> int:
        """Leading pages of a match that every group can go on from."""
        pages = match.pages
        while True:
            before = pages
            for group in self.groups:
                pages = group.usable(islice(backwards(match), match.pages - pages, None), pages)
            if pages == before:
                return pages

    def touch(self, match: Match) -> None:
        """A waiting request will go on from here: the frames it needs are the last to go."""
        for group in self.groups:
            group.touch(islice(backwards(match), group.reach))

    # -- sequences --------------------------------------------------------------------------------

    def open(self, seq: Seq) -> None:
        seq.windows = [0] * len(self.groups)

    def adopt(self, seq: Seq, before: int, after: int) -> None:
        """Pages [before, after) of the table are the tree's now, and the sequence goes on from there."""
        for i, group in enumerate(self.groups):
            first = group.first(after * self._page)
            group.passed(seq.table[seq.windows[i] : min(first, before)])
            group.hold(seq.table[max(first, before) : after])
            group.hit(seq.table[first:after])
            seq.windows[i] = first

    def replace(self, seq: Seq, first: int, old: Sequence[int], new: Sequence[int]) -> None:
        """The sequence's own pages `old`, from table index `first` on, give way to the tree's `new`."""
        for i, group in enumerate(self.groups):
            for at, (own, other) in enumerate(zip(old, new, strict=True), first):
                group.replace(own, other, held=at >= seq.windows[i])

    def checkpoint(self, seq: Seq, stop: int) -> None:
        """A chunk will stop at this position: a recurrent state can be kept where a page ends."""
        if stop % self._page == 0:
            for group in self.groups:
                group.checkpoint(seq.table[stop // self._page - 1])

    def slide(self, seq: Seq, prompt_done: bool) -> None:
        """Let go of what the next position does not look back to."""
        for i, group in enumerate(self.groups):
            first = group.first(seq.computed)
            group.passed(seq.table[seq.windows[i] : first])
            seq.windows[i] = first
            if prompt_done:
                group.ended(seq.table[first:])

    def still(self, seq: Seq) -> int:
        """How many more positions a decoding sequence can compute before any window lets go of a page."""
        page = self._page
        return min(page - 1 - (seq.computed - group.lookback) % page for group in self.groups)

    def release(self, seq: Seq) -> None:
        """Let go of the tree's pages; the sequence's own are about to become free."""
        for i, (group, pages) in enumerate(self.tail(seq)):
            group.passed(seq.table[seq.windows[i] : seq.shared - len(pages)])
            group.drop(reversed(pages))

    def tail(self, seq: Seq) -> Tail:
        """The published pages that another sequence needs to go on after this one."""
        return tuple((g, seq.table[g.first(seq.computed) : seq.shared]) for g in self.groups)

    # -- room -------------------------------------------------------------------------------------

    def fit(self, pages: int, match: Match | None, running: Iterable[tuple[Seq, int]]) -> bool:
        """Whether a sequence that comes to `pages` pages finds frames beside what running ones, with the
        pages each will come to, are still owed. A window never covers more than reach + 1 pages at once;
        what a chunk takes beyond that it gives back with the same step."""
        for i, group in enumerate(self.groups):
            if group.optional:
                continue
            most = group.reach + 1
            owed = sum(max(0, min(most, total) - (len(q.table) - q.windows[i])) for q, total in running)
            tail = islice(backwards(match), group.reach) if match is not None else ()
            shared = sum(group.held(page) for page in tail)
            if min(most, pages) - shared + owed > group.available:
                return False
        return True

    def fit_alone(self, pages: Iterable[int]) -> bool:
        """Whether sequences that come to so many pages each would all find frames, sharing nothing."""
        totals = list(pages)
        return all(
            sum(min(group.reach + 1, total) for total in totals) <= group.total
            for group in self.groups
            if not group.optional
        )

    # -- edge -------------------------------------------------------------------------------------

    def take_assigned(self) -> tuple[PageFrame, ...]:
        """Frames given since the last call, for the plan being made."""
        if not self.groups:
            return ()
        given = ((i, *pair) for i, group in enumerate(self.groups) for pair in group.take_assigned())
        return tuple(PageFrame(*each) for each in given)

    def check(self, running: Iterable[Seq], tails: Iterable[Tail]) -> None:
        """Raise ProtocolError unless every frame is in exactly one place."""
        sequences, holds = list(running), list(tails)
        for i, group in enumerate(self.groups):
            held = Counter(page for seq in sequences for page in seq.table[seq.windows[i] :])
            held.update(page for hold in holds for page in hold[i][1])
            group.check(held)


def wanted_pages(group: Frames, matches: Iterable[Match]) -> set[int]:
    """The pages whose frames a group needs to go on after these matches."""
    return {page for match in matches for page in islice(backwards(match), group.reach)}


def backwards(match: Match) -> Iterator[int]:
    """Page ids of a match, last first."""
    node, inside = match.node, match.inside
    while node.parent is not None:
        yield from reversed(node.pages[:inside])
        node = node.parent
        inside = len(node.pages)
