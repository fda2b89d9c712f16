"""Pages that requests are computing. Owns: `PagesInFlight`.

Rules:
1. From the moment of a choice, the pages that the request will compute count as there for others on that
   worker, from when its prefill is predicted to pass them. So eight identical prompts are one prefill and
   seven waits, and none is held back for a leader.
2. After its first token they count as there at once, until events confirm them, or for a time: `confirm_s`,
   and `presume_s` on a worker without events (there at most as many as it has pages).
3. If the request fails before its first token, its pages are not there. A request that counted on them
   computes them itself, and takes its place.
"""

from __future__ import annotations

import math
from collections import deque

from hotprefix.fleet.bookings import Booking, Work
from hotprefix.fleet.records import Keys


def shared(a: Keys, b: Keys, low: int = 0) -> int:
    """How many leading pages two prompts share; `low` are known to be. Keys are chained, so equal keys at one
    place mean equal pages before it, and the place where they part is found by halving."""
    high = min(len(a), len(b))
    while low < high:
        middle = (low + high) >> 1
        if a[middle] == b[middle]:
            low = middle + 1
        else:
            high = middle
    return low


class PagesInFlight:
    """See the module's rules."""

    def __init__(self) -> None:
        # Bookings by the first page that they compute, and how many there are by its position: a prompt is
        # looked up at these positions only.
        self._by_first: dict[int, list[Booking]] = {}
        self._positions: dict[int, int] = {}
        # By worker: bookings whose pages are made, and until when they count.
        self._made: dict[str, deque[tuple[float, Booking]]] = {}
        self._soonest = math.inf

    def __len__(self) -> int:
        return sum(map(len, self._by_first.values()))

    def add(self, booking: Booking) -> None:
        """The request will compute the rest of its pages."""
        if booking.first_new < len(booking.keys):
            self._by_first.setdefault(booking.keys[booking.first_new], []).append(booking)
            self._positions[booking.first_new] = self._positions.get(booking.first_new, 0) + 1

    def find(self, keys: Keys) -> list[Booking]:
        """The bookings that compute pages of this prompt, or have made them, the earliest pages first."""
        found: list[Booking] = []
        for position in sorted(self._positions):
            if position >= len(keys):
                break
            found += self._by_first.get(keys[position], ())
        return found

    def first_token(self, booking: Booking, until: float) -> None:
        """Its pages are made. They count as there until then."""
        booking.made = True
        if booking.first_new == len(booking.keys):
            return
        made = self._made.setdefault(booking.member.name, deque())
        made.append((until, booking))
        self._soonest = min(self._soonest, until)
        if booking.member.profile.events:
            return
        pages = sum(len(b.keys) - b.first_new for _, b in made)
        while pages > booking.member.profile.total_pages and len(made) > 1:
            oldest = made.popleft()[1]
            pages -= len(oldest.keys) - oldest.first_new
            self.remove(oldest)

    def expire(self, now: float) -> None:
        """Forget made pages whose time is up."""
        if now < self._soonest:
            return
        for worker in [name for name, made in self._made.items() if made[0][0] <= now]:
            made = self._made[worker]
            while made and made[0][0] <= now:
                self.remove(made.popleft()[1])
            if not made:
                del self._made[worker]
        self._soonest = min((made[0][0] for made in self._made.values()), default=math.inf)

    def fail(self, booking: Booking, work: Work) -> None:
        """It has ended before its first token, and its worker goes on. Those that counted on its pages
        compute them (rule 3). work: what is outstanding there."""
        self.remove(booking)
        heirs: list[Booking] = []
        for other in work.prefilling.values():
            if other.leans is not booking:
                continue
            heir = next((h for h in heirs if shared(h.keys, other.keys) >= other.first_new), None)
            if heir is not None:
                other.leans = heir
                continue
            self.remove(other)
            work.take_over(other, booking)
            self.add(other)
            heirs.append(other)

    def drop(self, worker: str) -> None:
        """The worker's life is over: what was made there is gone."""
        for _, booking in self._made.pop(worker, ()):
            self.remove(booking)

    def remove(self, booking: Booking) -> None:
        """Its pages do not count any more."""
        if booking.first_new == len(booking.keys):
            return
        key = booking.keys[booking.first_new]
        same = self._by_first[key]
        same.remove(booking)
        if not same:
            del self._by_first[key]
        self._positions[booking.first_new] -= 1
        if not self._positions[booking.first_new]:
            del self._positions[booking.first_new]
