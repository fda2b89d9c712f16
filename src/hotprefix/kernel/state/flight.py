"""Exact-input single flight. Owns: which request leads a prompt's computation, which requests wait for it,
and which released ids are still to end.

Rules (flight, docs/terms.md):
1. A flight exists from its leader's submission to its release. After that it is forgotten.
2. A released id is remembered until its terminal notice, so that this notice is valid and one for an unknown
   id is an error.
3. A leader that cannot go on hands over to the first follower, at most `max_elections` times in a row. Then
   all followers run on their own (rule 30).
4. Followers hold no pages, and a follower that leaves changes nothing for the rest of its flight.

Example: A, B and C have the same prompt. A leads, B and C wait. A is aborted: B leads (one election), C still
waits. B's prompt is published: C is released and finds all of it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from hotprefix.errors import ProtocolError
from hotprefix.kernel.request import RequestId


@dataclass(slots=True)
class _Flight:
    leader: RequestId
    followers: dict[RequestId, None] = field(default_factory=dict)
    elections: int = 0


class ExactFlights:
    """Flights by input key (namespace and every token)."""

    def __init__(self, max_elections: int) -> None:
        self._max_elections = max_elections
        self._flights: dict[Hashable, _Flight] = {}
        self._key_of: dict[RequestId, Hashable] = {}
        self._released: set[RequestId] = set()

    @property
    def tracked(self) -> int:
        """Ids remembered in any way; 0 when every request has ended."""
        return len(self._key_of) + len(self._released)

    def join(self, request: RequestId, key: Hashable) -> bool:
        """Enter a request. True if it must wait for the flight's leader; False if it leads a new flight."""
        if request in self._key_of or request in self._released:
            raise ProtocolError(f"request {request} is in a flight already")
        flight = self._flights.get(key)
        self._key_of[request] = key
        if flight is None:
            self._flights[key] = _Flight(request)
            return False
        flight.followers[request] = None
        return True

    def independent(self, request: RequestId) -> None:
        """Enter a request that neither leads nor follows."""
        self._released.add(request)

    def leads(self, request: RequestId) -> bool:
        key = self._key_of.get(request)
        return key is not None and self._flights[key].leader == request

    def release(self, leader: RequestId) -> list[RequestId]:
        """Close a flight whose leader's prompt is published, or whose leader has ended. Returns the
        followers, which may go on now."""
        if not self.leads(leader):
            raise ProtocolError(f"request {leader} leads no flight")
        flight = self._flights.pop(self._key_of[leader])
        freed = list(flight.followers)
        for request in (leader, *freed):
            del self._key_of[request]
            self._released.add(request)
        return freed

    def hand_over(self, leader: RequestId) -> list[RequestId]:
        """Replace a leader that cannot go on (abort, failure, retraction). Returns the requests that may run
        now: the next leader; or all followers if the elections are used up; or none if none waited."""
        if not self.leads(leader):
            raise ProtocolError(f"request {leader} leads no flight")
        key = self._key_of[leader]
        flight = self._flights[key]
        if not flight.followers or flight.elections >= self._max_elections:
            return self.release(leader)
        heir = next(iter(flight.followers))
        del flight.followers[heir]
        flight.leader = heir
        flight.elections += 1
        del self._key_of[leader]
        self._released.add(leader)
        return [heir]

    def forget(self, request: RequestId) -> None:
        """Forget a request that has ended: a follower that was still waiting, or a released request. Raises
        ProtocolError for a leader (release or hand over first) and for an unknown id."""
        if request in self._released:
            self._released.remove(request)
            return
        key = self._key_of.get(request)
        if key is None:
            raise ProtocolError(f"request {request} is in no flight")
        flight = self._flights[key]
        if flight.leader == request:
            raise ProtocolError(f"request {request} still leads a flight")
        del flight.followers[request]
        del self._key_of[request]
