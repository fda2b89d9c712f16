"""A plan that may be repeated is exact (rule 27): running its decodes `StepPlan.repeat` times before the next
plan gives the same events, pages and text as planning each time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotprefix.errors import RequestRejected
from hotprefix.kernel import events as ev
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import Capabilities, Eviction, Flight, Order, Publication, Refresh
from tests.support.drive import Driver

CONFIGS = st.fixed_dictionaries(
    {
        "publication": st.sampled_from(Publication),
        "flight": st.sampled_from(Flight),
        "order": st.sampled_from(Order),
        "eviction": st.sampled_from(Eviction),
        "refresh": st.sampled_from(Refresh),
        "refresh_every": st.sampled_from([1, 1, 3, 7]),
        "max_running": st.integers(1, 5),
        "max_batched_tokens": st.sampled_from([8, 13, 64]),
        "preemption": st.booleans(),
        "output_reserve": st.sampled_from([0.0, 0.3, 1.0]),
        "lookahead": st.sampled_from([0, 2]),
        "session_pages": st.sampled_from([0, 6]),
    }
)
ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 60), st.integers(0, 2), st.integers(1, 40), st.integers(1, 40), st.integers(0, 1),
        st.sampled_from([None, "s", "t"]),
    ),
    min_size=1,
    max_size=9,
)  # fmt: skip


class Program:
    """Runs one list of arrivals. many: repeat each step as often as it may be until the next arrival."""

    def __init__(self, config: dict[str, Any], pages: int, page: int, same: bool, many: bool) -> None:
        self.events: list[ev.Event] = []
        self.many = many
        self.longest = 1
        self.d = Driver(pages, page, Capabilities(same), self.events.append, **config)

    def run(self, arrivals: list[tuple[Any, ...]]) -> Program:
        d, todo = self.d, sorted(enumerate(arrivals), key=lambda a: a[1][0])
        while todo or d.kernel.has_work:
            while todo and todo[0][1][0] <= d.now:
                self._submit(*todo.pop(0))
            self._step(todo[0][1][0] if todo else 10**9)
        assert d.plan().empty  # what sessions hold ends at a plan
        d.kernel.check()
        return self

    def _submit(self, name: int, arrival: tuple[Any, ...]) -> None:
        _, base, length, outputs, priority, session = arrival
        prompt = [(7 * i + 31 * base) % 97 for i in range(length)]
        more = {"priority": priority, "session": session, "hold_s": 5.0}
        try:
            self.d.submit(f"r{name}", prompt, outputs, **more)
        except RequestRejected:
            return

    def _step(self, until: float) -> None:
        d = self.d
        plan = d.plan()
        if plan.empty:
            d.now += 1
            return
        times = min(plan.repeat, max(1, int(until - d.now))) if self.many else 1
        self.longest = max(self.longest, times)
        outcome = d.executor.run(plan, repeats=times)
        d.now += times
        for progress in d.kernel.commit(plan, outcome, d.now):
            if times > 1:
                d.outputs[progress.request] += tk.view(outcome.sampled[progress.request][:-4]).tolist()
            d._note(progress)
        d.kernel.check()

    def told(self) -> list[ev.Event]:
        return [e for e in self.events if not isinstance(e, ev.Stepped | ev.Stalled | ev.Published)]

    def published(self) -> list[tuple[str, int]]:
        """The published pages. A page that the last of many repeats completes is published when it is real,
        never as planned."""
        return [(e.request, e.pages) for e in self.events if isinstance(e, ev.Published)]

    def work(self) -> tuple[int, ...]:
        steps = [e for e in self.events if isinstance(e, ev.Stepped)]
        return sum(e.prefill_tokens for e in steps), sum(e.decode_tokens for e in steps)


@given(
    config=CONFIGS, arrivals=ARRIVALS, page=st.sampled_from([2, 8, 16]), tokens=st.integers(40, 300),
    same=st.booleans(),
)  # fmt: skip
def test_repeating_decodes_decides_nothing(
    config: dict[str, Any], arrivals: list[tuple[Any, ...]], page: int, tokens: int, same: bool
) -> None:
    once, many = (
        Program(config, max(1, tokens // page), page, same, many).run(arrivals) for many in (False, True)
    )
    assert once.told() == many.told()
    assert once.published() == many.published()
    assert once.work() == many.work()
    assert once.d.outputs == many.d.outputs
    many.d.assert_cold_equal()
    for name in ("steps", "retractions", "recomputed_tokens", "evicted_pages", "indexed_pages"):
        assert getattr(once.d.kernel.counters, name) == getattr(many.d.kernel.counters, name), name
    assert once.d.kernel.status() == many.d.kernel.status()


def test_long_answers_are_planned_once_a_page() -> None:
    program = Program({}, 64, 16, True, many=True).run([(0, 0, 20, 100, 0, None)])
    plans = [p for p in program.d.plans if p.chunks]
    assert [p.repeat for p in plans] == [1, 12, *([16] * 5), 7]
    assert program.longest == 16
    program.d.assert_cold_equal()


@pytest.mark.parametrize("order", [Order.FCFS, Order.LPM])
def test_a_page_that_lets_somebody_in_ends_the_repeats(order: Order) -> None:
    """A waiting request's prompt continues the text of the running request. When the running request's next
    page is complete, the waiting one fits; under `lpm` it then goes before another request, whose prompt does
    not match."""
    alone = Program({}, 64, 8, True, many=False).run([(0, 0, 8, 30, 0, None)])
    said = alone.d.prompts["r0"] + alone.d.outputs["r0"]
    other = [(31 * i + 5) % 97 for i in range(39)]
    admitted = []
    for many in (False, True):
        program = Program({"order": order, "lookahead": 0, "output_reserve": 0.0}, 5, 8, True, many)
        d = program.d
        d.submit("before", other[:8], 1)
        while d.now < 1:
            program._step(1)
        d.submit("first", said[:8], 30)
        while d.now < 4:
            program._step(4)
        if order is Order.LPM:
            d.submit("large", other, 1)
        d.submit("second", said[:38], 1)
        while d.kernel.has_work:
            program._step(10**9)
        admitted.append({e.request: e.now for e in program.events if isinstance(e, ev.Admitted)})
    assert admitted[0] == admitted[1]
    assert 4 < admitted[0]["second"] < 30


def test_repeats_do_not_put_off_a_preemption() -> None:
    """No slot is free, but when the reserve has decayed enough, the less important request gives way."""
    told = []
    for many in (False, True):
        config = {"order": Order.PRIORITY, "preemption": True, "max_running": 2, "output_reserve": 0.0}
        program = Program(config, 12, 16, True, many)
        d = program.d
        d.submit("stay", [1] * 3, 100, priority=0)
        d.submit("low", [2] * 5, 70, priority=1)
        while d.now < 5:
            program._step(5)
        d.kernel._s.reserve.fill()  # as after a retraction
        d.submit("head", [3] * 10, 90, priority=0)
        while d.kernel.has_work:
            program._step(10**9)
        told.append([(e.request, e.now) for e in program.events if isinstance(e, ev.Admitted | ev.Retracted)])
    assert told[0] == told[1]
    assert ("low", 8.0) in told[0]
