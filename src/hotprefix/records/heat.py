"""Which prefixes are hot now. Owns: a bounded count of the page prefixes that recent requests asked for.

Rules:
1. A prefix's heat is the number of requests in a sliding window that begin with it. The window holds the
   requests of the last WINDOW_S seconds, at most MAX_REQUESTS.
2. Adding and forgetting a request cost one dictionary step a page. Asking for the hottest looks only at what
   it returns and the neighbours of that.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hotprefix.engine.messages import HotPrefix

WINDOW_S = 300.0
MAX_REQUESTS = 1024
MAX_PAGES = 256


@dataclass(slots=True)
class _Page:
    count: int = 0
    below: dict[str, _Page] = field(default_factory=dict)


class Heat:
    """Heat of one engine. Chains are fingerprints of a prompt's pages; only the first MAX_PAGES count."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._root = _Page()
        self._recent: deque[tuple[float, Sequence[str]]] = deque()

    def add(self, chain: Sequence[str], now: float) -> None:
        """Count a request with these pages, which arrived now."""
        chain = chain[:MAX_PAGES]
        self._recent.append((now, chain))
        page = self._root
        for name in chain:
            page = page.below.setdefault(name, _Page())
            page.count += 1
        self.expire(now)

    def expire(self, now: float) -> None:
        """Forget requests that arrived too long ago, or that are too many."""
        recent = self._recent
        while recent and (recent[0][0] < now - WINDOW_S or len(recent) > MAX_REQUESTS):
            page = self._root
            for name in recent.popleft()[1]:
                below = page.below[name]
                below.count -= 1
                if not below.count:
                    del page.below[name]
                    break
                page = below

    def hottest(self, most: int = 12, at_least: int = 2) -> tuple[HotPrefix, ...]:
        """Runs of pages that at least `at_least` requests share, hottest first, at most `most`. A run ends
        where the number of requests changes. Each run's parent comes before it."""
        found: list[HotPrefix] = []
        ranked = [(-page.count, 0, name, page, -1) for name, page in self._root.below.items()]
        heapq.heapify(ranked)
        while ranked and len(found) < most:
            negative, start, name, page, parent = heapq.heappop(ranked)
            if -negative < at_least:
                break
            stop = start + 1
            while len(page.below) == 1:
                ((next_name, below),) = page.below.items()
                if below.count != page.count:
                    break
                name, page, stop = next_name, below, stop + 1
            size = self._page_size
            found.append(HotPrefix(name, parent, start * size, stop * size, page.count))
            for child, below in page.below.items():
                heapq.heappush(ranked, (-below.count, stop, child, below, len(found) - 1))
        return tuple(found)
