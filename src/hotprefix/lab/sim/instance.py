"""One kernel on the virtual clock. Owns: `Instance`, the virtual driver.

Rules:
1. The call order is that of the engine's loop (rule 1): deliver what has come (requests, pages from L3),
   plan, run, commit. Nothing is delivered inside a step.
2. A step takes the scheduler's time, its restores' and its forward pass's.
3. A plan that may be repeated is repeated until something has to be delivered: `disturb` ends the run
   with the repeat that is under way at that moment.

Example: a plan begins at 10.0 s, may run 5 times, and each run takes 0.2 s, so the run is to end at 11.0. At
10.3 a request arrives: the run ends at 10.4, after 2 repeats, and the request is delivered before the next
plan.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

from hotprefix.cost.features import features
from hotprefix.cost.model import CostModel
from hotprefix.errors import HotprefixError, QueueFull, RequestRejected
from hotprefix.fleet.records import WorkerReport
from hotprefix.kernel.config import KernelConfig
from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.plan import StepOutcome, StepPlan, Transcript
from hotprefix.kernel.request import Namespace, Request
from hotprefix.lab.sim.arrivals import Item
from hotprefix.lab.sim.block_prompts import sampled
from hotprefix.lab.sim.lower_tiers import HostSide
from hotprefix.lab.sim.pending import Pending
from hotprefix.lab.sim.replay_recorder import Recorder, Row, WindowRows

POLL_S = 0.005


class SimulationStuck(HotprefixError):
    """Nothing can run and nothing will come. That is a bug of ours; it is told instead of looping for
    ever."""


class Run:
    """A step in flight; times are seconds.

    plan: what it runs.
    begun: when it began.
    ends: when each repeat ends.
    count: how many repeats will be run.
    scheduler: the scheduler's time in each repeat.
    restore: the time of the plan's restores.
    """

    __slots__ = ("begun", "count", "ends", "plan", "restore", "scheduler")

    def __init__(
        self, plan: StepPlan, begun: float, ends: list[float], scheduler: float, restore: float
    ) -> None:
        self.plan, self.begun, self.ends, self.count = plan, begun, ends, len(ends)
        self.scheduler, self.restore = scheduler, restore

    @property
    def end(self) -> float:
        return self.ends[self.count - 1]


Ended = Callable[[Pending, float], None]
Schedule = Callable[[float, "Instance"], None]


class Instance:
    """See the module's rules.

    schedule: schedule(when, self) asks to be woken at that time.
    ended: called with each request's end: (request, time).
    stepped: called with the index and the time after each step.
    most: the most repeats of a plan.
    next_use: predicts in how many seconds a request's session will be back.
    """

    def __init__(
        self, index: int, config: KernelConfig, cost: CostModel, *, schedule: Schedule, ended: Ended,
        stepped: Callable[[int, float], None], recorder: Recorder, windows: WindowRows, host: HostSide,
        most: int, next_use: Callable[[Item], float | None],
    ) -> None:  # fmt: skip
        self.index = index
        self.kernel = Kernel(config, sink=recorder.sink, kinds=recorder.kinds)
        self._prices, self._schedule, self._ended, self._stepped = cost.prices, schedule, ended, stepped
        self._recorder, self.windows, self._host = recorder, windows, host
        self._most, self._next_use = most, next_use
        self._inbox: list[Pending] = []
        self._live: dict[str, Pending] = {}
        self._transcript = Transcript(self._said)
        self._poll = 0.0
        self.run: Run | None = None
        self._dead = False
        self._state: tuple[int, int, int, int, int, int, int] | None = None

    # -- what comes -------------------------------------------------------------------------------

    def arrive(self, request: Pending, now: float) -> None:
        """Take a request for this instance."""
        self._recorder.arrived(request.row)
        self._inbox.append(request)
        self._state = None
        self.disturb(now)

    def disturb(self, now: float) -> None:
        """Note that something is to be delivered: wake up, or end the present run early."""
        run = self.run
        if self._dead:
            return
        if run is None:
            self._schedule(now, self)
            return
        count = max(1, bisect_left(run.ends, now) + 1)
        if count < run.count:
            run.count = count
            self._schedule(run.end, self)

    def wake(self, now: float) -> None:
        """Go on at a moment that was asked for. If the run was shortened or has ended since, the call is
        ignored, or begins the next step."""
        if self._dead:
            return
        if self.run is not None:
            if now != self.run.end:
                return
            self._commit(self.run, now)
        self._start(now)

    # -- steps ------------------------------------------------------------------------------------

    def _start(self, now: float) -> None:
        self._state = None
        self._deliver(now)
        kernel = self.kernel
        if not kernel.has_work:
            return
        touched = kernel.counters.refresh_touches
        plan = kernel.plan(now)
        touched = kernel.counters.refresh_touches - touched
        self._host.begin(plan, now)
        if plan.empty:
            self._idle(plan, now)
            return
        self.run = self._timed(plan, now, touched)
        self._schedule(self.run.end, self)

    def _deliver(self, now: float) -> None:
        inbox, self._inbox = self._inbox, []
        for pending in inbox:
            item = pending.item
            request = Request(
                pending.name, pending.prompt.tokens, max(1, item.request.output_length),
                Namespace(model=item.request.namespace), item.request.priority,
                session=item.request.session, hold_s=item.request.hold_s, next_use_s=self._next_use(item),
            )  # fmt: skip
            try:
                self.kernel.submit(request, now)
            except (RequestRejected, QueueFull):
                self._recorder.rejected(pending.name)
                self._ended(pending, now)
                continue
            self._live[pending.name] = pending
        self._host.land(self.kernel, now)

    def _idle(self, plan: StepPlan, now: float) -> None:
        """Wait while nothing can run. Only pages from L3 can change that, or the end of the time for which a
        request waits for them. After the last request's end a plan may still mark pages in L3 as used; then
        nothing is left to be done."""
        if not self.kernel.has_work:
            return
        if not self._host.busy:
            raise SimulationStuck(f"instance {self.index} at {now} s: nothing can run, {plan.stall}")
        if self._poll <= now:
            self._poll = now + POLL_S
            self._schedule(self._poll, self)

    def _timed(self, plan: StepPlan, now: float, touched: int) -> Run:
        """The run of a plan, with the time that each repeat takes. touched: how many prefixes refresh touched
        while the plan was made. Each repeat pays for them again if refresh looks at the queue at every
        step."""
        prices, status = self._prices, self.kernel.load
        prefill, context, decodes, reach = features(plan.chunks)
        again = self.kernel.config.refresh_every == 1
        scheduler = prices.scheduler_s(*status, touched if again else touched / plan.repeat)
        # The time that all repeats have in common. Each repeat attends to one position more in every
        # sequence.
        same = prices.step_s(prefill, context, decodes, 0) if plan.chunks else 0.0
        per_position = prices.decode_context_s
        restore = self._host.restore_s(plan, now)
        at = now + restore
        ends = []
        for _ in range(min(plan.repeat, self._most)):
            at += scheduler + (same + per_position * reach)
            ends.append(at)
            reach += decodes
        return Run(plan, now, ends, scheduler, restore)

    def _commit(self, run: Run, now: float) -> None:
        self.run, count, live = None, run.count, self._live
        self._state = None
        outcome = StepOutcome(sampled=self._transcript, restore_s=run.restore, repeats=count)
        for progress in self.kernel.commit(run.plan, outcome, now, every=False):
            if progress.finish is not None:
                del self._recorder.rows[progress.request]
                self._ended(live.pop(progress.request), now)
        self.windows.step(
            self._recorder, self.kernel.counters, now, now - run.begun - run.restore - run.scheduler * count,
            run.scheduler * count, run.restore,
        )  # fmt: skip
        self._stepped(self.index, now)

    def _said(self, request: str, first: int, count: int) -> bytes:
        return sampled(self._live[request].prompt.outputs, first, count)

    # -- what it says, and how it ends ------------------------------------------------------------

    def report(self, now: float, life: int) -> WorkerReport:
        """How it is, as its last step and what has come since left it. life: its life's number. An instance
        to which nothing happens says the same again, without looking."""
        if self._state is None:
            status, l1 = self.kernel.load, self.kernel.status(now).l1
            tokens, decodes = self._recorder.outstanding()
            waiting = status[1] + len(self._inbox)
            self._state = (waiting, tokens, decodes, l1.free, l1.evictable, l1.owned, l1.protected)
        return WorkerReport(now, *self._state, incarnation=life)

    def die(self) -> list[Pending]:
        """Lose everything. Returns the requests that were here, in order of arrival."""
        self._dead, self.run = True, None
        left = [*self._live.values(), *self._inbox]
        self._live, self._inbox = {}, []
        self._recorder.rows.clear()
        return left

    def stop(self, now: float) -> list[Row]:
        """End the replay here. Repeats that have ended by now count; a step that has not ended does not.
        Returns the rows of the requests that have not ended, as far as they came."""
        run = self.run
        if run is not None and (count := bisect_right(run.ends, now)):
            run.count = count
            self._commit(run, run.end)
        for name in self._live:
            self._recorder.rows[name]["output_tokens"] = self.kernel.progress(name).outputs
        return list(self._recorder.rows.values())
