"""SIEVE and the reuse-aware key by example: which page goes first, and how time and uses change that."""

from __future__ import annotations

import pytest

from hotprefix.errors import RequestRejected
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.cache.expected_reuse import LAPSE, Expected
from hotprefix.kernel.config import Eviction, Flight, Publication
from tests.support.drive import Driver
from tests.unit.test_tree import NS, Cache

# -- sieve ----------------------------------------------------------------------------------------


def test_sieve_spares_what_was_used_and_takes_the_newest_before_it_comes_back() -> None:
    """The hand spares a in its first round. It takes e, which was published later, before it comes to a
    again. A queue that puts spared pages at its end (CLOCK) would take a before e."""
    c = Cache(Eviction.SIEVE)
    for page in "abcd":
        c.save(page)
    c.use("a")
    assert c.evict(1) == "b"
    c.save("e")
    assert c.evict(4) == "cdea"


def test_sieve_counts_a_use_once_however_often_it_happened() -> None:
    c = Cache(Eviction.SIEVE)
    for page in "abc":
        c.save(page)
    for _ in range(5):
        c.use("a")
    assert c.evict(3) == "bca"


def test_sieve_spares_again_what_was_used_again() -> None:
    c = Cache(Eviction.SIEVE)
    for page in "ab":
        c.save(page)
    for fresh in "cdef":
        c.use("a")
        c.use("b")
        c.save(fresh)
        assert c.evict(1) == fresh
    c.use("b")
    assert c.evict(2) == "ab"


def test_sieve_spares_for_a_whole_round_what_was_pinned_while_the_hand_came_by() -> None:
    c = Cache(Eviction.SIEVE)
    for page in "abc":
        c.save(page)
    pin = c.pin("a")
    c.use("b")
    assert c.evict(1) == "c"  # b is spared for the second round
    c.save("d")
    assert c.evict(1) == "d"
    c.use("b")
    c.save("e")
    assert c.evict(1) == "e", "and for the third"
    c.use("a")
    c.tree.unpin(pin)
    c.save("f")
    assert c.evict(3) == "fab"


def test_sieve_lets_what_lies_above_a_spared_page_wait_for_its_round() -> None:
    c = Cache(Eviction.SIEVE)
    c.save("pa")
    c.save("x")
    above, pin = c.match("p"), c.pin("x")
    assert above is not None
    c.tree.touch(above)
    c.use("pa")
    assert c.evict(1) == "a", "in the second round"
    c.tree.unpin(pin)
    assert c.evict(2) == "xp", "x was pinned in the first"


def test_sieve_does_not_see_a_touch() -> None:
    c = Cache(Eviction.SIEVE)
    for page in "ab":
        c.save(page)
    match = c.match("a")
    assert match is not None
    c.tree.touch(match)
    assert c.evict(2) == "ab"


# -- reuse: the key -------------------------------------------------------------------------------


class Foreseen(Cache):
    """A tree with a clock. `save` may say when the next use of the pages is expected."""

    def __init__(self) -> None:
        super().__init__(Eviction.REUSE)
        self.now = 0.0

    def back_in(self, pages: str, wait: float) -> None:
        handle = self.grow(self.tree.pin_root(NS), pages)
        self.tree.expect(handle, Expected.after(self.now, wait))
        self.tree.unpin(handle)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.tree.lapse(self.now)


def test_whom_nobody_expects_goes_first_then_who_is_expected_last() -> None:
    c = Foreseen()
    c.back_in("a", 9)
    c.save("b")
    c.back_in("c", 97)
    c.back_in("d", 30)
    c.save("e")
    assert c.evict(5) == "becda"


def test_without_expectations_it_is_lru() -> None:
    c = Foreseen()
    for page in "abc":
        c.save(page)
    c.use("a")
    assert c.evict(3) == "bca"


def test_equal_expectations_go_by_recency() -> None:
    c = Foreseen()
    for page in "abc":
        c.back_in(page, 9)
    match = c.match("a")
    assert match is not None
    c.tree.touch(match)
    assert c.evict(3) == "bca"


def test_an_expectation_lapses_at_a_multiple_of_the_wait_and_not_before() -> None:
    c = Foreseen()
    c.back_in("a", 10)
    c.back_in("b", 1000)
    c.pass_time(LAPSE * 10 - 1)
    assert c.evict(0) == ""
    c.back_in("x", 1e6)
    assert c.evict(1) == "x"
    c.pass_time(1)
    c.save("y")
    assert c.evict(3) == "ayb", "a expects nobody any more and is older than y"


def test_the_use_that_was_expected_ends_the_expectation() -> None:
    c = Foreseen()
    c.back_in("a", 1)
    c.back_in("b", 50)
    c.use("a")
    assert c.evict(2) == "ab"


def test_a_use_that_ends_elsewhere_answers_nothing() -> None:
    c = Foreseen()
    c.back_in("ab", 1)
    c.back_in("c", 50)
    c.use("a")
    assert c.evict(3) == "cba"


def test_publishing_the_same_pages_again_answers_too() -> None:
    c = Foreseen()
    c.back_in("a", 1)
    c.back_in("b", 50)
    c.save("a")
    assert c.evict(2) == "ab"


def test_a_shared_prefix_is_due_with_its_earliest_until_the_last_has_lapsed() -> None:
    c = Foreseen()
    c.back_in("pa", 5)
    c.back_in("pb", 100)
    c.back_in("x", 50)
    assert c.evict(3) == "bxa"
    c.back_in("y", 20)
    assert c.evict(1) == "y", "p is due at 5"
    c.back_in("z", 1000)
    c.pass_time(LAPSE * 100 - 1)
    assert c.evict(1) == "z", "and has lapsed at 800 only"
    c.back_in("z", 1000)
    c.pass_time(1)
    assert c.evict(2) == "pz"


def test_a_tail_that_goes_leaves_its_expectation_to_the_rest() -> None:
    c = Foreseen()
    c.back_in("abcd", 5)
    c.save("x")
    assert c.evict(3) == "xdc"
    c.back_in("y", 6)
    assert c.evict(3) == "yba"


def test_a_run_does_not_grow_over_the_end_at_which_somebody_is_expected() -> None:
    c = Foreseen()
    handle = c.grow(c.tree.pin_root(NS), "a")
    c.tree.expect(handle, Expected.after(0, 5))
    handle = c.grow(handle, "b")
    c.tree.unpin(handle)
    assert c.tree.nodes == 2
    c.back_in("x", 50)
    assert c.evict(3) == "bxa"


def test_joining_is_the_earliest_due_and_the_latest_lapse() -> None:
    early, late = Expected(1, 20), Expected(3, 10)
    assert early.joined(late) == late.joined(early) == Expected(1, 20)
    assert Expected(3, 30).joined(early) == Expected(1, 30)
    assert early.joined(None) == early
    assert Expected.after(5, 2) == Expected(7, 21)


def test_void_entries_do_not_pile_up() -> None:
    """Each answered expectation leaves a void entry in the heap. None of them stays for long."""
    c = Foreseen()
    for _ in range(1000):
        c.back_in("a", 1)
        c.save("b")
        assert c.evict(1) == "b"
        c.use("a")
    assert len(c.tree._heap) <= 2 * c.tree.nodes + 64


# -- reuse: the kernel ----------------------------------------------------------------------------

PAGE = 4
POOL = 10
A, B = list(range(16)), list(range(20, 36))  # 4 pages each


def two_sessions(
    wait_a: float | None, wait_b: float | None, idle: float = 0.0, **config: object
) -> tuple[int, int]:
    """Session A's request ends, then B's. After `idle` seconds another request takes four pages more than are
    free. Returns how many pages of A and of B are left."""
    d = Driver(POOL, PAGE, max_running=1, **({"eviction": Eviction.REUSE} | config))
    d.submit("a", A, 1, next_use_s=wait_a)
    d.run().submit("b", B, 1, next_use_s=wait_b)
    d.run()
    d.now += idle
    d.submit("c", list(range(50, 74)), 1)
    d.run().assert_cold_equal()
    left = [d.kernel._s.l1.tree.lookup(NS, tk.encode(prompt), 4) for prompt in (A, B)]
    return left[0].pages if left[0] else 0, left[1].pages if left[1] else 0


@pytest.mark.parametrize(
    ("wait_a", "wait_b", "idle", "left"),
    [
        (None, None, 0, (0, 4)),  # as LRU
        (9, None, 0, (4, 0)),
        (9, 97, 0, (4, 0)),
        (97, 9, 0, (0, 4)),
        (9, 97, 60, (4, 0)),  # overdue, but not by much
        (9, 97, 80, (0, 4)),  # lapsed: 8 x 9 s
        (9, 9, 800, (0, 4)),
    ],
)
def test_what_requests_foresee_decides_whose_pages_stay(
    wait_a: float | None, wait_b: float | None, idle: float, left: tuple[int, int]
) -> None:
    assert two_sessions(wait_a, wait_b, idle) == left
    assert two_sessions(wait_a, wait_b, idle, publication=Publication.FINISH, flight=Flight.NONE) == left


@pytest.mark.parametrize("eviction", [e for e in Eviction if e is not Eviction.REUSE])
def test_other_keys_do_not_look_at_it(eviction: Eviction) -> None:
    assert two_sessions(9, 97, eviction=eviction) == two_sessions(None, None, eviction=eviction)


def test_other_keys_remember_nothing_of_it() -> None:
    d = Driver(POOL, PAGE)
    d.submit("a", A, 1, next_use_s=9)
    d.run()
    assert all(node.expected is None for node in d.kernel._s.l1.tree.walk_nodes())


def test_an_aborted_request_foresees_nothing() -> None:
    d = Driver(POOL, PAGE, eviction=Eviction.REUSE, max_running=1)
    d.submit("a", A, 9, next_use_s=9)
    d.step()
    d.abort("a")
    d.run()
    assert all(node.expected is None for node in d.kernel._s.l1.tree.walk_nodes())


@pytest.mark.parametrize("wait", [-1.0, float("nan"), float("inf")])
def test_a_wait_that_is_no_time_is_refused(wait: float) -> None:
    d = Driver(POOL, PAGE, eviction=Eviction.REUSE)
    with pytest.raises(RequestRejected, match=f"next_use_s={wait}"):
        d.submit("a", A, 1, next_use_s=wait)
