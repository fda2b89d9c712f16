"""What running sequences hold of the layer groups. Owns: every move of a sequence's windows, and how much of
a match every group can go on from.

A layer with an attention window reads only the last `lookback` positions, so its group keeps frames
(frames.py) for the pages of that window and may lose all earlier ones.

Rules:
1. In each group i a running sequence holds the pages `table[seq.windows[i]:]`: from the first page that its
   next position reads to the end. After each step `slide` moves the window on and lets go of the pages before
   it.
   Example: with pages of 16 and a lookback of 64, a sequence with 100 computed positions reads from position
   36 on, so it holds its table from page 2 on.
2. A match counts only as far as every group has the frames to go on from its end (rule 42).
3. The window at which a prompt or a request ended, or from which two requests have gone on, may be needed
   again. Its frames are evicted after those of pages that windows have merely passed.
4. A model without layer groups has no windows: every loop here is over an empty list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from hotprefix.kernel.cache.frames import Frames
from hotprefix.kernel.cache.node import Match
from hotprefix.kernel.plan import PageFrame
from hotprefix.kernel.state.sequence import Sequence as Seq

Tail = tuple[tuple[Frames, list[int]], ...]


class Windows:
    """The windows of all running sequences in the layer groups of one L1.

    checkpoints: a chunk must stop at the last page boundary of a prompt, because a group keeps its recurrent
    state only where chunks stop.
    """

    def __init__(self, groups: Sequence[Frames], page_size: int) -> None:
        self.groups = groups
        self.checkpoints = any(group.checkpoints for group in groups)
        self._page = page_size

    @property
    def changes(self) -> int:
        """A number that grows whenever `usable` may answer differently although the tree is unchanged."""
        return sum(group.changes for group in self.groups)

    # -- matches ----------------------------------------------------------------------------------

    def usable(self, match: Match) -> int:
        """The number of leading pages of a match from whose end every group can go on."""
        pages = match.pages
        while True:
            before = pages
            for group in self.groups:
                pages = group.usable(islice(backwards(match), match.pages - pages, None), pages)
            if pages == before:
                return pages

    def touch(self, match: Match) -> None:
        """Make the frames that a request needs to go on from this match the last to be evicted."""
        for group in self.groups:
            group.touch(islice(backwards(match), group.reach))

    # -- sequences --------------------------------------------------------------------------------

    def open(self, seq: Seq) -> None:
        seq.windows = [0] * len(self.groups)

    def adopt(self, seq: Seq, before: int, after: int) -> None:
        """Follow `Tables.adopt`: pages [before, after) of the sequence's table are the tree's now, and the
        sequence goes on from page `after`."""
        for i, group in enumerate(self.groups):
            first = group.first(after * self._page)
            group.passed(seq.table[seq.windows[i] : min(first, before)])
            group.hold(seq.table[max(first, before) : after])
            group.hit(seq.table[first:after])
            seq.windows[i] = first

    def replace(self, seq: Seq, first: int, old: Sequence[int], new: Sequence[int]) -> None:
        """Replace the sequence's own pages `old`, from table index `first` on, by the tree's pages `new`."""
        for i, group in enumerate(self.groups):
            for at, (own, other) in enumerate(zip(old, new, strict=True), first):
                group.replace(own, other, held=at >= seq.windows[i])

    def stopped(self, seq: Seq, stop: int) -> None:
        """Tell the groups that a chunk is planned that stops at position `stop`, if that ends a page."""
        if stop % self._page == 0:
            for group in self.groups:
                group.stopped(seq.table[stop // self._page - 1])

    def slide(self, seq: Seq, prompt_done: bool) -> None:
        """Let go of the pages that the sequence's next position does not read. prompt_done: the step has
        completed the prompt, so the pages of its last window count as a prompt's end."""
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
        """Let go of every page that the tree has. The sequence's own pages are about to become free."""
        for i, (group, pages) in enumerate(self.tail(seq)):
            group.passed(seq.table[seq.windows[i] : seq.shared - len(pages)])
            group.drop(reversed(pages))

    def tail(self, seq: Seq) -> Tail:
        """For each group, the published pages that another sequence needs to go on from where this one is."""
        return tuple((g, seq.table[g.first(seq.computed) : seq.shared]) for g in self.groups)

    # -- room -------------------------------------------------------------------------------------

    def fit(self, pages: int, match: Match | None, running: Iterable[tuple[Seq, int]]) -> bool:
        """Whether every group has frames for a sequence that will have `pages` pages in the end.

        match: the prefix that the sequence would share; its held frames are not needed again.
        running: each running sequence with the pages that it will have in the end. The frames that these
        are still owed are not available.
        A window covers at most reach + 1 pages between steps. Frames that a chunk takes beyond that are given
        back when its step is committed, so they are not counted.
        """
        for i, group in enumerate(self.groups):
            most = group.reach + 1
            owed = sum(max(0, min(most, total) - (len(q.table) - q.windows[i])) for q, total in running)
            tail = islice(backwards(match), group.reach) if match is not None else ()
            shared = sum(group.held(page) for page in tail)
            if min(most, pages) - shared + owed > group.spare:
                return False
        return True

    def fit_alone(self, pages: Iterable[int]) -> bool:
        """Whether every group has frames for sequences of these many pages each, if they share none."""
        totals = list(pages)
        return all(
            sum(min(group.reach + 1, total) for total in totals) <= group.capacity for group in self.groups
        )

    # -- edge -------------------------------------------------------------------------------------

    def take_assigned(self) -> tuple[PageFrame, ...]:
        """The frames given out since the last call, to be named in the plan that is being made."""
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
    """The pages whose frames a group needs to go on from the ends of these matches."""
    return {page for match in matches for page in islice(backwards(match), group.reach)}


def backwards(match: Match) -> Iterator[int]:
    """Page ids of a match, last first."""
    node, inside = match.node, match.inside
    while node.parent is not None:
        yield from reversed(node.pages[:inside])
        node = node.parent
        inside = len(node.pages)
