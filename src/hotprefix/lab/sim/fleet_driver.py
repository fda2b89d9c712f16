"""The fleet core on the virtual clock. Owns: `FleetDriver`, which tells the core what a router would hear,
when it would hear it, and hands its decisions on.

Rules:
1. The core hears of instances by their reports and their events only. Both come `staleness_s` late, and a
   share of the batches of events never comes. How a request goes on, and that an instance has died, is heard
   at once: its connections tell.
2. A batch that was lost leaves a gap in the numbers. The core asks for a replay, and the answer comes as late
   as everything else.
3. What an instance said in a life that has ended may still come while it is back; the
   core has to notice that it is old.
4. With one instance there is nothing to choose, so no keys are made and nothing is reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from random import Random
from typing import Any

from hotprefix.cost.model import Link
from hotprefix.fleet.fleet import Fleet
from hotprefix.fleet.records import (
    Batch,
    Decision,
    LinkSpeed,
    Profile,
    ReplayWanted,
    Seen,
    Shelf,
    Stage,
    WorkerReport,
)
from hotprefix.kernel.kernel import Kernel
from hotprefix.lab.sim.clock import ARRIVAL, NEWS, Clock
from hotprefix.lab.sim.page_keys import PageKeys, PageNews, StoreNews
from hotprefix.lab.sim.pending import Pending
from hotprefix.lab.sim.replay import Replay, Routing

KEPT = 10_000  # batches that an instance can send again, as in records/kvevents.py


class _Life:
    """One life of an instance, as its events tell it. number: grows from life to life. l1, l2: what comes to
    these and goes."""

    __slots__ = ("l1", "l2", "next", "number", "sent")

    def __init__(self, number: int, keys: PageKeys) -> None:
        self.number = number
        self.l1, self.l2 = PageNews(keys), PageNews(keys, Shelf.L2)
        self.next = 0
        self.sent: deque[Batch] = deque(maxlen=KEPT)


Serve = Callable[[int, Pending, Decision, float], None]
Refuse = Callable[[Pending, float], None]


class FleetDriver:
    """See the module's rules.

    profiles: of each instance.
    store: what comes to the shared store and goes.
    serve: serve(index, pending, decision, now) hands a request to an instance.
    refuse: refuse(pending, now): there was no instance for it in time.
    """

    def __init__(
        self, routing: Routing, profiles: Sequence[Profile], clock: Clock, seed: int, *, serve: Serve,
        refuse: Refuse,
    ) -> None:  # fmt: skip
        page_size = profiles[0].page_size
        self.fleet = Fleet(replace(routing.fleet, page_size=page_size), Random(f"draw {seed}").randrange)
        self.informed = len(profiles) > 1
        self.keys, self.store = PageKeys(page_size), StoreNews()
        self._profiles, self._clock, self._serve, self._refuse = profiles, clock, serve, refuse
        self._late, self._lost = routing.staleness_s, routing.lost_events
        self._luck = Random(f"lost {seed}")
        self._lives: dict[int, _Life] = {}
        self._born = 0
        self._held: dict[str, Pending] = {}
        self._sent: dict[str, Pending] = {}
        self._closed = False
        self._due: float | None = None

    @property
    def held(self) -> list[Pending]:
        """The requests that wait here for an instance."""
        return list(self._held.values())

    def close(self) -> None:
        """The replay has ended: the core hears nothing any more."""
        self._closed = True

    @property
    def facts(self) -> dict[str, Any]:
        """What the core itself counted: its counters, tokens by where hits went, tokens copied by reason, and
        the share of the plan's replicas that moved (None: no plan was made twice)."""
        fleet = self.fleet
        return {
            "counters": asdict(fleet.counters), "hits": asdict(fleet.hits),
            "copies": {str(reason): tokens for reason, tokens in fleet.copies.items()},
            "plan_moved_share": fleet.plan.moved_share,
        }  # fmt: skip

    # -- instances --------------------------------------------------------------------------------

    def join(self, index: int, kernel: Kernel, now: float) -> None:
        """An instance is there, with nothing in its cache."""
        self._born += 1
        life = self._lives[index] = _Life(self._born, self.keys)
        if self.informed:
            kernel.watch_pages(life.l1)
            kernel.watch_host_pages(life.l2)
        self.fleet.join(str(index), self._profiles[index], now, life.number)
        self._look(now)

    def leave(self, index: int, now: float) -> None:
        """An instance has died."""
        del self._lives[index]
        self.fleet.leave(str(index), now)

    def stepped(self, index: int, now: float) -> None:
        """An instance has ended a step: it tells which pages came and went."""
        if self._closed:
            return
        life = self._lives[index]
        changes = (*life.l1.take(), *life.l2.take(), *self.store.take())
        if not changes:
            return
        batch = Batch(life.next, changes, now, life.number)
        life.next += 1
        life.sent.append(batch)
        if not (self._lost and self._luck.random() < self._lost):
            self._later(index, lambda at: self._answer(index, self.fleet.events(str(index), batch, at)), now)

    def stored(self, index: int, name: bytes, page: int) -> None:
        """The shared store has taken a page of an instance's L2."""
        if self.informed:
            self.store.stored(name, self._lives[index].l2.key(page))

    def life(self, index: int) -> int:
        """The number of an instance's life; it grows from life to life."""
        return self._lives[index].number

    def report(self, index: int, report: WorkerReport, now: float) -> None:
        """An instance says how it is."""
        self._later(index, lambda at: self.fleet.report(str(index), report, at), now)

    def _later(self, index: int, hear: Callable[[float], None], now: float) -> None:
        """Let the core hear something of an instance, unless it is none of its workers by then."""

        def heard(at: float) -> None:
            if index in self._lives:
                hear(at)
                self._look(at)

        if self._late:
            self._clock.at(now + self._late, NEWS, heard)
        else:
            heard(now)

    def _answer(self, index: int, wanted: ReplayWanted | None) -> None:
        """Send again what the core lacks."""
        if wanted is None:
            return
        again = tuple(batch for batch in self._lives[index].sent if batch.number >= wanted.first)
        self._later(
            index, lambda at: self._answer(index, self.fleet.replayed(wanted, again, at)), self._clock.now
        )

    # -- requests ---------------------------------------------------------------------------------

    def submit(self, pending: Pending, now: float) -> None:
        """Find an instance for a request."""
        found = self.fleet.route(pending.asked, now)
        if isinstance(found, Decision):
            self._held.pop(pending.name, None)
            pending.sent, self._sent[pending.name] = now, pending
            self.fleet.progress(pending.name, Stage.SENT, now)
            self._serve(int(found.worker), pending, found, now)
        elif found.expired:
            self._held.pop(pending.name, None)
            self._refuse(pending, now)
        else:
            self._held[pending.name] = pending
        self._look(now)

    def first_token(self, name: str, now: float) -> None:
        """A request's prefill is done. Only the first time counts: a request may be computed again later."""
        pending = self._sent.pop(name, None)
        if pending is None or self._closed:
            return
        begun = pending.row["prefill_start_s"]
        cached = sum(pending.row[tier] or 0 for tier in ("cached_l1", "cached_l2", "cached_l3"))
        self.fleet.progress(name, Stage.FIRST_TOKEN, now, Seen(begun - pending.sent, now - begun, cached))

    def ended(self, pending: Pending, now: float) -> None:
        """A request has ended on its instance, or was refused there."""
        self._sent.pop(pending.name, None)
        if self._closed:
            return
        stage = Stage.ENDED if pending.row["outcome"] == "finished" else Stage.FAILED
        self.fleet.progress(pending.name, stage, now)
        self._look(now)

    def _look(self, now: float) -> None:
        """See to it that the requests held here are routed again when the core says so."""
        wake = self.fleet.wake_at() if self._held else None
        if wake is not None and (self._due is None or wake < self._due):
            self._due = max(wake, now)
            self._clock.at(self._due, ARRIVAL, self._again)

    def _again(self, now: float) -> None:
        if self._due is not None and now < self._due:
            return
        self._due = None
        for pending in self.held:
            self.submit(pending, now)
        self._look(now)


def profile(replay: Replay, index: int) -> Profile:
    """What the fleet is told of an instance when it joins."""
    config, cost, links = replay.kernel_of(index), replay.cost_of(index), replay.links_of(index)
    restore = links.restore if config.tiers is not None else None
    fetch = links.fetch if config.tiers is not None and config.tiers.storage else None
    return Profile(
        cost.prices, config.total_pages, config.page_size, config.max_batched_tokens, config.max_running,
        cost.kv_token_bytes, capacity=replay.worker(index).capacity, restore=_speed(restore),
        fetch=_speed(fetch), shared_l3=fetch is not None,
    )  # fmt: skip


def _speed(link: Link | None) -> LinkSpeed | None:
    return None if link is None else LinkSpeed(link.latency_s, link.bytes_per_s)
