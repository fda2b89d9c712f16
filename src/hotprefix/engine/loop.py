"""The real driver: kernel, executor and text, one step at a time. Owns: `EngineLoop`.

Rules:
1. It is single-threaded. A step is plan, execute, commit, with nothing in between.
2. A stop (end token, stop string, complete grammar) is decided before the commit, so a stopped request
   computes nothing more, and nothing beyond the stop is ever published.
3. An exception inside a step fails that step, never the loop: the kernel retries the step's requests alone.
4. A request for which no token can be sampled ends with that error; the step counts for the others.
5. Each request gets exactly one delta with `finish`.
6. To the kernel, outputs that come with a request are the end of its prompt, so they are found in the cache
   and published like any prefix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from hotprefix.definitions import Slo
from hotprefix.engine.executor import Executor, StepResult, Unsampled
from hotprefix.engine.goodput import Goodput
from hotprefix.engine.l3_loop import HostMemory, Storage
from hotprefix.engine.link_totals import link_totals
from hotprefix.engine.live_request import LiveRequest, OutputText, output_limit
from hotprefix.engine.messages import (
    Delta,
    EngineInfo,
    EngineLoad,
    EngineStats,
    FlushReport,
    Generate,
    Insight,
    KVSnapshot,
)
from hotprefix.engine.observe import LINKS_S, Observer, Wall
from hotprefix.engine.paced.pace import PaceTotals
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.rates import Rates
from hotprefix.errors import InputError
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import KernelConfig
from hotprefix.kernel.events import Sink
from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.plan import Finish, Progress, StepOutcome, StepPlan
from hotprefix.kernel.request import Namespace, Request, RequestId

IDLE_WAIT_S = 0.005
DRAIN_S = 2.0


MakeText = Callable[[SamplingParams], OutputText]
Prepare = Callable[[SamplingParams], Callable[[], None] | None]
Replay = Callable[[RequestId, Sequence[int]], bool]


class _Spent:
    """Seconds since the engine's start, by activity."""

    __slots__ = ("commit_s", "execute_s", "plan_s", "prefill_busy_s", "refresh_s")

    def __init__(self) -> None:
        self.plan_s = self.execute_s = self.commit_s = self.refresh_s = self.prefill_busy_s = 0.0


class EngineLoop:
    """See the module's rules. clock: seconds, monotonic."""

    def __init__(
        self,
        config: KernelConfig,
        executor: Executor,
        info: EngineInfo,
        *,
        fingerprint: str,
        eos_ids: Collection[int],
        make_text: MakeText,
        sink: Sink | None = None,
        clock: Callable[[], float] = time.monotonic,
        host: HostMemory | None = None,
        storage: Storage | None = None,
        observer: Observer | None = None,
        prepare: Prepare = lambda params: None,
        replay: Replay = lambda request, outputs: False,
        slo: Slo | None = None,
        pace: PaceTotals | None = None,
    ) -> None:
        """Raises what the observer raises when it is opened.

        prepare: see the method.
        replay: takes outputs that come with a request into what sampling remembers of it; whether its grammar
        ends with them. By default sampling remembers nothing.
        sink: gets the kernel's events; the observer's sink is used instead if the observer wants events.
        observer: see observe.py.
        slo: objectives that requests are measured against; None = no objectives.
        pace: how an executor that only waits keeps its pace; None = it is none.
        """
        self.info = info
        if observer is not None and observer.wants_events:
            sink = observer.event
        self.kernel = Kernel(config, executor.capabilities, sink)
        self._executor = executor
        self._fingerprint = fingerprint
        self._eos = frozenset(eos_ids)
        self._make_text = make_text
        self._prepare = prepare
        self._replay = replay
        self._clock = clock
        self._host = host
        self._storage = storage
        self._live: dict[RequestId, LiveRequest] = {}
        self._ready: list[Delta] = []  # deltas that no step gives
        self._generated = 0
        self._rates = Rates()
        self._spent = _Spent()
        self._links_due = float("-inf")
        self._goodput = Goodput(slo, info.page_size) if slo is not None else None
        self._pace = pace
        self._incarnation = time.time_ns()
        if observer is not None:
            observer.opened(self.kernel, info, fingerprint, clock())
        self._watch = Wall(observer)

    @property
    def has_work(self) -> bool:
        """True while a step would do something or a delta waits to be taken."""
        return bool(self._live or self._ready or self.kernel.has_work)

    # -- requests ---------------------------------------------------------------------------------

    def prepare(self, message: Generate) -> Callable[[], None] | None:
        """Slow work that another thread may do before `submit`, which would otherwise do it itself. None if
        there is none."""
        return self._prepare(message.params)

    def submit(self, message: Generate) -> None:
        """Queue a request. Raises InputError (its settings), RequestRejected (it can never run) or QueueFull;
        nothing of it is kept then."""
        params = message.params
        params.check_vocab(self.info.vocab_size)
        if message.id in self._live:
            raise InputError(f"request id {message.id!r} is in use", param="id")
        max_tokens = output_limit(message, self.info)
        if message.outputs and params.prompt_logprobs is not None:  # they were computed with the outputs
            params = replace(params, prompt_logprobs=None)
        self._executor.start(message.id, message.prompt, params)
        now = self._clock()
        try:
            live = LiveRequest(message, self._make_text(params), now)
            given = self._given(live, max_tokens)
            if given and given[-1].finish is not None:
                self._executor.finish(message.id)
            else:
                request = self._request(message, max_tokens)
                arrived = now if message.arrived is None else min(message.arrived, now)
                self._watch.tell("submitted", request, arrived, now, message.trace)
                self._submit(request, arrived, now)
                self._live[message.id] = live
        except Exception:
            self._executor.finish(message.id)
            raise
        self._ready += given

    def _given(self, live: LiveRequest, max_tokens: int) -> list[Delta]:
        """The deltas of the outputs that came with a request. The last one has `finish` if the request ends
        with it."""
        message = live.message
        if not message.outputs:
            return []
        return live.replay(self._eos, max_tokens, ended=self._replay(message.id, message.outputs))

    def _submit(self, request: Request, arrived: float, now: float) -> None:
        if self._goodput is None:
            return self.kernel.submit(request, now)
        self._goodput.asked(request, arrived)
        try:
            self.kernel.submit(request, now)
        except Exception:
            self._goodput.refused(request.id)
            raise

    def _request(self, message: Generate, max_tokens: int) -> Request:
        wants_prompt_logits = message.params.prompt_logprobs is not None and not message.outputs
        return Request(
            id=message.id,
            tokens=tk.encode([*message.prompt, *message.outputs]),
            max_tokens=max_tokens - len(message.outputs),
            namespace=Namespace(model=self._fingerprint, salt=message.salt),
            priority=message.priority,
            reuse_limit=0 if wants_prompt_logits else None,
            session=message.session,
            hold_s=message.hold_s,
        )

    def abort(self, request_id: RequestId) -> None:
        """End a request; its terminal delta comes with the next `step`. Unknown ids are ignored: the
        request may have ended while the abort was on its way."""
        if request_id in self._live:
            self._abort(request_id, None)

    def _abort(self, request_id: RequestId, error: str | None) -> None:
        now = self._clock()
        progress = self.kernel.abort(request_id, now)
        if progress is not None:
            self._watch.tell("ended", progress, now)
            self._ready.append(self._close(progress, Finish.ABORT, error))

    # -- steps ------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """One forward pass, if any request can run. Returns the new deltas."""
        now = self._clock()
        for live in [q for q in self._live.values() if q.deadline is not None and now >= q.deadline]:
            self._abort(live.message.id, f"the deadline of {live.message.deadline} s has passed")
        deltas, self._ready = self._ready, []
        plan = self._plan()
        if plan.empty:
            if self._storage is not None:
                self._storage.touch(plan)
                self._storage.wait(0.0 if deltas else IDLE_WAIT_S)
            self._tell_links()
            return deltas
        self._note_admissions(plan)
        outcome = self._execute(plan)
        if self._storage is not None:
            self._storage.touch(plan)
        return deltas + self._commit(plan, outcome)

    def _commit(self, plan: StepPlan, outcome: StepOutcome) -> list[Delta]:
        now = self._clock()
        done = self.kernel.commit(plan, outcome, now, every=False)
        for progress in done:
            if progress.finish is not None:
                self._watch.tell("ended", progress, now)
        count = self.kernel.counters
        self._rates.note(now, count.cached_tokens, count.computed_prompt_tokens)
        self._watch.tell("changed", now)
        self._tell_links()
        self._spent.commit_s += self._clock() - now
        return self._deltas(plan, outcome, {progress.request: progress for progress in done})

    def _tell_links(self, *, last: bool = False) -> None:
        """Tell the observer what has passed over the links, at most every LINKS_S seconds. last: tell it in
        any case."""
        now = self._clock()
        if self._host is None or not self._watch.watched or (now < self._links_due and not last):
            return
        self._links_due = now + LINKS_S
        store = self._storage.stats() if self._storage is not None else None
        self._watch.tell("moved", link_totals(self.kernel.tier_counters[0], self._host.links, store), now)

    def _deltas(
        self, plan: StepPlan, outcome: StepOutcome, told: Mapping[RequestId, Progress]
    ) -> list[Delta]:
        """The step's deltas in the plan's order. told: the progress that the kernel reported; it reports none
        of a request that merely gained a token."""
        deltas = []
        for chunk in plan.chunks:
            progress = told.get(chunk.request)
            if progress is not None:
                deltas.append(self._delta(progress))
            elif chunk.samples and outcome.ok:
                self._generated += 1
                deltas.append(self._live[chunk.request].gained())
        return deltas

    def _plan(self) -> StepPlan:
        """Take in what L3 gave, make a plan, and start what the plan asks of L3."""
        if self._storage is not None and self._host is not None:
            self._storage.land(self.kernel, self._host, self._clock())
        now = self._clock()
        refreshed = self.kernel.refresh(now)
        begun = self._clock()
        if refreshed:
            self._spent.refresh_s += begun - now
        plan = self.kernel.plan(begun)
        self._spent.plan_s += self._clock() - now
        if self._storage is not None:
            self._storage.begin(plan)
        return plan

    def _note_admissions(self, plan: StepPlan) -> None:
        now = self._clock()
        for admission in plan.admissions:
            live = self._live[admission.request]
            if live.admitted is None:
                live.admitted = now

    def _execute(self, plan: StepPlan) -> StepOutcome:
        begun, copying = self._clock(), 0.0
        try:
            result = self._executor.execute(plan)
            copying = result.restore_s
        except Exception as error:
            return StepOutcome(ok=False, error=f"{type(error).__name__}: {error}")
        finally:
            took = self._clock() - begun
            self._spent.execute_s += took
            if any(chunk.prefill for chunk in plan.chunks):
                self._spent.prefill_busy_s += max(0.0, took - copying)
        return self._judge(result)

    def _judge(self, result: StepResult) -> StepOutcome:
        """Append what was sampled to each request's text, and decide which requests stop."""
        now = self._clock()
        for request, entries in result.prompt_logprobs.items():
            self._live[request].prompt_logprobs.extend(entries)
        tokens, stopped, failed = {}, set(), {}
        for request, sampled in result.sampled.items():
            if isinstance(sampled, Unsampled):
                failed[request] = sampled.error
                continue
            tokens[request] = sampled.token
            if self._live[request].take(sampled, self._eos, now):
                stopped.add(request)
        return StepOutcome(
            sampled=tokens, stopped=frozenset(stopped), restore_s=result.restore_s, failed=failed
        )

    # -- answers ----------------------------------------------------------------------------------

    def _delta(self, progress: Progress) -> Delta:
        self._generated += progress.token is not None
        if progress.finish is not None:
            return self._close(progress, progress.finish, progress.error)
        return self._live[progress.request].delta(progress)

    def _close(self, progress: Progress, finish: Finish, error: str | None) -> Delta:
        self._executor.finish(progress.request)
        live = self._live.pop(progress.request)
        if self._goodput is not None:
            self._goodput.ended(live, finish, progress.said, self._clock())
        return live.delta(progress, finish, error)

    # -- the cache as a whole ---------------------------------------------------------------------

    def flush_cache(self) -> FlushReport:
        """Make what L1 and L2 hold now invisible to later requests. Returns how much of it running requests
        still hold."""
        now = self._clock()
        report = self.kernel.flush(now)
        self._watch.tell("changed", now)
        page = self.info.page_size
        freed, kept = report.freed + report.host_freed, report.protected + report.host_protected
        return FlushReport(freed * page, kept * page, self.kernel.status().running, self._storage is not None)

    def close(self) -> None:
        """Close L3: pages on their way there get a moment, then the store's threads end. Records are written
        to their end."""
        if self._storage is not None:
            self._storage.drain(DRAIN_S)
        self._tell_links(last=True)
        if self._storage is not None:
            self._storage.close()
        self._watch.tell("close")

    def load(self) -> EngineLoad:
        (_, waiting), l1 = self.kernel.load, self.kernel.status(self._clock()).l1
        return EngineLoad(
            self._incarnation, waiting, *self.kernel.outstanding(), l1.free, l1.evictable, l1.owned,
            l1.protected, self._watch.kv_source(),
        )  # fmt: skip

    def kv_snapshot(self) -> KVSnapshot | None:
        """None without KV events."""
        found = self._watch.kv_snapshot()
        return None if found is None else KVSnapshot(self._incarnation, *found)

    def stats(self) -> EngineStats:
        status, count = self.kernel.status(self._clock()), self.kernel.counters
        l1 = status.l1
        return EngineStats(
            running=status.running,
            waiting=status.waiting + status.parked,
            total_pages=l1.total,
            free_pages=l1.free,
            owned_pages=l1.owned,
            evictable_pages=l1.evictable,
            protected_pages=l1.protected,
            page_size=self.info.page_size,
            queried_tokens=count.queried_tokens,
            cached_device=count.cached_tokens - count.cached_host_tokens - count.cached_storage_tokens,
            cached_host=count.cached_host_tokens,
            cached_storage=count.cached_storage_tokens,
            computed_tokens=count.computed_prompt_tokens,
            generated_tokens=self._generated,
            steps=count.steps,
            retractions=count.retractions,
            evicted_pages=count.evicted_pages,
            prompt_tokens=count.prompt_tokens,
            insight=self._insight(),
        )

    def _insight(self) -> Insight:
        kernel, now = self.kernel, self._clock()
        status = kernel.status(now)
        host, prefetch = kernel.tier_counters
        return Insight(
            parked=status.parked,
            tree_nodes=status.tree_nodes,
            namespaces=status.namespaces,
            fetches=status.fetches,
            l2=status.l2,
            groups=status.groups,
            throughput=self._rates.throughput(now),
            kernel=replace(kernel.counters),
            host=replace(host),
            prefetch=replace(prefetch),
            store=self._storage.stats() if self._storage is not None else None,
            links=replace(self._host.links) if self._host is not None else None,
            plan_s=self._spent.plan_s,
            execute_s=self._spent.execute_s,
            commit_s=self._spent.commit_s,
            refresh_s=self._spent.refresh_s,
            prefill_busy_s=self._spent.prefill_busy_s,
            queue=kernel.waiting(now),
            predictions=kernel.predictions.copy() if kernel.predictions is not None else None,
            fared=self._goodput.fared() if self._goodput is not None else None,
            observed=replace(self._watch.stats(), sink_failed=kernel.sink_failure),
            hottest=self._watch.hottest(now),
            pace=replace(self._pace) if self._pace is not None else None,
        )
