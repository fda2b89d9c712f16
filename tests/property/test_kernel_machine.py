"""The whole kernel under any interleaving, against the uncached run: every policy, with submissions, aborts,
failures and flushes at any moment (rules 5 to 8)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotprefix.errors import ContextLengthExceeded, ProtocolError, QueueFull
from hotprefix.kernel.config import Capabilities, Eviction, Flight, Order, Publication, Refresh
from hotprefix.kernel.plan import Finish, StepPlan
from tests.support.drive import Driver
from tests.support.fake import cold_run
from tests.support.watch import FlushWatch, OnceWatch, PlanWatch

BASES = [[(7 * i + 31 * b) % 97 for i in range(70)] for b in range(3)]
SALTS = [None, "a", "b"]


class KernelMachine(RuleBasedStateMachine):
    """Draws a configuration, then operations on the kernel. fixed: settings that are not drawn."""

    fixed: dict[str, object] = {}  # noqa: RUF012
    watch_copies = False
    failures = True

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: StepPlan | None = None
        self.count = 0
        self.salts: dict[str, str | None] = {}

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        tokens=st.integers(80, 400),
        same_step=st.booleans(),
        config=st.fixed_dictionaries(
            {
                "publication": st.sampled_from(Publication),
                "flight": st.sampled_from(Flight),
                "order": st.sampled_from(Order),
                "eviction": st.sampled_from(Eviction),
                "refresh": st.sampled_from(Refresh),
                "max_running": st.integers(1, 8),
                "max_batched_tokens": st.sampled_from([8, 9, 13, 32, 57, 200]),
                "preemption": st.booleans(),
                "prefix_cache": st.sampled_from([True, True, True, False]),
                "output_reserve": st.sampled_from([0.0, 0.25, 1.0]),
                "max_overtakes": st.sampled_from([0, 2, 32]),
                "lookahead": st.sampled_from([0, 2, 8]),
                "session_pages": st.sampled_from([0, 8, 1000]),
                "max_waiting": st.sampled_from([0, 0, 6]),
            }
        ),
    )
    def build(self, page_size: int, tokens: int, same_step: bool, config: dict[str, object]) -> None:
        config = {**config, **self.fixed}
        able = Capabilities(same_step)
        self._watch(Driver(max(tokens // page_size, 1), page_size, able, **config), able)

    def _watch(self, driver: Driver, able: Capabilities) -> None:
        """What every machine of this kind drives, and who looks on."""
        self.d = driver
        self.watch = PlanWatch(driver, able)
        self.once = OnceWatch(driver)
        self.flushes = FlushWatch(driver)

    # -- requests ---------------------------------------------------------------------------------

    @rule(
        base=st.integers(0, len(BASES) - 1),
        cut=st.integers(1, 70),
        tail=st.lists(st.integers(0, 96), max_size=6),
        outputs=st.integers(1, 24),
        priority=st.integers(0, 2),
        salt=st.sampled_from([0, 0, 0, 1, 2]),
        limits=st.sampled_from([(None, None)] * 6 + [(0, None), (5, None), (None, 9), (20, 3)]),
        session=st.sampled_from([None, None, "s", "t"]),
    )
    def submit(
        self, base: int, cut: int, tail: list[int], outputs: int, priority: int, salt: int,
        limits: tuple[int | None, int | None], session: str | None,
    ) -> None:  # fmt: skip
        reuse, share = limits
        self._submit(
            BASES[base][:cut] + tail, outputs, SALTS[salt], priority=priority, reuse_limit=reuse,
            share_limit=share, session=session, hold_s=5.0,
        )  # fmt: skip

    @precondition(lambda self: self.d.finish)
    @rule(pick=st.integers(0, 1000), tail=st.lists(st.integers(0, 96), max_size=4), outputs=st.integers(1, 9))
    def submit_next_turn(self, pick: int, tail: list[int], outputs: int) -> None:
        ended = sorted(self.d.finish)
        name = ended[pick % len(ended)]
        self._submit(self.d.prompts[name] + self.d.outputs[name] + tail, outputs, self.salts[name])

    @precondition(lambda self: self.d.prompts)
    @rule(pick=st.integers(0, 1000), copies=st.integers(1, 4), outputs=st.integers(1, 9))
    def submit_again(self, pick: int, copies: int, outputs: int) -> None:
        names = sorted(self.d.prompts)
        name = names[pick % len(names)]
        for _ in range(copies):
            self._submit(self.d.prompts[name], outputs, self.salts[name])

    def _submit(self, prompt: list[int], outputs: int, salt: str | None, **more: object) -> None:
        name = f"r{self.count}"
        self.count += 1
        before = self.d.kernel.status()
        try:
            self.d.submit(name, prompt, outputs, salt, **more)
            self.salts[name] = self.once.salts[name] = salt
            self.once.limits[name] = (more.get("reuse_limit"), more.get("share_limit"))
        except ContextLengthExceeded:
            positions = len(prompt) + outputs - 1
            assert -(-positions // self.d.config.page_size) > self.d.config.total_pages
            assert self.d.kernel.status() == before
        except QueueFull:
            assert 0 < self.d.config.max_waiting <= before.waiting + before.parked
            # Either one was left behind by a plan, or those that are new are more than there are free slots.
            free = self.d.config.max_running - before.running
            assert self.d.plans or before.waiting + before.parked > free
            assert self.d.kernel.status() == before

    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        live = [name for name in self.d.prompts if name not in self.d.finish]
        if not live:
            with pytest.raises(ProtocolError):
                self.d.kernel.abort("nobody", self.d.now)
            return
        name = live[pick % len(live)]
        self.d.abort(name)
        self.watch.aborted(name)

    @rule()
    def flush(self) -> None:
        self.once.flushed()
        report = self.d.kernel.flush(self.d.now)
        self.flushes.flushed()
        l1 = self.d.kernel.status().l1
        assert l1.evictable == 0
        assert report.protected == l1.protected

    # -- steps ------------------------------------------------------------------------------------

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def plan(self) -> None:
        plan = self.d.plan()
        self.watch.planned(plan)
        self.flushes.planned(plan)
        if self.watch_copies:
            self.once.planned(plan, resident_only=self.d.kernel.counters.failed_steps > 0)
        self.in_flight = plan if plan.chunks else None

    @precondition(lambda self: self.in_flight is not None)
    @rule(fails=st.sampled_from([False] * 9 + [True]), loses=st.sampled_from([None] * 9 + [0, 1, 2]))
    def execute(self, fails: bool, loses: int | None = None) -> None:
        """Run the planned step. fails: the step fails. loses: the index of the request for which no token can
        be sampled; None: one can be for all."""
        assert self.in_flight is not None
        plan, self.in_flight = self.in_flight, None
        fails = fails and self.failures
        self.d.executor.fail_next = int(fails)
        lost = None if loses is None else plan.chunks[loses % len(plan.chunks)]
        self.d.executor.unsampled = set() if lost is None else {lost.request}
        self.d.execute(plan)
        if lost is not None and lost.samples and not fails:
            assert self.d.finish[lost.request] in (Finish.ERROR, Finish.ABORT)
        self.watch.committed(plan, not fails)

    @rule(steps=st.integers(1, 8))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            if self.in_flight is None:
                self.plan()
            if self.in_flight is not None:
                self.execute(False)

    # -- what always holds ------------------------------------------------------------------------

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "d"):
            return
        s, count = self.d.kernel._s, self.d.kernel.counters
        planned = sum(len(node.pages) for node in s.l1.tree._forest.planned)
        assert count.indexed_pages - count.evicted_pages == s.l1.tree.total_pages - planned
        if self.in_flight is None:
            self.d.kernel.check()

    def teardown(self) -> None:
        if not hasattr(self, "d"):
            return
        while self.in_flight is not None or self.d.kernel.has_work:
            self.go_on(1)
        d = self.d
        assert set(d.finish) == set(d.prompts), "each request ends exactly once"
        d.assert_cold_equal()
        self._counts()
        d.kernel._s.sessions.expire(1e9)
        d.kernel.check()
        l1 = d.kernel.status().l1
        assert (l1.protected, l1.owned) == (0, 0)
        d.kernel.flush(d.now)
        assert d.kernel.status().l1.free == l1.total
        assert d.kernel.status().namespaces == 0

    def _counts(self) -> None:
        d = self.d
        for name, finish in d.finish.items():
            assert 0 <= d.cached[name] < len(d.prompts[name])
            if finish is Finish.LENGTH:
                assert len(d.outputs[name]) >= 1
        count = d.kernel.counters
        assert count.finished + count.aborted + count.failed == count.submitted == len(d.finish)
        if not (count.retractions or count.aborted or count.failed):
            spent = sum(len(d.prompts[n]) + len(d.outputs[n]) - 1 for n in d.finish)
            assert count.cached_tokens + count.computed_prompt_tokens + count.computed_output_tokens == spent
            assert count.recomputed_tokens == 0


class CoalescedMachine(KernelMachine):
    """Each page is computed once as long as a copy exists, whatever is submitted, aborted or fails (rule
    28)."""

    fixed = {"flight": Flight.COALESCED, "prefix_cache": True, "preemption": False}  # noqa: RUF012
    watch_copies = True


QUICK = settings(max_examples=160, stateful_step_count=30)
DEEP = settings(max_examples=3000, stateful_step_count=60, derandomize=False)

TestKernel = KernelMachine.TestCase
TestKernel.settings = QUICK
TestCoalesced = CoalescedMachine.TestCase
TestCoalesced.settings = QUICK


@pytest.mark.slow
class TestKernelDeep(KernelMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = DEEP


@pytest.mark.slow
class TestCoalescedDeep(CoalescedMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = DEEP


def test_cold_run_is_the_oracle_for_every_prefix() -> None:
    """A test of the oracle itself: its outputs depend on every token before them."""
    prompt = BASES[0][:20]
    for at in range(20):
        other = [*prompt[:at], (prompt[at] + 1) % 97, *prompt[at + 1 :]]
        assert cold_run(prompt, 6) != cold_run(other, 6)
    assert replace(Driver().config, page_size=1).page_size == 1
