"""Which workers serve which hot prefix. Owns: `Plan`, CacheRoute's placement (arXiv 2608.19677).

Rules:
1. A key is the page key at `anchor_pages`, of a shorter prompt its last one. Its rate is counted by period
   and smoothed.
2. Keys are admitted by rate until the fleet's slots are full. A key at rate r takes k = max(1, ceil(r / q))
   of them, q being a worker's mean capacity, and never more than there are workers.
3. Each worker begins with its share, by capacity, of the cold tail (the rate of what was not admitted). Then
   the replicas are placed, the heaviest first, each on the worker with the least load by its capacity that
   has a slot left.
4. Little movement: a replica stays where its key was if that is at most `keep` of the mean load above the
   least.
5. A hot request goes to the least loaded member of its key's set, a cold one to the less loaded of two drawn.
"""

from __future__ import annotations

import math

from hotprefix.fleet.config import PlanConfig
from hotprefix.fleet.members import Member
from hotprefix.fleet.records import Keys

SMOOTH = 0.5


class Plan:
    """See the module's rules.

    members: the workers of each admitted key. rebuilt: how many plans were made. placed, moved: replicas
    placed in all plans but the first, and those of them that were not where their key was before.
    """

    def __init__(self, config: PlanConfig) -> None:
        self._config = config
        self._rates: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._cold = 0
        self._since: float | None = None
        self.members: dict[int, tuple[str, ...]] = {}
        self.rebuilt = self.placed = self.moved = 0

    def anchor(self, keys: Keys) -> int | None:
        """The key that stands for a prompt; None for one without a complete page."""
        return keys[min(self._config.anchor_pages, len(keys)) - 1] if keys else None

    @property
    def moved_share(self) -> float | None:
        """Replicas that moved, of all that were placed again. None before the second plan."""
        return self.moved / self.placed if self.placed else None

    def count(self, keys: Keys, workers: list[Member], now: float) -> tuple[str, ...]:
        """A request has come. Returns its key's workers; none if it is cold. Makes a new plan if it is
        time."""
        if self._since is None:
            self._since = now
        if now - self._since >= self._config.period_s:
            self._rebuild(workers, now)
        anchor = self.anchor(keys)
        if anchor is None or (anchor not in self._counts and len(self._counts) >= self._config.keys):
            self._cold += 1
            return ()
        self._counts[anchor] = self._counts.get(anchor, 0) + 1
        return self.members.get(anchor, ())

    def _rebuild(self, workers: list[Member], now: float) -> None:
        seconds = now - (self._since or 0.0)
        fresh = SMOOTH if self._rates else 1.0
        rates = {key: rate * (1 - fresh) for key, rate in self._rates.items()}
        for key, count in self._counts.items():
            rates[key] = rates.get(key, 0.0) + fresh * count / seconds
        ordered = sorted(rates.items(), key=lambda item: (-item[1], item[0]))[: self._config.keys]
        cold, self._cold, self._counts, self._since = self._cold / seconds, 0, {}, now
        self._rates = dict(ordered)
        if workers:
            self._place(ordered, cold, {m.name: self._capacity(m) for m in workers})

    def _capacity(self, member: Member) -> float:
        return member.profile.capacity or self._config.capacity

    def _place(self, ordered: list[tuple[int, float]], cold: float, capacity: dict[str, float]) -> None:
        mean = sum(capacity.values()) / len(capacity)
        slots = dict.fromkeys(capacity, self._config.slots)
        replicas: list[tuple[float, int]] = []
        room = self._config.slots * len(capacity)
        for key, rate in ordered:
            count = min(max(1, math.ceil(rate / mean)), len(capacity))
            if count > room or rate <= 0:
                cold += rate
                continue
            room -= count
            replicas += [(rate / count, key)] * count
        total = sum(capacity.values())
        load = dict.fromkeys(capacity, cold / total)
        fleet_load = (cold + sum(rate for rate, _ in replicas)) / total
        before, self.members = self.members, {}
        placed: dict[int, list[str]] = {}
        for rate, key in sorted(replicas, key=lambda item: (-item[0], item[1])):
            taken = placed.setdefault(key, [])
            name = self._worker(before.get(key, ()), taken, slots, load, fleet_load * self._config.keep)
            if name is None:
                continue
            taken.append(name)
            slots[name] -= 1
            load[name] += rate / capacity[name]
            if self.rebuilt:
                self.placed += 1
                self.moved += name not in before.get(key, ())
        self.members = {key: tuple(names) for key, names in placed.items() if names}
        self.rebuilt += 1

    def _worker(
        self,
        before: tuple[str, ...],
        taken: list[str],
        slots: dict[str, int],
        load: dict[str, float],
        keep: float,
    ) -> str | None:
        """The worker for one more replica of a key; None if no slot is left for it."""
        free = [name for name in load if slots[name] > 0 and name not in taken]
        if not free:
            return None
        least = min(free, key=lambda name: (load[name], name))
        stay = [name for name in before if name in free and load[name] <= load[least] + keep]
        return min(stay, key=lambda name: (load[name], name)) if stay else least
