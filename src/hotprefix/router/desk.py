"""The fleet's second driver. Owns: `Desk`, which takes one pool's requests to its fleet and back.

Rules:
1. A ticket has one ending, whatever happens: `close` ends its booking or its wait, and may be called twice.
2. A choice is asked for and booked in one piece, without waiting in between; a ticket that waits is booked by
   whatever makes room, so its owner must close it even if it never saw the choice.
3. A request that comes while others wait queues behind them. One whose answer has begun does not, and is
   never refused for coming late.
4. A worker in trouble is avoided, never taken out of the fleet: its load and what it has cached stay known.
5. Everything is called in the router's event loop; the clock is read once a call.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Protocol

from hotprefix.fleet.config import FleetConfig
from hotprefix.fleet.fleet import Fleet
from hotprefix.fleet.records import Batch, Decision, ReplayWanted, RouteRequest, Seen, Stage, WorkerReport
from hotprefix.fleet.view import Draw
from hotprefix.router.hold import Hold, Rate
from hotprefix.router.prompt import Prompt
from hotprefix.router.tally import Tally
from hotprefix.router.ticket import Limits, Outcome, Ticket, nobody, overloaded, too_late
from hotprefix.server.errors import ApiError

RECENT = 200
LOOK_AGAIN_S = 0.25
_numbers = count(1)


class Log(Protocol):
    """Writes down what a desk does (route_log.py)."""

    def decided(self, ticket: Ticket, found: Decision) -> None: ...
    def ended(self, ticket: Ticket, outcome: Outcome, now: float) -> None: ...
    def refused(self, ticket: Ticket, reason: str, now: float) -> None: ...


class Desk:
    """See the module's rules.

    troubled: the workers that must not be chosen now. chosen: told of each choice; returns whether the
    request is the one that tries a worker which has failed. released: such a request is over. log: is told of
    every choice, what came of it, and refusals.
    fleet: read by those who show it.
    """

    def __init__(
        self, config: FleetConfig, limits: Limits, draw: Draw, troubled: Callable[[float], frozenset[str]],
        chosen: Callable[[str, float], bool], released: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic, log: Log | None = None,
    ) -> None:  # fmt: skip
        self.fleet = Fleet(config, draw)
        self.tally = Tally()
        self.recent: deque[Outcome] = deque(maxlen=RECENT)
        self._limits, self._clock, self._troubled = limits, clock, troubled
        self._chosen, self._released, self._log = chosen, released, log
        self._hold: Hold[Ticket] = Hold(limits.most)
        self._rate = Rate()
        self._under_way: dict[str, int] = {}
        self._since: dict[Ticket, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    # -- requests ---------------------------------------------------------------------------------

    def ticket(self, prompt: Prompt, tenant: str) -> Ticket:
        """A new request. Nothing is remembered of it before `place`."""
        request = RouteRequest(
            f"r{next(_numbers)}", prompt.keys, prompt.tokens, prompt.outputs, prompt.session, tenant
        )
        return Ticket(request, tenant, prompt.tokens + prompt.outputs)

    async def place(self, ticket: Ticket) -> Decision:
        """A worker for the request, which may wait for it. Raises ApiError 429 or 503."""
        now = ticket.since = self._clock()
        decision = self._ask(ticket, now) if ticket.begun or not self._hold.count else None
        if decision is not None:
            return decision
        if self._hopeless(ticket):
            raise self._nobody(ticket, now)
        ticket.answer = asyncio.get_running_loop().create_future()
        self._since[ticket] = now
        victim = self._hold.add(ticket, self._under_way.get(ticket.tenant, 0))
        self.tally.held += victim is not ticket
        if victim is not None:
            self._refuse(victim, now)
        self._pump()
        return await ticket.answer

    def place_now(self, ticket: Ticket) -> Decision | None:
        """A worker for the request if it need not wait for one."""
        ticket.since = self._clock()
        return None if self._hold.count else self._ask(ticket, ticket.since)

    def sent(self, ticket: Ticket) -> None:
        """The request goes out to its worker."""
        ticket.sent = self._clock()
        self.fleet.progress(ticket.id, Stage.SENT, ticket.sent)

    def first_token(self, ticket: Ticket, seen: Seen) -> None:
        """Its first token has come, or its whole answer (`Seen.whole`)."""
        if ticket.decision is None:
            return
        now = self._clock()
        self.fleet.progress(ticket.id, Stage.FIRST_TOKEN, now, seen)
        ticket.seen = seen
        if not seen.whole:
            ticket.first_s = now - ticket.sent
            self.tally.first_token(ticket.decision.parts.first, ticket.first_s)

    def close(self, ticket: Ticket, stage: Stage) -> None:
        """The request, or its stay with this worker, is over. A ticket may then be placed again."""
        now = self._clock()
        self._hold.remove(ticket)
        self._since.pop(ticket, None)
        if ticket.decision is None:
            self._waits_no_more(ticket, now)
            return
        self.fleet.progress(ticket.id, stage, now)
        if ticket.probe:
            self._released(ticket.decision.worker)
        outcome = Outcome(ticket.decision, stage, ticket.first_s, ticket.seen)
        self.recent.append(outcome)
        if self._log is not None:
            self._log.ended(ticket, outcome, now)
        self.tally.ended[stage] += 1
        if stage is Stage.ENDED:
            self._rate.ended(now)
        left = self._under_way[ticket.tenant] - ticket.tokens
        if left > 0:
            self._under_way[ticket.tenant] = left
        else:
            del self._under_way[ticket.tenant]
        ticket.decision = None
        self._pump()

    @property
    def held(self) -> int:
        """Requests that wait here."""
        return self._hold.count

    @property
    def oldest_wait_s(self) -> float | None:
        """None while none waits."""
        return self._clock() - next(iter(self._since.values())) if self._since else None

    @property
    def remembered(self) -> int:
        """Entries that belong to requests: 0 when none is under way."""
        return len(self._since) + len(self._under_way) + self._hold.count

    # -- what comes of workers --------------------------------------------------------------------

    def report(self, worker: str, make: Callable[[int], WorkerReport | None]) -> None:
        """What a worker said; then look whether requests that wait can go. make: gets the prompt tokens that
        are outstanding there by our own requests."""
        report = make(self.fleet.outstanding(worker))
        if report is not None:
            self.fleet.report(worker, report, self._clock())
        self._pump()

    def flushed(self, worker: str) -> None:
        """See `Fleet.flushed`."""
        if self._has(worker):
            self.fleet.flushed(worker, self._clock())

    def events(self, worker: str, batch: Batch) -> ReplayWanted | None:
        """See `Fleet.events`; likewise the next three. A worker that has left is passed over."""
        return self.fleet.events(worker, batch, self._clock()) if self._has(worker) else None

    def replayed(self, wanted: ReplayWanted, batches: tuple[Batch, ...]) -> ReplayWanted | None:
        return self.fleet.replayed(wanted, batches, self._clock())

    def replay_failed(self, wanted: ReplayWanted) -> ReplayWanted | None:
        return self.fleet.replay_failed(wanted, self._clock())

    def snapshot(self, worker: str, batch: Batch) -> ReplayWanted | None:
        return self.fleet.snapshot(worker, batch, self._clock()) if self._has(worker) else None

    def _has(self, worker: str) -> bool:
        return worker in self.fleet.members()

    # -- inside -----------------------------------------------------------------------------------

    def _ask(self, ticket: Ticket, now: float) -> Decision | None:
        """Ask the fleet. Raises ApiError 429 if no worker could be in time and that is to be refused."""
        avoid = self._troubled(now) | ticket.avoid if ticket.avoid else self._troubled(now)
        request = ticket.request
        if request.avoid != avoid:
            request = ticket.request = replace(request, avoid=avoid)
        found = self.fleet.route(request, now)
        if not isinstance(found, Decision):
            ticket.asked = not found.expired
            return None
        ticket.asked = False
        self._check_in_time(ticket, found, now)
        ticket.decision, ticket.sent, ticket.first_s, ticket.seen = found, now, None, None
        ticket.attempt += 1
        ticket.probe = self._chosen(found.worker, now)
        self._under_way[ticket.tenant] = self._under_way.get(ticket.tenant, 0) + ticket.tokens
        self.tally.decided(found)
        if self._log is not None:
            self._log.decided(ticket, found)
        return found

    def _check_in_time(self, ticket: Ticket, found: Decision, now: float) -> None:
        most = self._limits.refuse_above_s
        soonest = min(found.parts.first, *(each.parts.first for each in found.runners_up), found.parts.first)
        if not most or soonest <= most or ticket.begun:
            return
        self.fleet.progress(ticket.id, Stage.CANCELLED, now)
        self._refused(ticket, "too_late", now)
        raise too_late(soonest, most)

    def _pump(self) -> None:
        """Give workers to those that wait, and refuse those that have waited long enough."""
        if not self._hold.count:
            return
        now = self._clock()
        while self._since:
            ticket, since = next(iter(self._since.items()))
            if now - since < self._limits.hold_s:
                break
            self._refuse(ticket, now)
        while self._next(now):
            pass
        self._arm(now)

    def _next(self, now: float) -> bool:
        """Whether one of those that wait could go. If the first that has not failed anywhere cannot, the
        others cannot, either."""
        for ticket in self._hold.heads():
            if self._try(ticket, now):
                return True
            if not ticket.avoid:
                return False
        return False

    def _try(self, ticket: Ticket, now: float) -> bool:
        """Whether a ticket that waits needs to wait no more."""
        assert ticket.answer is not None
        try:
            decision = self._ask(ticket, now)
        except ApiError as error:
            self._settle(ticket)
            _set(ticket.answer, error)
            return True
        if decision is None:
            return False
        self._hold.served(ticket)
        self._since.pop(ticket, None)
        _set(ticket.answer, decision)
        return True

    def _settle(self, ticket: Ticket) -> None:
        self._hold.remove(ticket)
        self._since.pop(ticket, None)

    def _refuse(self, ticket: Ticket, now: float) -> None:
        assert ticket.answer is not None
        before = self._hold.count
        self._settle(ticket)
        self._waits_no_more(ticket, now)
        able = self._able(ticket)
        _set(ticket.answer, self._overload(ticket, before, now) if able else self._nobody(ticket, now))

    def _waits_no_more(self, ticket: Ticket, now: float) -> None:
        """The fleet forgets that it waits."""
        if ticket.asked:
            self.fleet.progress(ticket.id, Stage.CANCELLED, now)
            ticket.asked = False

    def _arm(self, now: float) -> None:
        """Look again when the fleet says so, when the first has waited long enough, and now and then, since a
        worker's trouble may end by time alone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._since:
            return
        until = next(iter(self._since.values())) + self._limits.hold_s
        wake = self.fleet.wake_at()
        soon = min(until, now + LOOK_AGAIN_S, until if wake is None or wake <= now else wake)
        self._timer = asyncio.get_running_loop().call_later(max(0.001, soon - now), self._pump)

    # -- refusals ---------------------------------------------------------------------------------

    def _able(self, ticket: Ticket) -> list[str]:
        """The workers that could take it, were they not full."""
        out = self._troubled(self._clock()) | ticket.avoid
        return [name for name, member in self.fleet.members().items()
                if name not in out and not member.draining]  # fmt: skip

    def _hopeless(self, ticket: Ticket) -> bool:
        """Every worker there is has failed it, so waiting would change nothing."""
        return bool(ticket.avoid) and self.fleet.members().keys() <= ticket.avoid

    def _refused(self, ticket: Ticket, why: str, now: float) -> None:
        self.tally.refused[why] += 1
        if self._log is not None:
            self._log.refused(ticket, why, now)

    def _overload(self, ticket: Ticket, before: int, now: float) -> ApiError:
        self._refused(ticket, "overload", now)
        return overloaded(before, self._rate.retry_after(before, self._limits.hold_s, now))

    def _nobody(self, ticket: Ticket, now: float) -> ApiError:
        self._refused(ticket, "no_worker", now)
        self._waits_no_more(ticket, now)
        return nobody(ticket.avoid)


def _set(answer: asyncio.Future[Decision], found: Decision | ApiError) -> None:
    """Tell the one that waits; it may have gone."""
    if answer.done():
        return
    if isinstance(found, ApiError):
        answer.set_exception(found)
        answer.exception()  # it is seen, even if its owner has gone
    else:
        answer.set_result(found)
