"""Which prefixes are hot: counted by a sliding window, compared with a count made the slow way."""

from __future__ import annotations

import random
from collections import Counter

from hotprefix.records.heat import MAX_PAGES, MAX_REQUESTS, WINDOW_S, Heat


def test_runs_end_where_the_number_of_requests_changes() -> None:
    heat = Heat(page_size=4)
    for chain in (["a", "b", "c"], ["a", "b", "c"], ["a", "b", "x", "y"], ["a", "b", "x", "y"], ["q"]):
        heat.add(chain, 1.0)
    assert [(h.name, h.parent, h.start, h.stop, h.requests) for h in heat.hottest()] == [
        ("b", -1, 0, 8, 4), ("c", 0, 8, 12, 2), ("y", 0, 8, 16, 2),
    ]  # fmt: skip
    assert [h.name for h in heat.hottest(most=1)] == ["b"]
    assert [h.name for h in heat.hottest(at_least=1)][-1] == "q"


def test_a_request_that_is_the_end_of_another_s_prefix_ends_a_run() -> None:
    heat = Heat(page_size=1)
    for chain in (["a", "b", "c"], ["a", "b", "c"], ["a"]):
        heat.add(chain, 1.0)
    assert [(h.name, h.stop, h.requests) for h in heat.hottest()] == [("a", 1, 3), ("c", 3, 2)]


def test_it_counts_as_a_slow_count_does_and_forgets_everything() -> None:
    r = random.Random(4)
    heat, asked, now = Heat(page_size=1), [], 0.0
    for _ in range(3 * MAX_REQUESTS):
        now += r.choice([0.0, 0.1, 1.0])
        chain = [f"{r.randrange(3)}"]
        while r.random() < 0.7:
            chain.append(f"{chain[-1]}{r.randrange(2)}")
        heat.add(chain, now)
        asked = [(t, c) for t, c in [*asked, (now, chain)] if t >= now - WINDOW_S][-MAX_REQUESTS:]
    slow = Counter(name for _, chain in asked for name in chain)
    found = heat.hottest(most=10**6, at_least=1)
    assert found
    for place, run in enumerate(found):
        assert run.requests == slow[run.name]
        assert run.stop == len(run.name)
        assert run.parent < place
        assert run.start == (found[run.parent].stop if run.parent >= 0 else 0)
    for name, count in slow.items():
        (one,) = [h for h in found if h.name.startswith(name) and h.start < len(name) <= h.stop]
        assert one.requests == count
    heat.expire(now + WINDOW_S + 1)
    assert heat.hottest(at_least=1) == ()
    assert heat._root.below == {}


def test_memory_is_bounded() -> None:
    heat = Heat(page_size=1)
    for number in range(2 * MAX_REQUESTS):
        heat.add([f"{number}.{page}" for page in range(MAX_PAGES + 100)], 0.0)
    assert len(heat._recent) == MAX_REQUESTS
    assert len(heat._root.below) == MAX_REQUESTS
    assert max(len(chain) for _, chain in heat._recent) == MAX_PAGES
