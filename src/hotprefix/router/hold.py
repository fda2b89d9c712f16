"""Requests that wait here for a worker. Owns: `Hold`: who is next, who must give way, and when to come back.

Rules:
1. Bounded by `most`. If there is no room, the newest request of the tenant that has most waiting gives way;
   that is the new one itself if its tenant has as many.
2. A tenant's requests keep their order. Tenants take turns by tokens: each stands at the tokens that it was
   given since it began to wait, plus those that it had under way then, and the one that stands lowest is
   next. So one that sends a thousand requests does not keep out one that sends one.
3. `Retry-After` is computed: how long as many requests as wait take to be answered, at the rate at which
   answers ended lately.

Pure: time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

LEAST_S, MOST_S = 1, 600


class Waiter(Protocol):
    """tenant: who pays for it. tokens: how much."""

    @property
    def tenant(self) -> str: ...
    @property
    def tokens(self) -> int: ...


W = TypeVar("W", bound=Waiter)


class Hold(Generic[W]):
    """See the module's rules. count: how many wait."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._queues: dict[str, dict[W, None]] = {}
        self._stands: dict[str, int] = {}
        self._lowest = 0
        self.count = 0

    def add(self, waiter: W, under_way: int = 0) -> W | None:
        """Let it wait. under_way: its tenant's tokens. Returns the one that has to go for it, which may be
        itself."""
        victim: W | None = None
        if self.count >= self._most:
            own = len(self._queues.get(waiter.tenant, ()))
            fullest = max(self._queues.values(), key=len, default={})
            if len(fullest) <= own + 1:
                return waiter
            victim = next(reversed(fullest))
            self.remove(victim)
        if waiter.tenant not in self._queues:
            self._queues[waiter.tenant], self._stands[waiter.tenant] = {}, self._lowest + under_way
        self._queues[waiter.tenant][waiter] = None
        self.count += 1
        return victim

    def served(self, waiter: W) -> None:
        """It has got its worker."""
        if waiter.tenant in self._stands:
            self._lowest = max(self._lowest, self._stands[waiter.tenant])
            self._stands[waiter.tenant] += waiter.tokens
        self.remove(waiter)

    def remove(self, waiter: W) -> bool:
        """It does not wait any more. Whether it did."""
        queue = self._queues.get(waiter.tenant, {})
        if waiter not in queue:
            return False
        del queue[waiter]
        self.count -= 1
        if not queue:
            del self._queues[waiter.tenant], self._stands[waiter.tenant]
        return True

    def heads(self) -> list[W]:
        """The first of each tenant, in the order in which they are to be tried."""
        tenants = sorted(self._queues, key=self._stands.__getitem__)
        return [next(iter(self._queues[tenant])) for tenant in tenants]

    def __iter__(self) -> Iterator[W]:
        for queue in self._queues.values():
            yield from queue


class Rate:
    """Answers that ended, a second, over the last `window` of them."""

    def __init__(self, window: int = 64) -> None:
        self._ends: deque[float] = deque(maxlen=window)

    def ended(self, now: float) -> None:
        self._ends.append(now)

    def per_s(self, now: float) -> float | None:
        """None: too few have ended."""
        if len(self._ends) < 2 or now <= self._ends[0]:
            return None
        return len(self._ends) / (now - self._ends[0])

    def retry_after(self, before: int, otherwise_s: float, now: float) -> int:
        """Whole seconds until a request with so many before it would have its turn. otherwise_s: if the rate
        is not known."""
        rate = self.per_s(now)
        seconds = otherwise_s if rate is None else (before + 1) / rate
        return max(LEAST_S, min(MOST_S, math.ceil(seconds)))
