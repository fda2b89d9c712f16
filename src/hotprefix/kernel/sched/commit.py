"""Applying outcomes. Owns: what a step that ran, or failed, changes.

Rules:
1. Counts of reuse and computation grow here and nowhere else, once per executed position (docs/terms.md,
   *Figures*).
2. An abort that arrived during the step wins over the step's result (rule 26).
3. A failed step takes back everything that it planned. Its requests are retried alone, so a request that
   fails every time ends with an error and harms no other (rule 25).
"""

from __future__ import annotations

from hotprefix.errors import ProtocolError
from hotprefix.kernel import events as ev
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import Flight
from hotprefix.kernel.plan import Chunk, Finish, Progress, StepOutcome, StepPlan, Transcript, said
from hotprefix.kernel.sources import used
from hotprefix.kernel.state.estimates import Estimates
from hotprefix.kernel.state.scheduler_state import SchedulerState, progress_of
from hotprefix.kernel.state.sequence import Sequence

MIN_PREFILL = 64
PREFILL_SHARE = 0.9


class Committer:
    """Applies step outcomes to one state."""

    def __init__(self, state: SchedulerState) -> None:
        self._s = state
        self._page = state.config.page_size

    def commit(self, plan: StepPlan, outcome: StepOutcome, every: bool) -> tuple[Progress, ...]:
        """Apply an outcome and return the progress of its requests, in the plan's order. every: see
        `Kernel.commit`."""
        if not outcome.ok:
            return self._fail(plan, outcome.error or "the step failed")
        _check(plan, outcome)
        s = self._s
        s.step += outcome.repeats - 1  # each further run stands for a planning pass that decided nothing
        s.reserve.relax(outcome.repeats - 1)
        s.counters.indexed_pages += sum(len(node.pages) for node in s.l1.tree.settle())
        if s.tiers is not None:
            s.tiers.host.commit()
            self._learn(s.tiers.estimates, plan, outcome)
        progress, decodes = [], 0
        for chunk in plan.chunks:
            seq = s.sequences[chunk.request]
            if chunk.prefill:
                done = self._prefilled(seq, chunk, outcome)
            else:
                decodes += 1
                done = self._decoded(seq, outcome, every)
            if done is not None:
                progress.append(done)
        s.counters.computed_output_tokens += decodes * outcome.repeats
        self._count_step(plan, True, outcome.repeats)
        return tuple(progress)

    def _decoded(self, seq: Sequence, outcome: StepOutcome, every: bool) -> Progress | None:
        """A decode has gained one position with each repeat, and each of them sampled a token."""
        s, page, start, repeats = self._s, self._page, seq.computed, outcome.repeats
        seq.computed_total += repeats
        if seq.aborted or (outcome.failed and seq.request.id in outcome.failed):
            seq.computed = start + 1  # which tokens the further repeats computed is not known
            return self._cut_short(seq, outcome)
        stop = seq.computed = seq.highest = start + repeats
        finish = self._append_sampled(seq, outcome)
        if finish is not None:
            return s.end(seq, finish, tk.last(seq.last))
        if stop // page != start // page:
            self._publish(seq)
        if s.l1.groups:
            s.tables.windows.slide(seq, prompt_done=False)
        if s.suspects:
            self._trust(seq)
        return progress_of(seq, tk.last(seq.last)) if every else None

    def _prefilled(self, seq: Sequence, chunk: Chunk, outcome: StepOutcome) -> Progress | None:
        s = self._s
        self._count_prefill(seq, chunk.start, chunk.stop)
        seq.computed = chunk.stop
        done = not seq.prefilling
        if done:
            s.emit(ev.PrefillDone(s.now, seq.request.id, seq.cached, seq.computed_total))
        if seq.aborted or seq.request.id in outcome.failed:
            return self._cut_short(seq, outcome)
        token: int | None = None
        if chunk.samples:
            finish = self._append_sampled(seq, outcome)
            if seq.request.max_tokens:
                token = tk.last(seq.last)
            if seq.outputs == 1:
                s.emit(ev.FirstToken(s.now, seq.request.id))
            if finish is not None:
                return s.end(seq, finish, token)
        self._publish(seq)
        s.tables.windows.slide(seq, prompt_done=done)
        if done and s.config.flight is Flight.EXACT_PREFILL:
            s.release_flight(seq)
        self._trust(seq)
        return None if token is None else progress_of(seq, token)

    def _cut_short(self, seq: Sequence, outcome: StepOutcome) -> Progress:
        """End a request to which the step gives no token, because it was aborted or no token could be sampled
        for it."""
        if seq.aborted:
            return self._s.end(seq, Finish.ABORT)
        return self._s.end(seq, Finish.ERROR, error=outcome.failed[seq.request.id])

    def _append_sampled(self, seq: Sequence, outcome: StepOutcome) -> Finish | None:
        """Make known what the step sampled for a request. Returns why that ends it; None if it runs on."""
        request = seq.request
        if not request.max_tokens:
            return Finish.LENGTH
        seq.append(said(outcome.sampled, request.id, seq.outputs, outcome.repeats))
        if outcome.stopped and request.id in outcome.stopped:
            return Finish.STOP
        return Finish.LENGTH if seq.outputs >= request.max_tokens else None

    def _publish(self, seq: Sequence) -> None:
        s = self._s
        s.publish(seq, ended=False)
        if s.tiers is not None:
            s.tiers.published(seq)

    def _trust(self, seq: Sequence) -> None:
        """A suspect that got past the point of failure is trusted again."""
        if seq.computed >= seq.suspect_until and self._s.suspects.pop(seq.request.id, None) is not None:
            seq.failures = 0

    def _count_prefill(self, seq: Sequence, start: int, stop: int) -> None:
        s, count, taken = self._s, self._s.counters, seq.taken
        use = used(taken, start, stop, seq.highest, seq.request.prompt_len, seq.matched_at_enqueue)
        count.add(use)
        if use.reused:
            count.hits += not seq.cached
            seq.cached += use.reused
            seq.host += use.host
            seq.storage += use.storage
        seq.taken = []
        seq.computed_total += stop - start
        seq.recomputed += use.again
        seq.highest = max(seq.highest, stop)
        if not seq.executed:
            self._count_first_use(seq)
        if s.emit.wants(ev.Prefilled):
            s.emit(ev.Prefilled(s.now, seq.request.id, start, stop, tuple(taken), use))

    def _count_first_use(self, seq: Sequence) -> None:
        """A request's first prefill step has run, so its prompt and its look-up are counted now. A request
        that may take nothing from the cache has not looked it up."""
        count, tokens = self._s.counters, seq.request.prompt_len
        seq.executed = True
        count.prompt_tokens += tokens
        if self._s.config.prefix_cache and seq.request.reuse_limit != 0:
            count.lookups += 1
            count.queried_tokens += tokens

    def _learn(self, estimates: Estimates, plan: StepPlan, outcome: StepOutcome) -> None:
        """Let the estimates follow what steps really took. Only a step that is nearly all prefill (at least
        PREFILL_SHARE of its tokens, and MIN_PREFILL of them) tells the price of a prefill token."""
        s = self._s
        if plan.restores:
            estimates.restored(outcome.restore_s, len(plan.restores))
            s.emit(ev.RestoreDone(s.now, len(plan.restores), outcome.restore_s))
        prefill, total = _tokens(plan)
        if prefill >= MIN_PREFILL and prefill >= PREFILL_SHARE * total:
            estimates.computed(s.now - s.planned_at - outcome.restore_s, prefill)

    # -- failure ----------------------------------------------------------------------------------

    def _fail(self, plan: StepPlan, error: str) -> tuple[Progress, ...]:
        s = self._s
        if s.host is not None:
            s.host.fail()
        seqs = [s.sequences[chunk.request] for chunk in plan.chunks]
        for seq, chunk in zip(seqs, plan.chunks, strict=True):
            seq.suspect_until = max(seq.suspect_until, chunk.stop)
            s.retract(seq, f"step {plan.step} failed: {error}")
        # A request that took over planned pages but found no page for a chunk of its own loses these too.
        for seq in [q for q in s.running if q.pin.planned]:
            s.retract(seq, f"read pages of failed step {plan.step}")
        s.l1.pool.unindex(s.l1.tree.discard_planned())
        progress = []
        for seq in seqs:
            seq.failures += 1
            if seq.aborted:
                progress.append(s.end(seq, Finish.ABORT))
            elif seq.failures > s.config.max_step_failures:
                progress.append(s.end(seq, Finish.ERROR, error=error))
            else:
                s.suspects[seq.request.id] = seq
        self._count_step(plan, ok=False)
        return tuple(progress)

    def _count_step(self, plan: StepPlan, ok: bool, repeats: int = 1) -> None:
        s = self._s
        s.counters.steps += repeats
        s.counters.failed_steps += not ok
        if s.emit.wants(ev.Stepped):
            prefill, total = _tokens(plan)
            tree = s.l1.tree
            s.emit(
                ev.Stepped(
                    s.now, plan.step, ok, prefill, (total - prefill) * repeats, len(s.running),
                    len(s.queue) + s.parked, s.l1.pool.free, tree.evictable_pages, tree.protected_pages,
                )
            )  # fmt: skip


def _tokens(plan: StepPlan) -> tuple[int, int]:
    """The step's positions: (those of prefills, all)."""
    prefill = total = 0
    for chunk in plan.chunks:
        count = len(chunk.tokens) // tk.TOKEN_BYTES
        total += count
        if chunk.prefill:
            prefill += count
    return prefill, total


def _check(plan: StepPlan, outcome: StepOutcome) -> None:
    """Raise ProtocolError unless the outcome answers its plan: it ran as often as it may, and has as many
    tokens as were to be sampled."""
    if not 1 <= outcome.repeats <= plan.repeat:
        raise ProtocolError(f"step {plan.step} may run {plan.repeat} times, not {outcome.repeats}")
    if isinstance(outcome.sampled, Transcript):
        return
    told = outcome.sampled, outcome.failed
    missing = [c.request for c in plan.chunks if c.samples and not any(c.request in one for one in told)]
    if missing:
        raise ProtocolError(f"no sampled token for {', '.join(missing)}")
    if outcome.repeats == 1:
        return
    for request, sampled in outcome.sampled.items():
        if not isinstance(sampled, bytes) or len(sampled) != outcome.repeats * tk.TOKEN_BYTES:
            raise ProtocolError(f"request {request} needs {outcome.repeats} sampled tokens")
