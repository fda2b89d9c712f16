"""The prefix tree's rules by example: matches, splits, pins, the order of eviction and its cost."""

from __future__ import annotations

import random

import pytest

from hotprefix.errors import ProtocolError
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.cache.evict import POLICIES, LeafView, Policy, SortKey, lru
from hotprefix.kernel.cache.node import Match, Node
from hotprefix.kernel.cache.tree import PrefixTree
from hotprefix.kernel.config import Eviction
from hotprefix.kernel.request import Namespace

NS = Namespace()


class Cache:
    """A tree with pages of four equal tokens: "abc" stands for three pages."""

    def __init__(self, eviction: Eviction = Eviction.LRU) -> None:
        self.tree = PrefixTree(4, POLICIES[eviction])
        self.names: dict[int, str] = {}

    def key(self, pages: str, rest: str = "") -> bytes:
        return tk.encode(ord(c) for page in pages for c in page * 4) + tk.encode(map(ord, rest))

    def match(self, pages: str, space: Namespace = NS) -> Match | None:
        return self.tree.lookup(space, self.key(pages), len(pages))

    def hit(self, pages: str, space: Namespace = NS) -> int:
        match = self.match(pages, space)
        return match.pages if match else 0

    def pin(self, pages: str, space: Namespace = NS) -> Node:
        match = self.match(pages, space)
        if match is None or not match.pages:
            return self.tree.pin_root(space)
        assert match.pages == len(pages)
        return self.tree.pin(match)

    def grow(self, handle: Node, pages: str, priority: int = 0, planned: bool = False) -> Node:
        ids = list(range(len(self.names), len(self.names) + len(pages)))
        self.names |= dict(zip(ids, pages, strict=True))
        return self.tree.insert(handle, self.key(pages), ids, priority, planned).handle

    def save(self, pages: str, priority: int = 0, space: Namespace = NS) -> None:
        self.tree.unpin(self.grow(self.tree.pin_root(space), pages, priority))

    def use(self, pages: str, priority: int = 0) -> None:
        match = self.match(pages)
        assert match is not None
        self.tree.use(match, priority)

    def evict(self, count: int) -> str:
        return "".join(self.names[page] for page in self.tree.evict(count))


# -- matches --------------------------------------------------------------------------------------


def test_the_longest_prefix_in_whole_pages() -> None:
    c = Cache()
    c.save("abc")
    assert [c.hit(p) for p in ("", "a", "abc", "abcd", "abx", "x", "bc")] == [0, 1, 3, 3, 2, 0, 0]
    match = c.tree.lookup(NS, c.key("ab", "ccc"), 99)
    assert match is not None
    assert match.pages == 2, "three tokens of the third page are not a page"
    limited = c.tree.lookup(NS, c.key("abc"), 2)
    assert limited is not None
    assert limited.pages == 2


@pytest.mark.parametrize("differs", range(12))
def test_a_difference_at_any_token_ends_the_match_before_its_page(differs: int) -> None:
    c = Cache()
    c.save("abc")
    ids = list(tk.view(c.key("abc")))
    ids[differs] += 1
    match = c.tree.lookup(NS, tk.encode(ids), 3)
    assert match is not None
    assert match.pages == differs // 4


def test_a_match_ends_at_the_first_page_that_is_missing() -> None:
    """The third page has the same tokens as one in another chain, but is another page (rule 11)."""
    c = Cache()
    c.save("abc")
    c.save("axc")
    assert c.hit("ayc") == 1
    assert c.evict(2) == "cb"
    assert c.hit("abc") == 1


def test_keys_shorter_than_a_page_leave_no_node() -> None:
    """Only complete pages are indexed (rule 8)."""
    tree = PrefixTree(64, Policy(lru))
    for n in (1, 63, 64, 65):
        handle = tree.pin_root(NS)
        whole = tk.encode(range(n))[: n // 64 * 64 * 4]
        if whole:
            handle = tree.insert(handle, whole, [n]).handle
        tree.unpin(handle)
        match = tree.lookup(NS, tk.encode(range(n)), 9)
        assert (match.pages if match else 0) == n // 64
    assert (tree.nodes, tree.total_pages) == (1, 1)
    assert len(tree.evict(9)) == 1
    assert (tree.nodes, tree.namespaces) == (0, 0)


NAMESPACES = [
    Namespace(),
    Namespace(salt="adapter-1"),
    Namespace(adapter="adapter-1"),
    Namespace(adapter="adapter-1", adapter_version="2"),
    Namespace(adapter="adapter-12"),
    Namespace(model="adapter-1"),
    Namespace(salt=""),
    Namespace(adapter="ab", salt="c"),
    Namespace(adapter="a", salt="bc"),
    Namespace(model="ab", salt="c"),
    Namespace(adapter="a", adapter_version="b", salt="c"),
]


def test_no_two_namespaces_share() -> None:
    """Adapter, version, salt and model are fields, not one string (rule 13)."""
    c = Cache()
    for space in NAMESPACES:
        assert c.hit("abc", space) == 0
        c.save("abc", space=space)
    assert [c.hit("abc", space) for space in NAMESPACES] == [3] * len(NAMESPACES)
    assert len({p for s in NAMESPACES if (m := c.match("abc", s)) for p in c.tree.pages_of(m)}) == 33


def test_a_match_from_before_a_change_is_refused() -> None:
    c = Cache()
    c.save("abc")
    stale = c.match("ab")
    assert stale is not None
    c.use("a")
    assert not stale.current
    for act in (c.tree.touch, c.tree.use, c.tree.pin):
        with pytest.raises(ProtocolError, match="from before a change"):
            act(stale)


# -- pins -----------------------------------------------------------------------------------------


def test_pins_protect_the_whole_prefix_and_nothing_else() -> None:
    c = Cache()
    c.save("abcd")
    c.save("abx")
    handle = c.pin("abc")
    assert (c.tree.protected_pages, c.tree.evictable_pages) == (3, 2)
    assert sorted(c.evict(9)) == ["d", "x"]
    c.tree.unpin(handle)
    assert (c.tree.protected_pages, c.tree.evictable_pages) == (0, 3)
    with pytest.raises(ProtocolError, match="returned twice"):
        c.tree.unpin(handle)


def test_two_pins_need_two_unpins() -> None:
    c = Cache()
    c.save("ab")
    first, second = c.pin("ab"), c.pin("ab")
    c.tree.unpin(first)
    assert c.evict(9) == ""
    c.tree.unpin(second)
    assert c.evict(9) == "ba"


def test_counts_hold_through_ten_thousand_random_operations() -> None:
    """A split must not make the number of evictable pages negative (rule 6). The property tests check the
    pages too."""
    rng = random.Random(59)
    c, pins = Cache(), []
    for _ in range(10_000):
        pages = "".join(rng.choice("ab") for _ in range(rng.randint(1, 8)))
        match rng.randrange(5):
            case 0:
                c.save(pages)
            case 1 if (hit := c.hit(pages)) and len(pins) < 20:
                pins.append(c.pin(pages[:hit]))
            case 2 if pins:
                c.tree.unpin(pins.pop(rng.randrange(len(pins))))
            case 3 if hit := c.hit(pages):
                c.use(pages[:hit])
            case 4:
                c.tree.evict(rng.randint(1, 3))
        nodes = list(c.tree.walk_nodes())
        assert c.tree.total_pages == sum(len(n.pages) for n in nodes)
        assert c.tree.protected_pages == sum(len(n.pages) for n in nodes if n.pins)
        assert c.tree.nodes == len(nodes)


# -- order of eviction -----------------------------------------------------------------------------


def test_exactly_as_many_pages_as_asked_from_the_tail() -> None:
    c = Cache()
    c.save("abcdefgh")
    assert c.evict(1) == "h"
    assert c.evict(3) == "gfe"
    assert c.hit("abcdefgh") == 4
    assert c.evict(99) == "dcba"
    assert c.evict(1) == ""


def test_the_deepest_page_of_a_chain_goes_first_every_time() -> None:
    """All pages of a request are equally recent; the tail still goes first, not an arbitrary page (rule
    15)."""
    for _ in range(200):
        c = Cache()
        c.save("abc")
        assert c.evict(1) == "c"


@pytest.mark.parametrize("eviction", Eviction)
@pytest.mark.parametrize("chunks", [("ab", "cd"), ("abcd",), ("a", "b", "c", "d"), ("abc", "d")])
def test_a_chain_saved_in_several_chunks_goes_from_its_end(
    chunks: tuple[str, ...], eviction: Eviction
) -> None:
    """The tail of the last chunk goes first, although earlier chunks were saved earlier (rule 15)."""
    c = Cache(eviction)
    handle = c.tree.pin_root(NS)
    for chunk in chunks:
        handle = c.grow(handle, chunk)
    c.tree.unpin(handle)
    assert c.tree.nodes == 1, "one publisher leaves one run"
    assert c.evict(4) == "dcba"


def test_a_run_that_grew_is_as_recent_as_its_last_page() -> None:
    c = Cache()
    handle = c.grow(c.tree.pin_root(NS), "a")
    c.save("x")
    c.tree.unpin(c.grow(handle, "b"))
    assert c.evict(3) == "xba"


def test_a_run_does_not_grow_over_the_end_of_another_holder() -> None:
    c = Cache()
    handle = c.grow(c.tree.pin_root(NS), "a")
    other = c.pin("a")
    c.tree.unpin(c.grow(handle, "b"))
    assert (c.tree.protected_pages, c.tree.evictable_pages) == (1, 1)
    assert c.evict(9) == "b"
    c.tree.unpin(other)


def test_an_unmatched_suffix_gains_nothing_from_a_touch() -> None:
    c = Cache()
    c.save("abcd")
    c.save("xy")
    c.use("ab")
    assert c.evict(4) == "dcyx"
    assert c.evict(2) == "ba"


def test_a_parent_is_never_older_than_its_children() -> None:
    """A use is written to the deepest node only. Its recency passes to the parent when the node goes."""
    c = Cache()
    c.save("ab")
    c.save("x")
    c.save("abcd")
    c.save("y")
    assert c.evict(3) == "xdc"
    assert c.evict(3) == "bay"


def test_a_parent_takes_over_the_uses_of_what_left_it() -> None:
    c = Cache(Eviction.LFU)
    for pages in ("ab", "ac", "x"):
        c.save(pages)
    for pages, uses in (("ab", 3), ("ac", 3), ("x", 5)):
        for _ in range(uses):
            c.use(pages)
    assert c.evict(4) == "bcxa", "a has been used seven times"


def test_a_parent_takes_over_the_importance_of_what_left_it() -> None:
    c = Cache(Eviction.PRIORITY)
    c.save("a", priority=9)
    c.save("ab", priority=1)
    assert c.evict(1) == "b"
    c.save("x", priority=5)
    assert c.evict(2) == "xa"


def test_a_parent_takes_over_the_recency_of_what_left_it() -> None:
    """Pages of a failed step are taken back. The use of the prefix above them remains."""
    c = Cache()
    c.save("a")
    c.save("x")
    c.tree.unpin(c.grow(c.pin("a"), "b", planned=True))
    c.tree.discard_planned()
    assert c.evict(2) == "xa"


def test_lru() -> None:
    c = Cache()
    for pages in ("a", "b", "c"):
        c.save(pages)
    c.use("a")
    assert c.evict(3) == "bca"


def test_a_touch_moves_recency_and_counts_no_use() -> None:
    c = Cache(Eviction.SLRU)
    for pages in ("a", "b"):
        c.save(pages)
    match = c.match("a")
    assert match is not None
    c.tree.touch(match)
    c.save("c")
    assert c.evict(3) == "bac"


def test_lfu_goes_by_uses_and_then_by_recency() -> None:
    c = Cache(Eviction.LFU)
    for pages in ("a", "b", "c", "d"):
        c.save(pages)
    for pages in ("a", "a", "b", "c"):
        c.use(pages)
    assert c.evict(4) == "dbca"


def test_slru_lets_what_nobody_used_again_go_first() -> None:
    c = Cache(Eviction.SLRU)
    for pages in ("a", "b", "c"):
        c.save(pages)
    c.use("a")
    c.save("d")
    assert c.evict(4) == "bcda"


def test_fifo_does_not_care_about_uses() -> None:
    c = Cache(Eviction.FIFO)
    for pages in ("a", "b", "c"):
        c.save(pages)
    c.use("a")
    assert c.evict(3) == "abc"


def test_priority_lets_the_pages_of_unimportant_requests_go_first() -> None:
    c = Cache(Eviction.PRIORITY)
    c.save("a", priority=0)
    c.save("b", priority=9)
    c.save("c", priority=5)
    c.save("d", priority=9)
    c.use("b", priority=1)
    assert c.evict(4) == "dcba"


@pytest.mark.parametrize("eviction", [Eviction.LFU, Eviction.SLRU])
def test_prefilling_in_chunks_makes_nothing_hotter(eviction: Eviction) -> None:
    """Publishing does not count as a use, and one request that takes pages in pieces counts once for each
    page."""
    c = Cache(eviction)
    c.save("x")
    c.use("x")
    handle = c.tree.pin_root(NS)
    for chunk in "abcd":
        handle = c.grow(handle, chunk)
    follower = c.tree.pin_root(NS)
    for n in range(1, 5):
        match = c.match("abcd"[:n])
        assert match is not None
        c.tree.use(match)
        match = c.match("abcd"[:n])
        assert match is not None
        follower = c.tree.repin(follower, match)
    c.tree.unpin(handle)
    c.tree.unpin(follower)
    c.use("x")
    c.use("x")
    assert c.evict(5) == "dcbax", "one use by another each; x has had three"


def test_pages_computed_twice_count_as_used_once_more() -> None:
    c = Cache(Eviction.LFU)
    for pages in ("abc", "xy", "abc"):
        c.save(pages)
    assert c.evict(5) == "yxcba"


# -- planned pages --------------------------------------------------------------------------------


def test_planned_pages_are_seen_as_such_and_can_be_taken_back() -> None:
    c = Cache()
    c.save("ab")
    handle = c.grow(c.pin("ab"), "cd", planned=True)
    match = c.match("abcd")
    assert match is not None
    assert (match.pages, match.planned) == (4, 2)
    half = c.match("abc")
    assert half is not None
    assert (half.pages, half.planned) == (3, 1)
    with pytest.raises(ProtocolError, match="still pinned"):
        c.tree.discard_planned()
    c.tree.unpin(handle)
    assert sorted(c.names[p] for p in c.tree.discard_planned()) == ["c", "d"]
    assert not match.current
    assert c.hit("abcd") == 2


def test_settled_pages_are_real_and_a_match_that_knew_them_as_planned_is_stale() -> None:
    c = Cache()
    handle = c.grow(c.tree.pin_root(NS), "ab", planned=True)
    match = c.match("ab")
    assert match is not None
    c.tree.settle()
    assert not match.current
    again = c.match("ab")
    assert again is not None
    assert again.planned == 0
    c.tree.unpin(handle)
    assert c.tree.discard_planned() == []


def test_real_pages_never_hang_below_planned_ones() -> None:
    c = Cache()
    planner, other = c.tree.pin_root(NS), c.tree.pin_root(NS)
    planner = c.grow(planner, "ab", planned=True)
    inserted = c.tree.insert(other, c.key("abc"), [70, 71, 72])
    assert (inserted.handle, inserted.pages, inserted.added) == (other, [], 0)
    c.tree.unpin(planner)
    assert len(c.tree.discard_planned()) == 2
    c.tree.unpin(other)
    assert (c.tree.nodes, c.tree.namespaces) == (0, 0)


# -- what it costs --------------------------------------------------------------------------------


def test_one_page_from_ten_thousand_leaves_looks_at_a_handful() -> None:
    calls = 0

    def counted(leaf: LeafView) -> SortKey:
        nonlocal calls
        calls += 1
        return lru(leaf)

    tree = PrefixTree(4, Policy(counted))
    for n in range(10_000):
        tree.unpin(tree.insert(tree.pin_root(NS), tk.encode([n] * 8), [2 * n, 2 * n + 1]).handle)
    calls = 0
    for n in range(20):
        assert tree.evict(1) == [2 * (n // 2) + 1 - n % 2]
    assert calls <= 3 * 20, "no new heap over all leaves"
    calls = 0
    for n in range(500, 10_000):
        match = tree.lookup(NS, tk.encode([n] * 8), 2)
        assert match is not None
        tree.touch(match)
    assert calls == 0, "a touch sorts nothing"
    tree.evict(1)
    assert calls <= 3


def test_a_lookup_through_many_pages_compares_runs_not_tokens() -> None:
    """A key is compared once for each run, so a long match in one run takes one comparison."""
    tree = PrefixTree(16, Policy(lru))
    key = tk.encode(range(16 * 1024))
    tree.insert(tree.pin_root(NS), key, list(range(1024)))

    class Counting(bytes):
        looks = 0

        def startswith(self, *args: object) -> bool:
            Counting.looks += 1
            return super().startswith(*args)  # type: ignore[arg-type]

    match = tree.lookup(NS, Counting(key), 1024)
    assert match is not None
    assert match.pages == 1024
    assert Counting.looks <= 2
