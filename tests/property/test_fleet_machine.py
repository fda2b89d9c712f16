"""A fleet under any order of joins, drains, leaves, restarts, reports, choices and endings: who is chosen,
what is outstanding, and what is left; and what must hold between two fleets."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hotprefix.fleet.config import FleetConfig, Homes, PlanConfig, RoutingPolicy
from hotprefix.fleet.fleet import Fleet
from hotprefix.fleet.records import (
    Decision,
    Keys,
    LinkSpeed,
    Role,
    RouteRequest,
    Seen,
    Shelf,
    Stage,
    Wait,
)
from tests.support.fleet import profile, report

NAMES = ("a", "b", "c")
WHO = st.sampled_from(NAMES)
STEP = st.sampled_from([0.0, 0.0, 0.125, 0.5, 3.0, 11.0])
LINK = LinkSpeed(0.001, 1e5)
# Prompts as paths in a tree: a key covers everything before it.
PATHS = st.lists(st.integers(0, 1), max_size=6).map(
    lambda path: tuple(hash_free(tuple(path[: n + 1])) for n in range(len(path)))
)


def hash_free(path: tuple[int, ...]) -> int:
    number = 1
    for branch in path:
        number = 2 * number + branch
    return number


class FleetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now, self.number = 0.0, 0
        self.roles: dict[str, Role] = {}
        self.draining: set[str] = set()
        self.life = dict.fromkeys(NAMES, 0)
        self.alive: dict[str, Decision] = {}
        self.answered: set[str] = set()
        self.waiting: dict[str, RouteRequest] = {}

    @initialize(arm=st.sampled_from(RoutingPolicy), bound=st.sampled_from([0, 1, 3]), events=st.booleans())
    def build(self, arm: RoutingPolicy, bound: int, events: bool) -> None:
        plan = PlanConfig(period_s=1.0, anchor_pages=2, slots=2)
        config = FleetConfig(1, arm, bound=bound, plan=plan, hold_s=5.0, entries=20, presume_s=20.0)
        self.fleet = Fleet(config, random.Random(0).randrange)
        self.bound, self.has_events = bound, events

    def at(self, step: float) -> float:
        self.now += step
        return self.now

    def ended(self, id: str) -> None:
        self.alive.pop(id, None)
        self.answered.discard(id)

    # -- workers -----------------------------------------------------------------------------------

    @rule(name=WHO, role=st.sampled_from([Role.BOTH, Role.BOTH, Role.PREFILL, Role.DECODE]), step=STEP)
    def join(self, name: str, role: Role, step: float) -> None:
        if name not in self.roles:
            more = {"restore": LINK, "fetch": LINK, "pull": LINK, "hand_off": LINK, "role": role}
            self.fleet.join(
                name,
                profile(page_size=1, pages=50, max_running=4, events=self.has_events, **more),
                self.at(step),
            )
            self.roles[name] = role

    @rule(name=WHO, step=STEP)
    def drain(self, name: str, step: float) -> None:
        if name in self.roles:
            self.fleet.drain(name, self.at(step))
            self.draining.add(name)

    @rule(name=WHO, step=STEP)
    def leave(self, name: str, step: float) -> None:
        if name in self.roles:
            self.fleet.leave(name, self.at(step))
            self.life_ends(name)
            del self.roles[name]
            self.draining.discard(name)

    @rule(name=WHO, tokens=st.integers(0, 9), free=st.integers(0, 50), again=st.booleans(), step=STEP)
    def report(self, name: str, tokens: int, free: int, again: bool, step: float) -> None:
        if name in self.roles:
            told = self.fleet._members.all[name].told
            self.life[name] += again
            made = self.at(step) - 0.25
            self.fleet.report(
                name, report(made, tokens, free, owned=50 - free, incarnation=self.life[name]), self.now
            )
            if told is not None and told < self.life[name]:
                self.life_ends(name)

    def life_ends(self, name: str) -> None:
        for id, decision in list(self.alive.items()):
            prefills = decision.worker == name and id not in self.answered
            if prefills or decision.decode == name:
                self.ended(id)

    @rule(name=WHO, shelf=st.sampled_from(Shelf), keys=PATHS, gone=PATHS, step=STEP)
    def cached(self, name: str, shelf: Shelf, keys: Keys, gone: Keys, step: float) -> None:
        if name in self.roles:
            self.fleet.cached(name, shelf, self.at(step), keys, tuple(set(gone) - set(keys)))

    # -- requests ----------------------------------------------------------------------------------

    @rule(keys=PATHS, tail=st.integers(1, 3), session=st.sampled_from([None, "s", "t"]), avoid=WHO, step=STEP)
    def arrive(self, keys: Keys, tail: int, session: str | None, avoid: str, step: float) -> None:
        self.number += 1
        avoided = frozenset({avoid}) if self.number % 4 == 0 else frozenset()
        asked = RouteRequest(str(self.number), keys, len(keys) + tail, 2, session, avoid=avoided)
        self.at(step)
        self.route(asked)

    @rule(step=STEP)
    def wake(self, step: float) -> None:
        self.at(step)
        wake = self.fleet.wake_at()
        if wake is not None and wake <= self.now:
            for asked in list(self.waiting.values()):
                self.route(asked)
            wake = self.fleet.wake_at()
            assert wake is None or wake > self.now

    def route(self, asked: RouteRequest) -> None:
        answer = self.fleet.route(asked, self.now)
        self.waiting.pop(asked.id, None)
        able = {n for n in self.roles if n not in self.draining and n not in asked.avoid}
        prefills = {n for n in able if self.roles[n] is not Role.DECODE}
        decodes = {n for n in able if self.roles[n] is not Role.PREFILL}
        if isinstance(answer, Wait):
            idle = {n for n in prefills if n not in {d.worker for d in self.alive.values()}}
            idle -= {d.decode for d in self.alive.values()}
            assert not (idle and decodes)  # something is dispatched if a worker is idle
            if not answer.expired:
                self.waiting[asked.id] = asked
            else:
                assert not prefills or not decodes
            return
        assert answer.worker in prefills
        assert answer.decode in decodes
        assert (answer.decode == answer.worker) == (self.roles[answer.worker] is Role.BOTH)
        assert answer.incarnation == self.fleet._members.all[answer.worker].incarnation
        assert 0 <= answer.found.total <= min(answer.available, asked.prompt - 1)
        assert all(part >= 0 for part in answer.parts if part is not None)
        assert answer.peer is None or answer.peer in self.roles
        assert {up.worker for up in answer.runners_up} <= prefills - {answer.worker}
        self.alive[asked.id] = answer

    @rule(which=st.integers(0, 9), observed=st.sampled_from([None, Seen(), Seen(0.5, 0.25, 3)]), step=STEP)
    def first_token(self, which: int, observed: Seen | None, step: float) -> None:
        if self.alive:
            id = list(self.alive)[which % len(self.alive)]
            self.fleet.progress(id, Stage.FIRST_TOKEN, self.at(step), observed)
            self.answered.add(id)

    @rule(which=st.integers(0, 9), stage=st.sampled_from([Stage.SENT, Stage.ENDED, Stage.FAILED]), step=STEP)
    def go_on(self, which: int, stage: Stage, step: float) -> None:
        if self.alive:
            id = list(self.alive)[which % len(self.alive)]
            self.fleet.progress(id, stage, self.at(step))
            if stage is not Stage.SENT:
                self.ended(id)

    @rule(step=STEP)
    def give_up_waiting(self, step: float) -> None:
        if self.waiting:
            id = next(iter(self.waiting))
            del self.waiting[id]
            self.fleet.progress(id, Stage.CANCELLED, self.at(step))

    @rule()
    def all_end(self) -> None:
        for id in [*self.alive, *self.waiting]:
            self.fleet.progress(id, Stage.CANCELLED, self.now)
        self.alive, self.answered, self.waiting = {}, set(), {}
        self.at(60.0)
        self.fleet.loads(self.now)
        for name, work in self.fleet._bookings.work.items():
            assert work.wait(self.now) == 0.0, name
            assert (work.decoding, work.foreign_decodes) == (0, 0)
        assert (len(self.fleet._flights), len(self.fleet._homes._coming)) == (0, 0)
        assert not self.fleet._flights._positions

    # -- invariants --------------------------------------------------------------------------------

    @invariant()
    def just_the_requests_alive_are_remembered(self) -> None:
        self.fleet.check()
        assert self.fleet._bookings.all.keys() == self.alive.keys()
        assert self.fleet._waiting.keys() == self.waiting.keys()
        assert (self.fleet.wake_at() is None) == (not self.waiting)
        flights = self.fleet._flights
        under_way = [b for b in self.fleet._bookings.all.values() if not b.made]
        listed = [b for same in flights._by_first.values() for b in same]
        assert {b.request for b in under_way if b.first_new < len(b.keys)} <= {b.request for b in listed}
        made = sum(map(len, flights._made.values()))
        assert len(listed) == made + sum(b.first_new < len(b.keys) for b in under_way)

    @invariant()
    def outstanding_work_is_that_of_the_bookings(self) -> None:
        for name, work in self.fleet._bookings.work.items():
            own = [b for b in self.fleet._bookings.all.values() if b.member.name == name and not b.made]
            assert work.prefilling.keys() == {b.request for b in own}
            assert work.tokens == sum(b.tokens for b in own)
            assert work.seconds == pytest.approx(sum(b.seconds for b in own))
            assert work._before == pytest.approx(sum(b.seconds for b in own if b.seen))
            here = [b for b in self.fleet._bookings.all.values() if b.decoder.name == name]
            assert work.decoding == sum(b.made for b in here)
            assert work.pages == sum(b.pages for b in here if not b.seen_decode)


TestFleet = pytest.mark.timeout(200)(FleetMachine.TestCase)
TestFleet.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


# -- between two fleets ----------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=12)
Script = Callable[[Fleet], list[Decision | Wait]]


def script(prompts: list[Keys], ends: list[int], workers: int) -> Script:
    """Requests arrive each half second; some of them have ended by then."""

    def run(fleet: Fleet) -> list[Decision | Wait]:
        for number in range(workers):
            fleet.join(f"w{number}", profile(page_size=1), 0.0)
        answers: list[Decision | Wait] = []
        for number, keys in enumerate(prompts):
            now = number / 2
            answers.append(
                fleet.route(RouteRequest(str(number), keys, len(keys) + 5, session=f"s{number % 3}"), now)
            )
            for end in ends:
                if end == number:
                    fleet.progress(str(number // 2), Stage.FIRST_TOKEN, now, Seen(0.1, 0.2, 1))
                    fleet.progress(str(number // 2), Stage.ENDED, now)
                    fleet.cached(f"w{number % workers}", Shelf.L1, now, keys)
        return answers

    return run


@given(st.lists(PATHS, min_size=1, max_size=12), st.lists(st.integers(0, 11), max_size=5))
def test_with_one_worker_all_arms_are_equal(prompts: list[Keys], ends: list[int]) -> None:
    run = script(prompts, ends, 1)

    def outcome(arm: RoutingPolicy) -> list[object]:
        answers = run(Fleet(FleetConfig(1, arm), random.Random(0).randrange))
        return [(a.worker, a.found, a.parts, a.load) for a in answers if isinstance(a, Decision)]

    outcomes = [outcome(arm) for arm in RoutingPolicy]
    assert all(found == outcomes[0] for found in outcomes)


@given(st.integers(1, 4), st.integers(1, 30), st.lists(st.integers(0, 29), max_size=20), st.floats(0.0, 0.3))
def test_equal_workers_equal_lengths_and_no_sharing_make_predicted_choose_as_least_load(
    workers: int, count: int, ends: list[int], gap: float
) -> None:
    def workers_of(arm: RoutingPolicy) -> list[str]:
        fleet = Fleet(FleetConfig(1, arm, confirm_s=0.0))
        for number in range(workers):
            fleet.join(f"w{number}", profile(page_size=1), 0.0)
        chosen = []
        for number in range(count):
            keys = tuple(range(1000 * number, 1000 * number + 50))
            answer = fleet.route(RouteRequest(str(number), keys, 51), number * gap)
            assert isinstance(answer, Decision)
            chosen.append(answer.worker)
            for end in ends:
                if end == number and str(end // 2) in fleet._bookings.all:
                    fleet.progress(str(end // 2), Stage.FIRST_TOKEN, number * gap, Seen(0.0, 0.051, 0))
                    fleet.progress(str(end // 2), Stage.ENDED, number * gap)
        return chosen

    assert workers_of(RoutingPolicy.PREDICTED) == workers_of(RoutingPolicy.LEAST_LOAD)


@given(
    st.lists(PATHS, min_size=1, max_size=12), st.lists(st.integers(0, 11), max_size=5),
    st.sampled_from(RoutingPolicy), st.sampled_from(Homes),
)  # fmt: skip
def test_the_same_script_gives_equal_decisions(
    prompts: list[Keys], ends: list[int], arm: RoutingPolicy, homes: Homes
) -> None:
    run = script(prompts, ends, 3)
    one, two = (run(Fleet(FleetConfig(1, arm, homes=homes), random.Random(5).randrange)) for _ in range(2))
    assert one == two
    assert repr(one) == repr(two)


@given(LENGTHS, st.integers(2, 4))
def test_a_worker_that_is_k_times_as_quick_is_one_whose_prompts_are_k_times_shorter(
    lengths: list[int], factor: int
) -> None:
    def parts(token_s: float, times: int) -> list[float]:
        fleet = Fleet(FleetConfig(1))
        fleet.join("w", profile(token_s=token_s, page_size=1), 0.0)
        answers = [
            fleet.route(RouteRequest(str(n), (), tokens * times), 0.0) for n, tokens in enumerate(lengths)
        ]
        return [a.parts.first for a in answers if isinstance(a, Decision)]

    assert parts(0.001 * factor, 1) == pytest.approx(parts(0.001, factor))


@given(st.lists(PATHS, min_size=1, max_size=10), st.permutations(range(3)))
def test_the_names_of_workers_decide_nothing(prompts: list[Keys], order: list[int]) -> None:
    """Except for homes by hash: renamed workers are chosen alike."""

    def chosen(names: list[str]) -> list[int]:
        fleet = Fleet(FleetConfig(1))
        for name in names:
            fleet.join(name, profile(page_size=1), 0.0)
        answers = [fleet.route(RouteRequest(str(n), k, len(k) + 3), n / 10) for n, k in enumerate(prompts)]
        return [names.index(a.worker) for a in answers if isinstance(a, Decision)]

    assert chosen(["w0", "w1", "w2"]) == chosen([f"x{number}" for number in order])


@given(st.lists(PATHS, min_size=1, max_size=10), PATHS)
def test_more_pages_on_a_worker_never_make_its_first_token_later(prompts: list[Keys], more: Keys) -> None:
    def first(extra: Keys) -> float:
        fleet = Fleet(FleetConfig(1))
        fleet.join("w", profile(page_size=1), 0.0)
        for keys in prompts:
            fleet.cached("w", Shelf.L1, 0.0, keys)
        fleet.cached("w", Shelf.L1, 0.0, extra)
        answer = fleet.route(RouteRequest("a", prompts[0], len(prompts[0]) + 3), 0.0)
        assert isinstance(answer, Decision)
        return answer.parts.first

    assert first(more) <= first(())
