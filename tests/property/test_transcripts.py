"""A driver that gives a transcript gets the same plans, events, pages and text as one that reports the
tokens of each step.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hotprefix.errors import RequestRejected
from hotprefix.kernel import events as ev
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import Eviction, Flight, Order, Publication, TierConfig, Write
from hotprefix.kernel.plan import Progress, StepOutcome, Transcript
from tests.support.drive import Driver

BUDGET = 24
CONFIGS = st.fixed_dictionaries(
    {
        "publication": st.sampled_from(Publication),
        "flight": st.sampled_from(Flight),
        "order": st.sampled_from(Order),
        "eviction": st.sampled_from(Eviction),
        "preemption": st.booleans(),
        "output_reserve": st.sampled_from([0.0, 0.3, 1.0]),
        "lookahead": st.sampled_from([0, 2]),
        "tiers": st.sampled_from([None, None, TierConfig(pages=40, write=Write.THROUGH)]),
    }
)
ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 40), st.integers(0, 2), st.integers(1, 40), st.integers(1, 40), st.integers(0, 1)
    ),
    min_size=1,
    max_size=8,
)
# (the step, what happens, to which request). What happens: 0: an abort while the step is in flight; 1: an
# abort before it; 2: the step fails; 3: no token can be sampled.
EVENTS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3), st.integers(0, 7)), max_size=4)


class Program:
    """Runs arrivals and the events that happen to them, and notes all that a driver sees."""

    def __init__(self, config: dict[str, Any], pages: int, page: int) -> None:
        self.told: list[ev.Event] = []
        self.d = Driver(
            pages, page, sink=self.told.append, max_running=BUDGET, max_batched_tokens=BUDGET, **config
        )
        self.progress: list[tuple[Progress, ...]] = []
        self.sampled: dict[str, bytes] = {}

    def run(
        self, arrivals: list[tuple[int, ...]], happens: list[tuple[int, int, int]], stops: frozenset[int]
    ) -> Program:
        d, todo, step = self.d, sorted(enumerate(arrivals), key=lambda a: a[1][0]), 0
        while todo or d.kernel.has_work:
            while todo and todo[0][1][0] <= d.now:
                self._submit(*todo.pop(0))
            step += 1
            now = [(what, f"r{who}") for at, what, who in happens if at == step]
            self._abort(now, 1)
            plan = d.plan()
            if plan.empty:
                d.now += 1
                continue
            d.executor.fail_next = int(any(what == 2 for what, _ in now))
            d.executor.unsampled = {name for what, name in now if what == 3}
            outcome = self._outcome(plan, stops)
            self._abort(now, 0)
            d.now += 1
            self.progress.append(d.kernel.commit(plan, outcome, d.now))
            for progress in self.progress[-1]:
                d._note(progress)
            if step % 3 == 0:
                d.kernel.check()
        d.kernel.check()
        return self

    def _submit(self, name: int, arrival: tuple[int, ...]) -> None:
        _, base, length, outputs, priority = arrival
        prompt = [(7 * i + 31 * base) % 97 for i in range(length)]
        try:
            self.d.submit(f"r{name}", prompt, outputs, priority=priority)
        except RequestRejected:
            return

    def _abort(self, now: list[tuple[int, str]], when: int) -> None:
        for what, name in now:
            if what == when and name in self.d.kernel._s.sequences:
                self.d.abort(name)

    def _outcome(self, plan: Any, stops: frozenset[int]) -> StepOutcome:
        outcome = self.d.executor.run(plan, stops)
        for request, token in outcome.sampled.items():
            self.sampled[request] = self.sampled.get(request, b"") + tk.word(token)
        return outcome


class Knowing(Program):
    """A driver that knows the tokens beforehand."""

    def __init__(self, config: dict[str, Any], pages: int, page: int, known: Program) -> None:
        super().__init__(config, pages, page)
        self._known = iter(known.d.plans)
        self._transcript = Transcript(
            lambda r, first, count: known.sampled[r][4 * first : 4 * (first + count)]
        )

    def _outcome(self, plan: Any, stops: frozenset[int]) -> StepOutcome:
        d = self.d
        if d.executor.fail_next:
            d.executor.fail_next = 0
            return StepOutcome(ok=False, error="planned failure")
        ends = frozenset[str]()
        if stops:
            known = d.kernel._s.sequences
            ends = frozenset(
                c.request
                for c in plan.chunks
                if c.samples
                for said in [self._next(known, c.request)]
                if said in stops
            )
        sampling = {c.request for c in plan.chunks if c.samples} if d.executor.unsampled else set()
        failed = dict.fromkeys(sampling & d.executor.unsampled, "no token")
        return StepOutcome(sampled=self._transcript, stopped=ends - failed.keys(), failed=failed)

    def _next(self, known: Any, request: str) -> int:
        return tk.last(self._transcript.read(request, known[request].outputs, 1))


def _worded(progress: list[tuple[Progress, ...]]) -> list[list[Progress]]:
    """The progress with the same text for every error, because each driver words errors differently."""
    return [[p._replace(error=p.error and "error") for p in step] for step in progress]


@settings(deadline=None)
@given(
    config=CONFIGS, arrivals=ARRIVALS, happens=EVENTS, page=st.sampled_from([2, 4, 8, 16]),
    tokens=st.integers(60, 400), stops=st.sampled_from([frozenset(), frozenset(range(6))]),
)  # fmt: skip
def test_a_transcript_decides_nothing(
    config: dict[str, Any], arrivals: list[tuple[int, ...]], happens: list[tuple[int, int, int]], page: int,
    tokens: int, stops: frozenset[int],
) -> None:  # fmt: skip
    pages = max(1, tokens // page)
    plain = Program(config, pages, page).run(arrivals, happens, stops)
    other = Knowing(config, pages, page, plain).run(arrivals, happens, stops)
    assert other.told == plain.told
    assert _worded(other.progress) == _worded(plain.progress)
    assert other.d.plans == plain.d.plans
    assert other.d.kernel.counters == plain.d.kernel.counters
    assert other.d.kernel.status() == plain.d.kernel.status()
    assert other.d.outputs == plain.d.outputs
    plain.d.assert_cold_equal()
