"""Which prefixes are asked for most, and who has them. Owns: `HotPrefix`, and `hottest`, which finds them.

Rules: only the first `PAGES` pages of the last `REQUESTS` prompts count. All work is done when it is asked
for; choosing does none of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from hotprefix.fleet.index import PageIndex
from hotprefix.fleet.inflight import PagesInFlight, shared
from hotprefix.fleet.members import Members
from hotprefix.fleet.records import Keys, Shelf

REQUESTS, PAGES = 1000, 256
COMPUTING, PRESUMED = "computing", "presumed"


class HotPrefix(NamedTuple):
    """A stretch of pages that equally many prompts begin with, behind that of its parent.

    key: of its last page, so it names everything up to there.
    parent: which of the list's earlier ones it goes on from; -1 = none.
    start, stop: its pages.
    requests: choices for prompts that have it; a request that went to a second worker counts twice.
    holders: each worker that has all of it, and where: l1, l2 or l3 as it told, `PRESUMED` if it computed it
    and tells nothing (or not yet), `COMPUTING` if it is about to.
    """

    key: int
    parent: int
    start: int
    stop: int
    requests: int
    holders: dict[str, str]


def hottest(
    index: PageIndex, flights: PagesInFlight, members: Members, most: int, at_least: int = 2
) -> list[HotPrefix]:
    """The prefixes of at least `at_least` prompts, the hottest first, at most `most`."""
    asked = [keys[:PAGES] for keys in islice(index.recent, REQUESTS)]
    found: list[HotPrefix] = []
    ranked = [(-len(group), 0, key, group, -1) for key, group in _parted(asked, 0)]
    heapq.heapify(ranked)
    while ranked and len(found) < most:
        negative, start, _, group, parent = heapq.heappop(ranked)
        if -negative < at_least:
            break
        prefix = _common(group, start + 1)
        stop = len(prefix)
        holders = _holders(prefix, index, flights, members)
        found.append(HotPrefix(prefix[-1], parent, start, stop, len(group), holders))
        for key, part in _parted(group, stop):
            heapq.heappush(ranked, (-len(part), stop, key, part, len(found) - 1))
    return found


def _common(prompts: list[Keys], low: int) -> Keys:
    """The pages that all of them begin with; `low` are known to be."""
    first, stop = prompts[0], len(prompts[0])
    for keys in prompts:
        if len(keys) < stop or keys[stop - 1] != first[stop - 1]:
            stop = shared(first, keys, low)
    return first[:stop]


def _parted(prompts: Iterable[Keys], at: int) -> Iterable[tuple[int, list[Keys]]]:
    """The prompts by their page at this position, those that end before it left out."""
    groups: dict[int, list[Keys]] = {}
    for keys in prompts:
        if len(keys) > at:
            groups.setdefault(keys[at], []).append(keys)
    return groups.items()


def _holders(prefix: Keys, index: PageIndex, flights: PagesInFlight, members: Members) -> dict[str, str]:
    found: dict[str, str] = {}
    for made, where in ((False, COMPUTING), (True, PRESUMED)):
        for booking in flights.find(prefix):
            if booking.made is made and shared(booking.keys, prefix) == len(prefix):
                found[booking.member.name] = where
    masks = index.holders(prefix[-1])
    for shelf in reversed(Shelf):
        for name, member in members.all.items():
            mask = member.mask | (members.store if member.profile.shared_l3 else 0)
            if masks[shelf] & mask:
                found[name] = shelf.name.lower()
    return found
