"""The thrash scenario: what each refresh arm keeps for a request that waits, token by token.

A is cached and oldest, E is cached, newer and wanted by nobody in the queue. B runs in the only slot and
grows, so pages must go. C waits with A's prefix, D waits cold. Every number follows from page counts:
pages of 4 tokens, a pool that just holds all of it, eviction one page at a time from the tail of the least
recently used leaf. `window` and `queue_informed` are to lose E first; neither may delay anybody.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hotprefix.kernel import events as ev
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.config import Eviction, Order, Refresh
from hotprefix.kernel.request import Namespace
from tests.support.drive import Driver

PAGE = 4
A = list(range(32))  # 8 pages
E = list(range(50, 74))  # 6 pages
B = [90, 91, 92, 93]
COLD = [80] * 12
ARMS = (Refresh.OFF, Refresh.WINDOW, Refresh.QUEUE_INFORMED)


@dataclass(frozen=True)
class Result:
    """retained: tokens of C's enqueue-time hit left at its admission. other: what is left of E when B has
    ended. start_c, start_d: the steps in which the waiting ones start."""

    retained: int
    other: int
    start_c: int
    start_d: int


def thrash(
    refresh: Refresh,
    grow: int,
    pages: int = 16,
    cold_first: bool = False,
    hit: int = len(A),
    **config: object,
) -> Result:
    """B grows by `grow` pages while C, which wants `hit` tokens of A's prefix, and D wait."""
    events: list[ev.Event] = []
    d = Driver(pages, PAGE, sink=events.append, **({"max_running": 1, "refresh": refresh} | config))
    d.submit("a", A, 1)
    d.run().submit("e", E, 1)
    d.run().submit("b", B, 1 + PAGE * grow)
    d.step()
    waiting = [("c", [*A[:hit], 99]), ("d", COLD)]
    for name, prompt in reversed(waiting) if cold_first else waiting:
        d.submit(name, prompt, 1)
    while "b" not in d.finish:
        d.step()
    match = d.kernel._s.l1.tree.lookup(Namespace(), tk.encode(E), len(E) // PAGE)
    d.run().assert_cold_equal()
    admitted = {e.request: e for e in events if isinstance(e, ev.Admitted)}
    c, cold = admitted["c"], admitted["d"]
    assert c.matched_at_enqueue == hit
    assert d.cached["c"] == c.matched
    assert d.kernel.counters.lost_waiting_tokens == c.matched_at_enqueue - c.matched
    return Result(c.matched, match.pages * PAGE if match else 0, int(c.now), int(cold.now))


# Pool of 16: A 8 pages, E 6, B 1, one free. B's first growth takes that, each further one evicts one.
GROWTH = {
    # grow: (retained by C, left of E) with refresh off, and with either arm of it
    1: ((32, 24), (32, 24)),  # nothing has to go
    2: ((28, 24), (32, 20)),
    4: ((20, 24), (32, 12)),
    7: ((8, 24), (32, 0)),
    9: ((0, 24), (24, 0)),  # E alone is not enough: no pin, so A gives the rest
    15: ((0, 0), (0, 0)),  # B takes the whole pool: nothing to keep
}


@pytest.mark.parametrize("grow", GROWTH)
def test_retained_tokens_of_each_arm(grow: int) -> None:
    """Who wants them keeps them; what it costs the others is bounded by what it keeps; nobody starts
    later, the cold request included."""
    results = {arm: thrash(arm, grow) for arm in ARMS}
    off, on = GROWTH[grow]
    assert [(r.retained, r.other) for r in results.values()] == [off, on, on]
    assert len({(r.start_c, r.start_d) for r in results.values()}) == 1
    kept = {arm: r.retained - results[Refresh.OFF].retained for arm, r in results.items()}
    paid = {arm: results[Refresh.OFF].other - r.other for arm, r in results.items()}
    assert all(paid[arm] <= kept[arm] for arm in ARMS)


def test_without_pressure_refresh_changes_nothing() -> None:
    results = {thrash(arm, 4, pages=40) for arm in ARMS}
    assert [(r.retained, r.other) for r in results] == [(32, 24)]


def test_a_prefix_that_would_survive_anyway_gains_nothing() -> None:
    """E, the newer one, is what C wants: the oldest go first in every arm."""
    found = {arm: _wants_newer(arm) for arm in ARMS}
    assert set(found.values()) == {24}


def _wants_newer(refresh: Refresh) -> int:
    d = Driver(16, PAGE, max_running=1, refresh=refresh)
    d.submit("a", A, 1)
    d.run().submit("e", E, 1)
    d.run().submit("b", B, 1 + PAGE * 4)
    d.step()
    d.submit("c", [*E, 99], 1)
    d.run().assert_cold_equal()
    return d.cached["c"]


def test_the_unmatched_suffix_gains_nothing() -> None:
    """C wants 3 of A's 8 pages: the other 5 still go first, before the newer E."""
    assert [(r.retained, r.other) for r in (thrash(arm, 6, hit=12) for arm in ARMS)] == [
        (12, 24), (12, 24), (12, 24),
    ]  # fmt: skip
    assert [(r.retained, r.other) for r in (thrash(arm, 8, hit=12) for arm in ARMS)] == [
        (4, 24), (12, 16), (12, 16),
    ]  # fmt: skip


def test_only_the_window_is_refreshed() -> None:
    """With D ahead of C and a window of one, nobody speaks for A while B grows. D then takes 3 more;
    when it allocates, C has become the head, which `queue_informed` sees at once, `window` a pass later."""
    retained = [thrash(arm, 4, cold_first=True).retained for arm in ARMS]
    assert retained == [8, 32, 32]
    retained = [thrash(arm, 4, cold_first=True, refresh_window=1).retained for arm in ARMS]
    assert retained == [8, 8, 20]


@pytest.mark.parametrize(
    ("config", "window", "informed"),
    [
        ({"eviction": Eviction.LRU}, 32, 32),
        ({"eviction": Eviction.SLRU}, 32, 32),
        ({"eviction": Eviction.LFU}, 20, 32),
        ({"eviction": Eviction.FIFO}, 20, 32),
        ({"eviction": Eviction.PRIORITY}, 20, 32),
        ({"eviction": Eviction.SIEVE}, 20, 32),
        ({"eviction": Eviction.REUSE}, 32, 32),
        ({"order": Order.PRIORITY}, 32, 32),
        ({"order": Order.LPM}, 20, 32),
        ({"order": Order.SPF}, 8, 32),
        ({"order": Order.DFS}, 20, 32),
    ],
)
def test_where_each_arm_applies(config: dict[str, object], window: int, informed: int) -> None:
    """`window` moves recency, so it needs an eviction by recency, and an order blind to the cache;
    `queue_informed` tells the eviction itself."""
    off = 8 if config == {"order": Order.SPF} else 20  # D, the shorter one, is taken first there
    assert thrash(Refresh.OFF, 4, **config).retained == off
    assert thrash(Refresh.WINDOW, 4, **config).retained == window
    assert thrash(Refresh.QUEUE_INFORMED, 4, **config).retained == informed


# -- rule 31, literally --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refresh", "kept"), [(Refresh.OFF, 8), (Refresh.WINDOW, 16), (Refresh.QUEUE_INFORMED, 16)]
)
def test_waiting_queue_informed_lru(refresh: Refresh, kept: int) -> None:
    """Pool of 10: A 6 pages and oldest, D 2 unused and newer, B holds 2 and needs 4 more, C waits for A's.
    D goes first, then A: no pin, no deadlock."""
    d = Driver(10, PAGE, max_running=1, refresh=refresh)
    d.submit("a", A[:24], 1)
    d.run().submit("d", E[:8], 1)
    d.run().submit("b", [90] * 8, 17)
    d.step()
    d.submit("c", [*A[:24], 99], 1)
    while "b" not in d.finish:
        d.step()
    match = d.kernel._s.l1.tree.lookup(Namespace(), tk.encode(E[:8]), 2)
    assert (match.pages if match else 0) == (2 if refresh is Refresh.OFF else 0)
    d.run().assert_cold_equal()
    assert d.cached["c"] == kept


# -- where refresh hurts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refresh", "found"), [(Refresh.OFF, 24), (Refresh.WINDOW, 12), (Refresh.QUEUE_INFORMED, 12)]
)
def test_what_is_kept_for_one_that_leaves_is_lost_to_another(refresh: Refresh, found: int) -> None:
    """C gives up before its turn, so what was kept for it served nobody, and F, which was not yet in the
    queue, finds less of E: 3 pages, as many as C would have lost."""
    d = Driver(16, PAGE, max_running=1, refresh=refresh)
    d.submit("a", A, 1)
    d.run().submit("e", E, 1)
    d.run().submit("b", B, 1 + PAGE * 4)
    d.step()
    d.submit("c", [*A, 99], 1)
    while "b" not in d.finish:
        d.step()
    d.abort("c")
    d.submit("f", [*E, 99], 1)
    d.run().assert_cold_equal()
    assert d.cached["f"] == found
