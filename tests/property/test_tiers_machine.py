"""The tiers under any interleaving, against the uncached run: submissions, aborts, steps that fail, transfers
that come early, late, in part, never or twice, pages lost from the store, flushes (rules 6, 7 and 33 to
37)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotprefix.errors import ContextLengthExceeded
from hotprefix.kernel import events as ev
from hotprefix.kernel.config import (
    Capabilities,
    Eviction,
    Flight,
    Order,
    Prefetch,
    Publication,
    Refresh,
    TierConfig,
    Write,
)
from hotprefix.kernel.plan import Finish, StepPlan
from tests.support.drive import Driver
from tests.support.tier_watch import TierWatch
from tests.support.watch import FlushWatch

BASES = [[(7 * i + 31 * b) % 97 for i in range(60)] for b in range(2)]
NEVER = 1e18


class TierMachine(RuleBasedStateMachine):
    """Fetches end at once, soon, or only when a rule of this machine ends them."""

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: StepPlan | None = None
        self.count = 0
        self.gone: list[int] = []
        self.events: list[ev.Event] = []

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        tokens=st.integers(90, 300),
        host_tokens=st.sampled_from([1, 40, 100, 300, 1000]),
        same_step=st.booleans(),
        storage=st.sampled_from([(0, 0.0), (2, 1.0), (NEVER, 0.0), (NEVER, 1.0)]),
        config=st.fixed_dictionaries(
            {
                "publication": st.sampled_from(Publication),
                "flight": st.sampled_from(Flight),
                "order": st.sampled_from(Order),
                "eviction": st.sampled_from(Eviction),
                "refresh": st.sampled_from(Refresh),
                "refresh_window": st.sampled_from([1, 128]),
                "max_running": st.sampled_from([1, 2, 5]),
                "max_batched_tokens": st.sampled_from([8, 13, 200]),
                "preemption": st.booleans(),
                "session_pages": st.sampled_from([0, 8, 1000]),
            }
        ),
        tiers=st.fixed_dictionaries(
            {
                "storage": st.sampled_from([True, True, False]),
                "write": st.sampled_from(Write),
                "prefetch": st.sampled_from(Prefetch),
                "prefetch_timeout_s": st.sampled_from([0.0, 3.0, 300.0]),
                "min_restore_pages": st.sampled_from([1, 2]),
                "min_fetch_pages": st.sampled_from([1, 3]),
                "fetch_window": st.sampled_from([1, 8]),
                "compute_s_per_token": st.sampled_from([None, 0.1]),
                "fetch_s_per_page": st.sampled_from([None, None, 0.01, 10.0]),
            }
        ),
    )
    def build(
        self, page_size: int, tokens: int, host_tokens: int, same_step: bool, storage: tuple[float, float],
        config: dict[str, object], tiers: dict[str, object],
    ) -> None:  # fmt: skip
        pages = max(1, host_tokens // page_size)
        self.d = Driver(
            -(-tokens // page_size), page_size, Capabilities(same_step), self.events.append,
            tiers=TierConfig(pages=pages, **tiers), **config,  # type: ignore[arg-type]
        )  # fmt: skip
        self.d.storage_delay, self.d.storage_seconds = storage  # type: ignore[assignment]
        self.watch = TierWatch(self.d)
        self.flushes = FlushWatch(self.d)
        self._land, self.d.land = self.d.land, self._watched_land  # type: ignore[method-assign]

    # -- requests ---------------------------------------------------------------------------------

    @rule(
        base=st.integers(0, len(BASES) - 1),
        cut=st.sampled_from([1, 17, 40, 59, 60]),
        tail=st.lists(st.integers(0, 96), max_size=3),
        outputs=st.sampled_from([1, 2, 20]),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, None, "a"]),
        limits=st.sampled_from([(None, None)] * 6 + [(0, None), (5, None), (None, 9)]),
        session=st.sampled_from([None, "s"]),
    )
    def submit(
        self, base: int, cut: int, tail: list[int], outputs: int, priority: int, salt: str | None,
        limits: tuple[int | None, int | None], session: str | None,
    ) -> None:  # fmt: skip
        self._submit(
            BASES[base][:cut] + tail, outputs, salt, priority=priority, reuse_limit=limits[0],
            share_limit=limits[1], session=session, hold_s=5.0,
        )  # fmt: skip

    def _submit(self, prompt: list[int], outputs: int, salt: str | None = None, **more: object) -> None:
        name = f"r{self.count}"
        self.count += 1
        try:
            self.d.submit(name, prompt, outputs, salt, **more)
        except ContextLengthExceeded:
            assert self.d.config.total_pages * self.d.config.page_size < len(prompt) + outputs

    @precondition(lambda self: self.d.finish)
    @rule(pick=st.integers(0, 1000), copies=st.integers(1, 3), tail=st.booleans(), flush=st.booleans())
    def come_back(self, pick: int, copies: int, tail: bool, flush: bool) -> None:
        """Submit a prompt that was seen before, perhaps with its outputs, after L1 and L2 have lost it or
        not."""
        if flush:
            self.flush()
        ended = sorted(self.d.finish)
        for copy in range(copies):
            name = ended[(pick + copy // 2) % len(ended)]
            known = self.d.prompts[name] + (self.d.outputs[name] if tail else [])
            self._submit(known[:70], 2)

    @precondition(lambda self: self.d.kernel.status().waiting + self.d.kernel.status().running)
    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        live = [name for name in self.d.prompts if name not in self.d.finish]
        self.d.abort(live[pick % len(live)])

    @rule()
    def flush(self) -> None:
        report = self.d.kernel.flush(self.d.now)
        self.flushes.flushed()
        status = self.d.kernel.status()
        assert status.l1.evictable == 0
        assert report.protected == status.l1.protected
        assert status.l2 is not None
        assert status.l2.evictable == 0
        if self.in_flight is None and not status.running and not self.d.kernel._s.prefetch:
            assert status.l2.free == status.l2.total

    # -- steps ------------------------------------------------------------------------------------

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def plan(self) -> None:
        plan = self.d.plan()
        self.watch.planned(plan)
        self.flushes.planned(plan)
        self.gone += plan.cancels
        if plan.empty:
            self.d.now += 1.0
        else:
            self.in_flight = plan

    @precondition(lambda self: self.in_flight is not None)
    @rule(fails=st.sampled_from([False] * 5 + [True]))
    def execute(self, fails: bool) -> None:
        assert self.in_flight is not None
        plan, self.in_flight = self.in_flight, None
        self.d.executor.fail_next = int(fails)
        self.d.execute(plan)
        self.watch.executed(plan, not fails)
        self.watch.check_stored()

    @rule(steps=st.integers(1, 12))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            if self.in_flight is None:
                self.plan()
            if self.in_flight is not None:
                self.execute(False)

    # -- transfers --------------------------------------------------------------------------------

    def _watched_land(self, fetch: int, most: int | None = None) -> None:
        written: list[int] = []
        land, protected = self.d.executor.land, self.watch.protected()

        def note(page: int, payload: bytes) -> None:
            written.append(page)
            land(page, payload)

        self.d.executor.land = note  # type: ignore[method-assign]
        self._land(fetch, most)
        self.d.executor.land = land  # type: ignore[method-assign]
        self.watch.landed_on(written, protected)

    @precondition(lambda self: self.in_flight is None and self.d.fetches)
    @rule(pick=st.integers(0, 1000), most=st.sampled_from([None, None, None, 0, 1, 3]))
    def transfer_ends(self, pick: int, most: int | None) -> None:
        fetch = sorted(self.d.fetches)[pick % len(self.d.fetches)]
        self.d.land(fetch, most)
        self.gone.append(fetch)

    @precondition(lambda self: self.in_flight is None and self.gone)
    @rule(pick=st.integers(0, 1000), pages=st.integers(0, 5))
    def transfer_comes_late(self, pick: int, pages: int) -> None:
        fetch = self.gone[pick % len(self.gone)]
        assert not self.d.kernel.transfer_done(fetch, pages, 1.0, self.d.now)

    @precondition(lambda self: self.d.executor.stored)
    @rule(pick=st.integers(0, 1000), all_of_them=st.booleans())
    def store_loses_pages(self, pick: int, all_of_them: bool) -> None:
        stored = self.d.executor.stored
        for key in sorted(stored) if all_of_them else [sorted(stored)[pick % len(stored)]]:
            del stored[key]

    # -- what always holds ------------------------------------------------------------------------

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "d") or self.in_flight is not None:
            return
        self.d.kernel.check()
        prefetch = self.d.kernel._s.prefetch
        if prefetch is not None:
            assert prefetch._held <= prefetch._window
            waiting = {s.request.id for s in self.d.kernel._s.queue}
            for flight in prefetch._by_id.values():
                assert flight.waiters
                assert set(flight.waiters) <= waiting
            active = {f.id for f in prefetch._by_id.values() if not f.done}
            active -= {fetch.id for fetch in prefetch._starts}
            assert active <= set(self.d.fetches) <= active | set(prefetch._cancels)

    def teardown(self) -> None:
        if not hasattr(self, "d"):
            return
        d = self.d
        for _ in range(3000):
            if self.in_flight is None and not d.kernel.has_work:
                break
            if self.in_flight is None and d.fetches:
                self.transfer_ends(0, None)
            self.go_on(1)
        assert not d.kernel.has_work, "a request is stuck"
        assert set(d.finish) == set(d.prompts), "each request ends exactly once"
        d.assert_cold_equal()
        self.watch.check_counters()
        self._check_sources()
        self._check_all_returned()

    def _check_sources(self) -> None:
        """Each token has one source: the tokens from the three tiers and the computed ones add up to all
        tokens."""
        d, count = self.d, self.d.kernel.counters
        again = self.watch.restarted
        for name, finish in d.finish.items():
            device, host, storage = d.sources[name]
            assert min(device, host, storage) >= 0
            assert device + host + storage == d.cached[name]
            assert d.cached[name] < len(d.prompts[name])
            if finish is Finish.LENGTH and name not in again:
                assert d.cached[name] + d.computed[name] == len(d.prompts[name]) + len(d.outputs[name]) - 1
        sums = [sum(source[tier] for source in d.sources.values()) for tier in range(3)]
        assert [sum(sums), sums[1], sums[2]] == [
            count.cached_tokens, count.cached_host_tokens, count.cached_storage_tokens,
        ]  # fmt: skip
        ended = [e for e in self.events if isinstance(e, ev.Finished)]
        assert sum(e.cached for e in ended) == count.cached_tokens
        spent = count.computed_prompt_tokens + count.computed_output_tokens
        assert sum(e.computed for e in ended) == spent == sum(d.computed.values())

    def _check_all_returned(self) -> None:
        s = self.d.kernel._s
        s.sessions.expire(NEVER)
        self.d.kernel.check()
        l1, l2 = self.d.kernel.status().l1, self.d.kernel.status().l2
        assert l2 is not None
        assert (l1.protected, l1.owned, l2.protected, l2.owned) == (0, 0, 0, 0)
        if s.prefetch is not None:
            assert (s.prefetch._held, s.prefetch._by_id, s.prefetch._by_key) == (0, {}, {})
        self.d.kernel.flush(self.d.now)
        assert self.d.kernel.status().l1.free == l1.total
        assert s.host is not None
        assert s.host.tier.occupancy().free == l2.total


TestTiers = TierMachine.TestCase
TestTiers.settings = settings(max_examples=200, stateful_step_count=50)


@pytest.mark.slow
class TestTiersDeep(TierMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=3000, stateful_step_count=80, derandomize=False)
