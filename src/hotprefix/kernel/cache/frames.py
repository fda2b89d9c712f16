"""What a layer group beside full attention keeps of a prefix. Owns: `Frames`, one group's pool, and which
page has a frame in it.

Rules (docs/decisions/0014):
1. A page is a name for P positions of one prefix. Full attention keeps their KV as long as the page lives. A
   layer group reads only the last `lookback` tokens, so it keeps a page's KV in a *frame* of its own pool,
   which may be taken away while the page lives. A page without a frame is a *hole* for the group.
2. To go on from the end of a prefix, the group needs the frames of its last `reach` pages and none before
   them.
   Example: with a lookback of 64 and pages of 16, reach is 4.
3. A frame is *held* while the window of a running sequence covers its page, and *idle* otherwise.
   free + held + idle = total.
4. Idle frames are evicted in this order: first those of pages that windows have merely passed, latest first;
   then, least recently used first, those of windows at which a prompt or a request ended or from which two
   requests have gone on.
5. A recurrent state is a window that looks one token back, and its frames are *checkpoints*: a page gets one
   only if a chunk stops at its end, and only if one is available, and the frame holds the state at that
   place. So no allocation ever waits for such a group (`spare`, `capacity`). All that differs is here, but
   for two things that follow from it: a chunk stops at a prompt's last page boundary (`Windows.checkpoints`),
   and no page of the step in flight is read (`rules_for`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from hotprefix.errors import ProtocolError
from hotprefix.kernel.config import LayerGroup
from hotprefix.kernel.plan import UNBOUNDED

# What a page is worth once windows have passed it. At KEEP or more its frame is evicted late (see the rules).
NOTHING, HIT, KEEP, PROMPT_END = range(4)


@dataclass(frozen=True, slots=True)
class FrameCount:
    """Frames of one group by state. evicted: how many frames have been taken from a page so far."""

    total: int
    free: int
    held: int
    idle: int
    evicted: int


class Frames:
    """`group.frames` frames for pages 0 .. pages-1.

    checkpoints: the group keeps a recurrent state.
    capacity: frames of the pool, as far as requests need them to run.
    wanted: called at each eviction; returns the pages whose frames are to be taken last.
    changes: grows whenever a page that lives on loses or gains its frame.
    """

    def __init__(self, group: LayerGroup, pages: int, page_size: int) -> None:
        self.checkpoints = group.window is None
        self.capacity = UNBOUNDED if self.checkpoints else group.frames
        self.lookback = group.lookback
        self.reach = group.reach(page_size)
        self.total = group.frames
        self.evicted = 0
        self.changes = 0
        self.wanted: Callable[[], Container[int]] = frozenset
        self._page_size = page_size
        self._frame = [-1] * pages
        self._users = [0] * pages
        self._worth = bytearray(pages)
        self._free = list(range(group.frames - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._assigned: dict[int, int] = {}

    # -- what there is ----------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Frames that could be given out now."""
        return len(self._free) + len(self._idle)

    @property
    def spare(self) -> int:
        """Pages that could be allocated now as far as this group goes."""
        return UNBOUNDED if self.checkpoints else self.available

    def first(self, computed: int) -> int:
        """Index of the first page that a sequence with `computed` positions still reads or writes."""
        return max(0, computed - self.lookback) // self._page_size

    def usable(self, backwards: Iterable[int], pages: int) -> int:
        """The largest n <= pages so that the group can go on from the end of a prefix's first n pages: the
        last `reach` of these n pages (all n, if they are fewer) have frames. backwards: the prefix's page
        ids, last first. Example: reach 2, frames at pages 0, 1 and 3 of four: the result is 2."""
        end, run = pages, 0
        for at, page in zip(range(pages - 1, -1, -1), backwards, strict=False):
            if run == self.reach:
                break
            end, run = (end, run + 1) if self._frame[page] >= 0 else (at, 0)
        return end

    def held(self, page: int) -> bool:
        return self._users[page] > 0

    def only_held_by(self, times: Mapping[int, int]) -> int:
        """Frames that would be idle if each of these pages were in so many windows less."""
        return sum(self._users[page] == n and self._frame[page] >= 0 for page, n in times.items())

    def count(self, returned: int = 0) -> FrameCount:
        """returned: held frames that are as good as idle."""
        free, idle = len(self._free), len(self._idle) + returned
        return FrameCount(self.total, free, self.total - free - idle, idle, self.evicted)

    # -- pages come and go ------------------------------------------------------------------------

    def open(self, pages: Sequence[int]) -> None:
        """Follow an allocation: one sequence holds these pages now. Each gets a frame, unless frames are
        checkpoints."""
        for page in pages:
            self._users[page] = 1
        if not self.checkpoints:
            self._give(pages)

    def stopped(self, page: int) -> None:
        """A chunk that is planned stops at this page's end. The page gets its checkpoint there, if the group
        keeps any and a frame is available."""
        if self.checkpoints and self._frame[page] < 0 and self.available:
            self._give([page])
            self.changes += 1

    def forget(self, pages: Iterable[int]) -> None:
        """Take back the frames of pages that became free."""
        for page in pages:
            self._users[page] = self._worth[page] = 0
            self._idle.pop(page, None)
            self._take_back(page)

    def replace(self, old: int, new: int, held: bool) -> None:
        """A sequence reads page `new` from now on instead of its own page `old`, which has the same content.
        If `new` is a hole, it gets the frame of `old`. held: whether the sequence's window covers the
        page."""
        if self._frame[new] < 0 <= self._frame[old]:
            self._frame[new], self._frame[old] = self._frame[old], -1
            self._assigned.pop(old, None)
            self._assigned[new] = self._frame[new]
            self._idle.pop(old, None)
            self.changes += 1
            if not self._users[new]:
                self._idle_first(new)
        if held:
            self._users[old] -= 1
            self.hold([new])

    # -- windows ----------------------------------------------------------------------------------

    def hold(self, pages: Iterable[int]) -> None:
        """One more window covers these pages."""
        for page in pages:
            self._users[page] += 1
            self._idle.pop(page, None)

    def drop(self, pages: Iterable[int]) -> None:
        """The window of an ended sequence covers these pages no more. Frames that become idle are the last
        to be evicted; of these, the page given first goes first."""
        for page in pages:
            if self._unheld(page):
                self._idle[page] = None

    def passed(self, pages: Iterable[int]) -> None:
        """A window has moved on from these pages. Frames that become idle are the first to be evicted, unless
        the page is worth KEEP or more: those are the last."""
        for page in pages:
            if self._unheld(page):
                if self._worth[page] >= KEEP:
                    self._idle[page] = None
                else:
                    self._idle_first(page)

    def ended(self, pages: Iterable[int]) -> None:
        """A prompt's last window covers these pages: another answer to that prompt goes on from them."""
        for page in pages:
            self._worth[page] = PROMPT_END

    def hit(self, pages: Iterable[int]) -> None:
        """A request goes on from these pages. The first request to do so may be the session's next turn,
        after which they are needed no more (HIT); a second one shows that prefixes branch there (KEEP)."""
        for page in pages:
            self._worth[page] = HIT if self._worth[page] in (NOTHING, PROMPT_END) else KEEP

    def touch(self, pages: Iterable[int]) -> None:
        """Make the idle frames of these pages the last to be evicted; of these, the page given first goes
        first."""
        for page in pages:
            if page in self._idle:
                self._idle.move_to_end(page)

    # -- inside -----------------------------------------------------------------------------------

    def _unheld(self, page: int) -> bool:
        """Return one hold on a page. True if the page has a frame and that frame is idle now."""
        if self._users[page] <= 0:
            raise ProtocolError(f"a hold on page {page} was returned twice")
        self._users[page] -= 1
        return not self._users[page] and self._frame[page] >= 0

    def _idle_first(self, page: int) -> None:
        self._idle[page] = None
        self._idle.move_to_end(page, last=False)

    def _give(self, pages: Sequence[int]) -> None:
        self._make_room(len(pages))
        for page in pages:
            self._frame[page] = self._assigned[page] = self._free.pop()

    def _make_room(self, count: int) -> None:
        missing = count - len(self._free)
        if missing <= 0:
            return
        if missing > len(self._idle):
            raise ProtocolError(f"{count} frames wanted, {self.available} available")
        wanted = self.wanted()
        order: Iterable[int] = sorted(self._idle, key=wanted.__contains__) if wanted else self._idle
        for page in list(islice(order, missing)):
            del self._idle[page]
            self._take_back(page)
            self._worth[page] = 0
            self.evicted += 1
            self.changes += 1

    def _take_back(self, page: int) -> None:
        if self._frame[page] >= 0:
            self._free.append(self._frame[page])
            self._frame[page] = -1
            self._assigned.pop(page, None)

    # -- edge -------------------------------------------------------------------------------------

    def take_assigned(self) -> tuple[tuple[int, int], ...]:
        """(page, frame) for each frame given out since the last call."""
        taken = tuple(self._assigned.items())
        self._assigned = {}
        return taken

    def check(self, held: Counter[int]) -> None:
        """Raise ProtocolError unless every frame is in exactly one place. held: how many windows cover
        each page."""
        for page, users in enumerate(self._users):
            if users != held[page]:
                raise ProtocolError(f"page {page} is in {held[page]} windows, the count says {users}")
            if users and self._frame[page] < 0 and not self.checkpoints:
                raise ProtocolError(f"page {page} is in a window and has no frame")
        given = {page: frame for page, frame in enumerate(self._frame) if frame >= 0}
        if sorted([*given.values(), *self._free]) != list(range(self.total)):
            raise ProtocolError(f"frames leaked: {self.count()}")
        if set(self._idle) != {page for page in given if not self._users[page]}:
            raise ProtocolError(f"idle frames are not those without a window: {self.count()}")
