"""What waiting requests will need soon. Owns: the refresh arms `off`, `window`, `queue_informed`.

Rules (rule 31):
1. A refresh moves recency at most. It pins nothing, loads nothing, asks nothing outside, and changes no
   request's match beyond the memo that any lookup keeps.
2. `window` touches the prefixes of the first `refresh_window` waiting requests in reverse, so that the head's
   becomes the most recent. It does nothing if eviction does not go by recency, or if the order of the queue
   goes by the cache.
3. `queue_informed` touches nothing. An allocation that must evict takes the prefixes of those requests last.
4. In a layer group, which needs only a prefix's end, only that end is refreshed.
5. Both also work while the running batch is full, which is when they matter.

Example: three requests wait that match prefixes A, B and C, in this order. `window` touches C, then B, then
A. If L1 must evict, whatever no request waits for goes first, then C, then B; A, which is needed next, goes
last.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from hotprefix.kernel.cache.frames import Frames
from hotprefix.kernel.cache.node import Match, Node
from hotprefix.kernel.config import Eviction, Refresh
from hotprefix.kernel.plan import UNBOUNDED
from hotprefix.kernel.sched.order import CACHE_AWARE
from hotprefix.kernel.state.scheduler_state import SchedulerState
from hotprefix.kernel.state.sequence import Sequence
from hotprefix.kernel.state.windows import wanted_pages

RECENCY_BASED = frozenset({Eviction.LRU, Eviction.SLRU, Eviction.REUSE})


class QueueRefresh:
    """One kernel's refresh."""

    def __init__(self, state: SchedulerState) -> None:
        config = state.config
        usable = config.prefix_cache and config.refresh_window > 0
        self._s = state
        self._window = (
            usable
            and config.refresh is Refresh.WINDOW
            and config.eviction in RECENCY_BASED
            and config.order not in CACHE_AWARE
        )
        if usable and config.refresh is Refresh.QUEUE_INFORMED:
            state.l1.wanted = self._wanted
            for group in state.l1.groups:
                self._inform(group)

    def run(self) -> None:
        """Refresh waiting prefixes if that is due. Called once per planning pass, before the queue is
        ordered."""
        if not self._window:
            return
        if self._s.step % self._s.config.refresh_every:
            return
        lookup, touch, touched = self._s.tables.lookup, self._s.tables.touch, 0
        for seq in reversed(self._first_waiting()):
            match = lookup(seq)
            if match is not None and match.pages:
                touch(match)
                touched += 1
        self._s.counters.refresh_passes += 1
        self._s.counters.refresh_touches += touched

    def passes_left(self) -> int:
        """How many passes may be left out before the next refresh that touches something new. With
        `refresh_every` = 1 every pass repeats the last one's touches, which changes no order, so the answer
        is `UNBOUNDED`."""
        every = self._s.config.refresh_every
        if not self._window or every == 1:
            return UNBOUNDED
        return every - self._s.step % every

    def _first_waiting(self) -> list[Sequence]:
        return list(islice(self._s.queue, self._s.config.refresh_window))

    def _wanted(self) -> Mapping[Node, int]:
        """Node -> how many of its leading pages the first waiting requests match. The nodes above need no
        entry, because they cannot be evicted before their children."""
        wanted: dict[Node, int] = {}
        for match in self._matches():
            if match.inside:
                wanted[match.node] = max(wanted.get(match.node, 0), match.inside)
        return wanted

    def _inform(self, group: Frames) -> None:
        """Tell a layer group which pages' frames the first waiting requests need."""
        group.wanted = lambda: wanted_pages(group, self._matches())

    def _matches(self) -> list[Match]:
        found = [self._s.tables.lookup(seq) for seq in self._first_waiting()]
        return [match for match in found if match is not None]
