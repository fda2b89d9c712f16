"""Layer groups in the kernel: exactly which frames stay, what is reused of them, and what is refused (issue
3, *Sliding-window and hybrid states*). The text is always the uncached run's (tests/support/fake_groups.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from hotprefix.errors import ConfigError, ProtocolError
from hotprefix.kernel.cache.frames import FrameCount, Frames
from hotprefix.kernel.config import (
    Flight,
    KernelConfig,
    LayerGroup,
    Order,
    Publication,
    Refresh,
    TierConfig,
)
from tests.support.drive import Driver

PAGE, WINDOW = 4, 17  # 16 tokens back: four pages


def window(frames: int, size: int = WINDOW) -> LayerGroup:
    return LayerGroup(frames, size)


def text(seed: int, length: int) -> list[int]:
    return [(13 * seed + 7 * i + i * i * seed) % 97 for i in range(length)]


def driver(*groups: LayerGroup, pages: int = 400, **config: object) -> Driver:
    config = {"max_batched_tokens": 64, "max_running": 8, **config}
    return Driver(pages, PAGE, groups=groups, **config)


def frames(d: Driver, group: int = 0) -> FrameCount:
    return d.kernel.status().groups[group]


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    """Drivers whose every output is compared with the uncached run's at the end."""
    made: list[Driver] = []
    yield made
    for d in made:
        d.kernel.check()
        d.assert_cold_equal()


# -- retention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [True, False])
def test_a_long_session_keeps_one_window(drivers: list[Driver], full: bool) -> None:
    """Twelve turns of 50 tokens: each reuses all there was, from 10 frames where 150 pages were kept before;
    6 would do, but then a prefill chunk is a page or two at a time."""
    plain, small = driver(full=full), driver(window(10), full=full)
    for d in (plain, small):
        drivers.append(d)
        said: list[int] = []
        for turn in range(12):
            said = [*said, *text(turn, 40)]
            d.submit(f"t{turn}", said, 10)
            d.run()
            said = [*said, *d.outputs[f"t{turn}"]]
    reused = [0, 48, 96, 148, 196, 248, 296, 348, 396, 448, 496, 548]
    assert list(plain.cached.values()) == list(small.cached.values()) == reused
    assert plain.kernel.status().l1.evictable == small.kernel.status().l1.evictable == 149
    assert frames(small) == FrameCount(total=10, free=1, held=0, idle=9, evicted=140)


def test_a_request_far_longer_than_the_frames_runs(drivers: list[Driver]) -> None:
    d = driver(window(5), full=False)
    drivers.append(d)
    d.submit("a", text(1, 900), 20)
    d.run()
    assert len(d.outputs["a"]) == 20
    assert (
        max(sum(c.stop - c.start for c in plan.chunks) for plan in d.plans) == 20
    )  # five pages at first, then one at a time
    assert d.kernel.counters.retractions == 0


def test_passed_windows_go_before_ends(drivers: list[Driver]) -> None:
    """A, B and C end with 10 pages each, of which 4 are the window to go on from. With 23 frames all three
    keep that window while pages that windows passed are gone; a fourth costs the oldest its."""
    d = driver(window(23))
    drivers.append(d)
    for name in "abc":
        d.submit(name, text(ord(name), 38), 3)
        d.run()
    assert (frames(d).idle, frames(d).evicted) == (23, 7)
    for name in "abc":
        d.submit(f"{name}2", [*text(ord(name), 38), *d.outputs[name], 1, 2], 1)
        d.run()
    assert [d.cached[f"{name}2"] for name in "abc"] == [40, 40, 40]
    d.submit("d", text(ord("d"), 46), 3)
    d.run()
    for name in "bca":
        d.submit(f"{name}3", [*text(ord(name), 38), *d.outputs[name], 3, 4], 1)
        d.run()
    assert d.cached["b3"] == d.cached["c3"] == 40
    assert d.cached["a3"] == 0


def test_the_prompt_s_end_outlasts_what_decoding_passes(drivers: list[Driver]) -> None:
    """A second answer to the same prompt, after a long first one and a request that takes all frames that
    windows have passed, finds the window at the prompt's end."""
    d = driver(window(16))
    drivers.append(d)
    d.submit("a", text(1, 41), 60)
    d.run()
    assert frames(d).evicted > 0
    d.submit("other", text(2, 28), 1)
    d.run()
    d.submit("again", text(1, 41), 2)
    d.run()
    assert d.cached["again"] == 40


def test_eight_sessions_in_turn_keep_their_ends(drivers: list[Driver]) -> None:
    """Turns of 50 tokens, round robin: 64 pages of all layers keep nothing until a session's next turn; as
    many frames keep every session's end."""
    reused = []
    for groups, pages in (((), 64), ((window(64),), 1000)):
        d = driver(*groups, pages=pages, full=not groups)
        drivers.append(d)
        said: list[list[int]] = [[] for _ in range(8)]
        for turn in range(5):
            for s in range(8):
                said[s] = [*said[s], *text(8 * turn + s, 46)]
                d.submit(f"{s}.{turn}", said[s], 4)
                d.run()
                said[s] = [*said[s], *d.outputs[f"{s}.{turn}"]]
        reused.append(d.kernel.counters.cached_tokens)
    assert reused == [0, 8 * (48 + 96 + 148 + 196)]


def test_a_branch_hit_twice_outlasts_what_is_passed(drivers: list[Driver]) -> None:
    """The end of a common prefix is nobody's end. One request that goes on from there may be the session's
    own next turn; after a second, the window stays while that of a single hit is the first to go."""
    reused = []
    for hits in (1, 2):
        d = driver(window(30), max_batched_tokens=32)
        drivers.append(d)
        common = text(1, 40)
        d.submit("a", common + text(2, 30), 1)
        d.run()
        for i in range(hits):
            d.submit(f"b{i}", common + text(3 + i, 30), 1)
            d.run()
            assert d.cached[f"b{i}"] == 40
        d.submit("other", text(9, 80), 1)
        d.run()
        d.submit("c", common + text(7, 30), 1)
        d.run()
        reused.append(d.cached["c"])
    assert reused == [28, 40]


def test_a_short_prefix_loses_its_tail_first(drivers: list[Driver]) -> None:
    """Within the first window every page is needed, so what is left is a prefix, as in the tree."""
    d = driver(window(8))
    drivers.append(d)
    d.submit("a", text(1, 17), 1)
    d.run()
    d.submit("other", text(2, 24), 1)
    d.run()
    assert frames(d).evicted == 2
    d.submit("again", text(1, 17), 1)
    d.run()
    assert d.cached["again"] == 8


def test_a_hole_is_filled_by_who_computes_it_again(drivers: list[Driver]) -> None:
    """A's window pages are gone, its full-attention pages are not. B computes the prompt again: the tree
    keeps A's pages, which take over B's frames, so C reuses them."""
    d = driver(window(6), max_batched_tokens=16, publication=Publication.FINISH, flight=Flight.NONE)
    drivers.append(d)
    d.submit("a", text(1, 41), 1)
    d.run()
    d.submit("other", text(2, 61), 1)
    d.run()
    pages = d.kernel.status().l1.evictable
    d.submit("b", text(1, 41), 1)
    d.run()
    assert (d.cached["b"], d.kernel.status().l1.evictable) == (0, pages)
    assert d.kernel.counters.duplicate_pages == 10
    d.submit("c", text(1, 41), 1)
    d.run()
    assert d.cached["c"] == 40


def test_a_waiting_request_notices_a_new_branch(drivers: list[Driver]) -> None:
    """C's longest match ends in A's run, of which windows can use only the part up to the branch; while it
    waits, nothing changes but that another branch is added there."""
    d = driver(window(20), max_running=1, max_batched_tokens=16)
    drivers.append(d)
    for name, prompt in (
        ("a", text(1, 60)),
        ("b", text(1, 24) + text(2, 20)),
        ("b2", text(1, 24) + text(3, 20)),
    ):
        d.submit(name, prompt, 1)
        d.run()
    d.submit("unshared", text(9, 60), 1, share_limit=0)
    d.run()
    d.submit("x", text(1, 24) + text(4, 9), 1)
    d.submit("c", [*text(1, 60), 5], 1)
    waiting, before = d.kernel._s.sequences["c"], frames(d).evicted
    longest, _, usable = waiting.usable or (None, 0, None)
    assert [match and match.pages for match in (longest, usable)] == [15, 6]
    while "x" not in d.finish:
        d.step()
    assert frames(d).evicted == before
    d.run()
    assert d.cached["c"] == 24


# -- sharing and room -----------------------------------------------------------------------------


def test_requests_share_a_window_s_frames(drivers: list[Driver]) -> None:
    """Eight that go on from one prefix hold its four frames once, and one more each."""
    d = driver(window(13), flight=Flight.NONE)
    drivers.append(d)
    d.submit("a", text(1, 40), 1)
    d.run()
    for i in range(8):
        d.submit(f"b{i}", [*text(1, 36), 5, i], 6)
    d.step()
    assert [d.kernel._s.sequences[f"b{i}"].computed for i in range(8)] == [38] * 8
    assert frames(d).held == 5 + 8 - 1
    d.run()


def test_a_running_request_jumps_ahead(drivers: list[Driver]) -> None:
    """C overtakes B within the same prompt; B then takes over what C computed and lets its own window go."""
    d = driver(window(40), max_batched_tokens=32, order=Order.PRIORITY, preemption=True)
    drivers.append(d)
    d.submit("b", text(1, 100), 2, priority=2)
    d.step()
    d.submit("c", text(1, 100), 2, priority=0)
    d.run()
    assert (d.cached["c"], d.cached["b"]) == (32, 64)


@pytest.mark.parametrize("full", [True, False])
def test_more_requests_than_windows_take_turns(drivers: list[Driver], full: bool) -> None:
    """Each needs five frames: two at a time run in 12, though the pages would do for all."""
    d = driver(window(12), full=full)
    drivers.append(d)
    for i in range(6):
        d.submit(f"r{i}", text(i + 1, 60), 8)
    most = 0
    while d.kernel.has_work:
        d.step()
        most = max(most, d.kernel.status().running)
    assert (most, d.kernel.counters.retractions) == (2, 0)


def test_a_session_holds_its_last_window(drivers: list[Driver]) -> None:
    """Held frames outlive any pressure, until the time is up; without the hold they would be gone."""
    reused = []
    for hold in (100.0, 0.0):
        d = driver(window(12), session_pages=20)
        drivers.append(d)
        d.submit("a", text(1, 41), 1, session="s", hold_s=hold)
        d.run()
        assert frames(d).held == (4 if hold else 0)
        d.submit("big", text(2, 200), 2)
        d.run()
        d.submit("a2", text(1, 45), 1)
        d.run()
        reused.append(d.cached["a2"])
        d.now += 200
        d.submit("last", [1], 1)
        d.run()
        assert frames(d).held == 0
    assert reused == [40, 0]


@pytest.mark.parametrize(
    ("refresh", "reused"), [(Refresh.OFF, 0), (Refresh.WINDOW, 40), (Refresh.QUEUE_INFORMED, 40)]
)
def test_refresh_keeps_the_window_a_waiting_request_needs(
    drivers: list[Driver], refresh: Refresh, reused: int
) -> None:
    """A's end is oldest, two others' are newer. C, which goes on from A, waits for the only slot while B
    takes nine frames, one more than no window needs."""
    d = driver(window(20), max_running=1, refresh=refresh)
    drivers.append(d)
    for name, seed in (("a", 1), ("x", 2), ("y", 3)):
        d.submit(name, text(seed, 41), 1)
        d.run()
    d.submit("b", text(4, 36), 1)
    d.submit("c", text(1, 45), 1)
    d.run()
    assert d.cached["c"] == reused


# -- recurrent states -----------------------------------------------------------------------------


@pytest.mark.parametrize("full", [True, False])
def test_a_recurrent_state_is_one_checkpoint(drivers: list[Driver], full: bool) -> None:
    """A chunk stops at the prompt's last page boundary to leave one; later turns go on from it."""
    d = driver(LayerGroup(3), full=full)
    drivers.append(d)
    d.submit("a", text(1, 50), 1)
    d.run()
    assert [[(c.start, c.stop) for c in plan.chunks] for plan in d.plans if plan.chunks] == [
        [(0, 48)],
        [(48, 50)],
    ]
    assert frames(d) == FrameCount(total=3, free=2, held=0, idle=1, evicted=0)
    d.submit("b", [*text(1, 50), 3, 4], 1)
    d.run()
    assert d.cached["b"] == 48
    d.submit("short of it", text(1, 47), 1)
    d.run()
    assert d.cached["short of it"] == 0


def test_what_no_checkpoint_ends_is_not_read_in_the_same_step(drivers: list[Driver]) -> None:
    """A state exists only when its step has run: a second request with the same prompt waits for it."""
    d = driver(LayerGroup(4), full=False, publication=Publication.SCHEDULE)
    drivers.append(d)
    d.submit("a", text(1, 42), 2)
    d.submit("b", text(1, 42), 2)
    assert [c.request for c in d.step().chunks] == ["a"]
    d.run()
    assert (d.cached["a"], d.cached["b"]) == (0, 40)


def test_full_window_and_state_together(drivers: list[Driver]) -> None:
    """A hit needs all three: what one of them lacks is computed in all layers."""
    d = driver(window(30), LayerGroup(2))
    drivers.append(d)
    for turn in range(4):
        d.submit(f"t{turn}", text(1, 30 * (turn + 1)), 1)
        d.run()
    assert [d.cached[f"t{turn}"] for turn in range(4)] == [0, 28, 60, 88]
    d.submit("early", text(1, 32), 1)
    d.run()
    assert d.cached["early"] == 0  # its window's frames and pages are there, its state is not


# -- limits ---------------------------------------------------------------------------------------


def test_without_groups_nothing_is_given() -> None:
    d = driver()
    for i in range(4):
        d.submit(f"r{i}", text(i, 50), 9)
    d.run()
    assert all(plan.frames == () for plan in d.plans)
    assert d.kernel.status().groups == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: window(0), r"groups.frames=0: give"),
        (lambda: window(4, 0), r"groups.window=0: give"),
        (lambda: LayerGroup(True), r"groups.frames=True: give"),
        (lambda: LayerGroup(4, "3"), r"groups.window='3': give"),  # type: ignore[arg-type]
        (lambda: KernelConfig(9, 4, groups=(window(4),)), r"groups.frames=4: a window of 17 tokens needs 5"),
        (
            lambda: KernelConfig(9, 4, groups=(window(9),), tiers=TierConfig(pages=4)),
            r"L2 and L3 hold pages of all layers",
        ),
    ],
)
def test_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("size", "page", "reach", "first"),
    [
        (1, 4, 0, [0, 0, 1, 2]),
        (2, 4, 1, [0, 0, 0, 1]),
        (5, 4, 1, [0, 0, 0, 1]),
        (6, 4, 2, [0, 0, 0, 0]),
        (9, 1, 8, [0, 0, 0, 0]),
    ],
)
def test_what_a_window_looks_back_to(size: int, page: int, reach: int, first: list[int]) -> None:
    """first: of sequences with 0, 3, 4 and 8 positions computed."""
    group = Frames(LayerGroup(20, size), 10, page)
    assert group.reach == reach
    assert [group.first(computed) for computed in (0, 3, 4, 8)] == first


def test_accounts_that_do_not_balance_are_noticed() -> None:
    d = driver(window(12))
    d.submit("a", text(1, 41), 9)
    d.step()
    group = d.kernel._s.l1.groups[0]
    page = d.kernel._s.running[0].table[-1]
    for break_it, message in (
        (lambda g: g.hold([page]), "windows, the count says 2"),
        (lambda g: g._free.pop(), "frames leaked"),
        (lambda g: g._idle.popitem(), "idle frames"),
    ):
        saved = {name: _copy(getattr(group, name)) for name in ("_users", "_free", "_idle")}
        break_it(group)
        with pytest.raises(ProtocolError, match=message):
            d.kernel.check()
        for name, value in saved.items():
            setattr(group, name, value)
    d.kernel.check()
    with pytest.raises(ProtocolError, match="returned twice"):
        group.drop([399])
    assert dataclasses.is_dataclass(group.count())


def _copy(value: object) -> object:
    return value.copy()  # type: ignore[attr-defined]
