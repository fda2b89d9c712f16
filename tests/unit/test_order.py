"""Order policies: pure keys, one rule of ageing, and what they do to a queue."""

from __future__ import annotations

import random

import pytest

from hotprefix.kernel.config import Order
from hotprefix.kernel.sched.order import CACHE_AWARE, Candidate, arranged
from tests.support.drive import Driver


def order(policy: Order, *candidates: Candidate, max_overtakes: int = 99) -> list[int]:
    return [candidates[i].serial for i in arranged(policy, candidates, max_overtakes)]


def test_keys() -> None:
    a = Candidate(1, priority=2, overtaken=0, matched=0, remaining=50)
    b = Candidate(2, priority=1, overtaken=0, matched=32, remaining=90)
    c = Candidate(3, priority=1, overtaken=0, matched=16, remaining=10)
    assert order(Order.FCFS, c, a, b) == [1, 2, 3]
    assert order(Order.PRIORITY, c, a, b) == [2, 3, 1]
    assert order(Order.LPM, c, a, b) == [2, 3, 1]
    assert order(Order.SPF, c, a, b) == [3, 1, 2]


@pytest.mark.parametrize("policy", Order)
def test_equal_candidates_keep_their_arrival_order(policy: Order) -> None:
    candidates = [Candidate(n, 0, 0, matched=16, remaining=9, path=(4,)) for n in range(20)]
    random.Random(1).shuffle(candidates)
    assert order(policy, *candidates) == list(range(20))


def test_dfs_groups_what_shares_a_prefix_however_the_arrivals_are_interleaved() -> None:
    """Grouping that was only a tie-break on age never happened."""
    arrivals = [(1,), (2, 5), (1, 7), (2, 5), (1, 7), (2,), (1,), ()]
    got = order(Order.DFS, *(Candidate(n, 0, 0, path=p) for n, p in enumerate(arrivals)))
    assert got == [2, 4, 0, 6, 1, 3, 5, 7], "the heavier subtree first, deepest first within it"


def test_dfs_admits_a_group_together() -> None:
    """The same, through the kernel, at staggered times: what starts in one step shares its prefix."""
    d = Driver(400, 4, order=Order.DFS, max_running=4)
    left, right = [1] * 16, [2] * 16
    for prompt in (left, right):
        d.submit(f"warm{prompt[0]}", prompt, 1)
        d.run()
    d.submit("busy", [3, 3, 3], 30)
    for _ in range(3):
        d.step()
    for n in range(12):
        d.now += 0.002
        d.submit(f"{'lr'[n % 2]}{n}", [left, right][n % 2] + [50 + n], 1)
    steps = ["".join(a.request[0] for a in d.step().admissions) for _ in range(4)]
    assert sorted(steps) == ["lll", "lll", "rrr", "rrr"]


@pytest.mark.parametrize("policy", sorted(CACHE_AWARE))
def test_ageing_puts_the_overtaken_first(policy: Order) -> None:
    cold = Candidate(5, 0, overtaken=8, matched=0, remaining=999)
    older = Candidate(4, 0, overtaken=9, matched=0, remaining=500)
    hot = [Candidate(n, 0, 0, matched=160, remaining=1, path=(1,)) for n in range(10, 20)]
    assert order(policy, *hot, cold, older, max_overtakes=8)[:2] == [4, 5]
    assert order(policy, *hot, cold, max_overtakes=9)[-1] == 5


@pytest.mark.parametrize("policy", sorted(CACHE_AWARE))
@pytest.mark.parametrize("max_overtakes", [0, 3, 10])
def test_a_cold_request_waits_for_a_bounded_number_of_hot_ones(policy: Order, max_overtakes: int) -> None:
    """One slot, hot arrivals for ever."""
    d = Driver(200, 4, order=policy, max_running=1, max_overtakes=max_overtakes)
    hot = list(range(40))
    d.submit("warm", hot, 1)
    d.run()
    d.submit("running", [*hot, 7], 3)
    d.step()
    d.submit("cold", [77] * 60, 1)
    for n in range(60):
        d.submit(f"hot{n}", [*hot, n], 1)
        d.step()
        if "cold" in d.finish:
            break
    ahead = [name for name in d.finish if name.startswith("hot")]
    assert "cold" in d.finish
    assert len(ahead) <= max_overtakes
    if max_overtakes == 10:
        assert len(ahead) == 10, "until then the order has its way"


def test_lpm_and_spf_read_the_cache_at_admission_not_at_arrival() -> None:
    """The enqueue-time match is only an observation: what was warm and is evicted counts as cold."""
    for policy in (Order.LPM, Order.SPF):
        d = Driver(200, 4, order=policy, max_running=1)
        warm, other = [1] * 40, [2] * 44
        d.submit("warm", warm, 1)
        d.run()
        d.submit("running", [5, 6], 4)
        d.step()
        d.submit("b", [*other, 3], 1)
        d.submit("a", [*warm, *[4] * 6], 1)
        d.kernel.flush(d.now)
        d.submit("c", [3] * 30, 1)
        d.run()
        expected = ["b", "a", "c"] if policy is Order.LPM else ["c", "b", "a"]
        assert [n for n in d.finish if n in "abc"] == expected
        assert set(d.cached.values()) == {0}
