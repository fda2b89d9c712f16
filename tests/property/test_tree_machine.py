"""The prefix tree against a dictionary of pages: the same matches, the same victims in the same order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotprefix.kernel import tokens as tk
from hotprefix.kernel.cache.evict import POLICIES
from hotprefix.kernel.cache.expected_reuse import Expected
from hotprefix.kernel.cache.node import Match, Node
from hotprefix.kernel.cache.tree import PrefixTree
from hotprefix.kernel.config import Eviction
from hotprefix.kernel.request import Namespace
from tests.support.pages import PageOracle

BY_CREATION = (Eviction.FIFO, Eviction.SIEVE)
SPACES = [Namespace(), Namespace(salt="a"), Namespace(adapter="a")]


@dataclass
class Pin:
    handle: Node
    space: Namespace
    key: bytes  # of the pinned prefix, whole pages
    planned: bool = False


def snapshot(tree: PrefixTree) -> object:
    """Everything the tree holds, by value."""

    def node(n: Node) -> object:
        stats = (n.pins, n.planned, n.last_access, n.created, n.hits, n.priority, n.queued, n.version)
        stats += (n.visited, n.round, n.expected)
        return (n.serial, n.key, tuple(n.pages), stats, [node(c) for c in n.children.values()])

    heap = [(key, seq, leaf.serial) for key, seq, leaf in tree._heap._heap]
    counts = (tree.nodes, tree.total_pages, tree.protected_pages, tree._tick, tree._forest._serial)
    return [(ns, node(root)) for ns, root in tree._forest.roots.items()], heap, counts


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pins: list[Pin] = []
        self.old: list[tuple[Match, Namespace, bytes, int]] = []
        self.next_page = 0
        self.now = 0.0

    @initialize(page_size=st.sampled_from([1, 4, 16]), eviction=st.sampled_from(Eviction))
    def build(self, page_size: int, eviction: Eviction) -> None:
        self.size, self.eviction = page_size, eviction
        self.tree = PrefixTree(page_size, POLICIES[eviction])
        self.oracle = PageOracle(page_size * tk.TOKEN_BYTES, POLICIES[eviction])

    def key(self, pages: list[int], rest: int = 0) -> bytes:
        """The token bytes of these pages. Pages differ in their first, a middle or their last token."""
        ids: list[int] = []
        for page in pages:
            tokens = [0] * self.size
            tokens[(0, self.size // 2, self.size - 1)[page % 3]] = 1 + page // 3
            ids += tokens
        return tk.encode(ids + [0] * (rest % self.size))

    keys = st.lists(st.sampled_from([0, 0, 1, 2]), min_size=0, max_size=5)
    spaces = st.sampled_from([SPACES[0]] * 4 + SPACES[1:])

    # -- pure -------------------------------------------------------------------------------------

    @rule(pages=keys, rest=st.integers(0, 15), space=spaces, limit=st.integers(-1, 9))
    def lookup(self, pages: list[int], rest: int, space: Namespace, limit: int) -> None:
        key, before = self.key(pages, rest), snapshot(self.tree)
        match = self.tree.lookup(space, key, limit)
        expected = self.oracle.matched(space, key, max(limit, 0))
        self.same(match, expected)
        assert snapshot(self.tree) == before
        if match is not None:
            self.old.append((match, space, key, limit))

    def same(self, match: Match | None, expected: list) -> None:
        if match is None:
            assert not expected
            return
        assert match.current
        assert match.pages == len(expected)
        assert match.planned == sum(p.planned for p in expected)
        assert self.tree.pages_of(match) == [p.page for p in expected]

    def find(self, space: Namespace, key: bytes) -> Match | None:
        match = self.tree.lookup(space, key, 99)
        return match if match is not None and match.pages else None

    # -- recency ----------------------------------------------------------------------------------

    @rule(pages=keys, space=spaces)
    def touch(self, pages: list[int], space: Namespace) -> None:
        match = self.find(space, self.key(pages))
        if match is not None:
            self.tree.touch(match)
            self.oracle.use(space, self.key(pages), match.pages, None, None)

    @rule(pages=keys, space=spaces, priority=st.integers(0, 3))
    def use(self, pages: list[int], space: Namespace, priority: int) -> None:
        match = self.find(space, self.key(pages))
        if match is not None:
            self.tree.use(match, priority)
            self.oracle.use(space, self.key(pages), match.pages, priority, 0)

    # -- pins -------------------------------------------------------------------------------------

    @rule(wanted=keys, space=spaces)
    def pin(self, wanted: list[int], space: Namespace) -> None:
        key = self.key(wanted)
        match = self.find(space, key)
        handle = self.tree.pin_root(space) if match is None else self.tree.pin(match)
        pages, planned = (match.pages, match.planned > 0) if match else (0, False)
        self.held(Pin(handle, space, key[: pages * self.oracle.width], planned))

    def held(self, pin: Pin) -> None:
        self.pins.append(pin)
        self.oracle.pin(pin.space, pin.key, len(pin.key) // self.oracle.width, +1)

    @precondition(lambda self: self.pins)
    @rule(pick=st.integers(0, 99))
    def pin_again(self, pick: int) -> None:
        pin = self.pins[pick % len(self.pins)]
        self.held(Pin(self.tree.pin_again(pin.handle), pin.space, pin.key, pin.planned))

    @precondition(lambda self: self.pins)
    @rule(pick=st.integers(0, 99))
    def unpin(self, pick: int) -> None:
        at = pick % len(self.pins)
        if not self.pins[at].planned:
            self.release(at)

    @precondition(lambda self: self.pins)
    @rule(pick=st.integers(0, 99), wait=st.sampled_from([0.0, 1.0, 2.0, 9.0]))
    def ends_and_will_be_back(self, pick: int, wait: float) -> None:
        at = pick % len(self.pins)
        pin, expected = self.pins[at], Expected.after(self.now, wait)
        if not pin.planned:
            self.tree.expect(pin.handle, expected)
            self.oracle.expect(pin.space, pin.key, expected)
            self.release(at)

    @rule(seconds=st.sampled_from([1.0, 8.0, 20.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.now += seconds
        self.tree.lapse(self.now)
        self.oracle.lapse(self.now)

    def release(self, at: int) -> None:
        pin = self.pins.pop(at)
        self.tree.unpin(pin.handle)
        self.oracle.pin(pin.space, pin.key, len(pin.key) // self.oracle.width, -1)

    @precondition(lambda self: self.pins)
    @rule(pick=st.integers(0, 99), pages=keys, priority=st.integers(0, 3))
    def adopt(self, pick: int, pages: list[int], priority: int) -> None:
        """Do what a running request does with pages that other requests have published: use them, then move
        its pin."""
        pin = self.pins[pick % len(self.pins)]
        key, width = pin.key + self.key(pages), self.oracle.width
        above = len(pin.key) // width
        match = self.tree.lookup_from(pin.handle, above, key, 99)
        expected = self.oracle.matched(pin.space, key, 99)
        self.same(match, expected)
        if match.pages <= above:
            return
        self.tree.use(match, priority)
        self.oracle.use(pin.space, key, match.pages, priority, above)
        match = self.tree.lookup_from(pin.handle, above, key, match.pages)
        pin.handle = self.tree.repin(pin.handle, match)
        self.oracle.pin(pin.space, pin.key, above, -1)
        pin.key = key[: match.pages * width]
        pin.planned = pin.planned or match.planned > 0
        self.oracle.pin(pin.space, pin.key, match.pages, +1)

    # -- publication ------------------------------------------------------------------------------

    @precondition(lambda self: self.pins)
    @rule(pick=st.integers(0, 99), pages=keys, priority=st.integers(0, 3), planned=st.booleans())
    def insert(self, pick: int, pages: list[int], priority: int, planned: bool) -> None:
        pin = self.pins[pick % len(self.pins)]
        key, above = self.key(pages), len(pin.key) // self.oracle.width
        taken = self.tree.lookup_from(pin.handle, 0, key, 1).pages > 0
        if not key or (self.eviction in BY_CREATION and above) or (planned and taken):
            return  # joined runs count from their first publication, which the oracle does not follow
        if pin.planned and not planned:
            return  # its earlier pages are computed by the step in flight
        own = list(range(self.next_page, self.next_page + len(pages)))
        self.next_page += len(pages)
        got = self.tree.insert(pin.handle, key, own, priority, planned)
        expected = self.oracle.insert(pin.space, pin.key + key, above, own, priority, planned)
        assert (got.pages, got.added) == expected
        pin.handle = got.handle
        if got.pages:
            self.oracle.pin(pin.space, pin.key, above, -1)
            pin.key += key
            pin.planned = planned
            self.oracle.pin(pin.space, pin.key, len(pin.key) // self.oracle.width, +1)

    @rule()
    def settle(self) -> None:
        self.tree.settle()
        for page in self.oracle.pages.values():
            page.planned = False
        for pin in self.pins:
            if pin.planned and self.eviction not in BY_CREATION:
                pin.handle = self.tree.merge_up(pin.handle)
            pin.planned = False

    @rule()
    def step_fails(self) -> None:
        for at in reversed(range(len(self.pins))):
            if self.pins[at].planned:
                self.release(at)
        gone = {place: page for place, page in self.oracle.pages.items() if page.planned}
        assert sorted(self.tree.discard_planned()) == sorted(p.page for p in gone.values())
        for place in sorted(gone, key=lambda p: -len(p[1])):
            self.oracle.remove(place)

    # -- eviction ---------------------------------------------------------------------------------

    @rule(count=st.integers(1, 12), waiting=st.lists(keys, max_size=2))
    def evict(self, count: int, waiting: list[list[int]]) -> None:
        last: Counter[Node] = Counter()
        wanted = set()
        for pages in waiting:
            match = self.find(SPACES[0], self.key(pages))
            if match is not None:
                last[match.node] = max(last[match.node], match.inside)
                wanted.update(self.oracle.path(SPACES[0], self.key(pages), match.pages))
        evictable = self.tree.evictable_pages
        freed = self.tree.evict(count, last)
        assert len(freed) == min(count, evictable), "exactly as many as asked, where there are as many"
        assert freed == self.oracle.evict(count, frozenset(wanted))

    # -- what always holds ------------------------------------------------------------------------

    @invariant()
    def same_pages_and_counts(self) -> None:
        if not hasattr(self, "tree"):
            return
        held: dict[tuple[Namespace, bytes], int] = {}
        nodes = 0
        prefix = {None: b""}
        for node in self.tree.walk_nodes():
            nodes += 1
            above = prefix[node.parent if node.parent and node.parent.parent else None]
            prefix[node] = above + node.key
            assert len(node.key) == len(node.pages) * self.oracle.width > 0
            assert node.parent is not None
            assert node.parent.children[bytes(node.key[: self.oracle.width])] is node
            assert not node.evictable or node.queued is not None, "an evictable leaf can be found"
            assert node.pins >= sum(1 for c in node.children.values() if c.pins)
            for n, page in enumerate(node.pages):
                place = (node.namespace, above + node.key[: (n + 1) * self.oracle.width])
                held[place] = page
                expected = self.oracle.pages[place]
                assert (node.pins > 0, node.planned) == (expected.pins > 0, expected.planned)
        assert held == {place: p.page for place, p in self.oracle.pages.items()}
        assert (self.tree.nodes, self.tree.total_pages) == (nodes, len(held))
        assert self.tree.protected_pages == self.oracle.protected
        assert {p[0] for p in held} <= set(self.tree._forest.roots)
        assert self.tree.namespaces == len({p[0] for p in held} | {p.space for p in self.pins})

    @invariant()
    def an_old_match_is_still_the_longest_or_leads_to_it(self) -> None:
        """A waiting request remembers such a match, checks by one comparison that it is current, and searches
        on from its end."""
        self.old = self.old[-20:]
        for match, space, key, limit in self.old:
            expected = self.oracle.matched(space, key, max(limit, 0))
            if match.current:
                self.same(match, expected)
            self.same(self.tree.lookup_again(match, space, key, limit), expected)

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.settle()
        while self.pins:
            self.release(0)
        everything = self.tree.total_pages
        assert self.tree.evictable_pages == everything
        assert self.tree.evict(everything + 5) == self.oracle.evict(everything + 5)
        assert (self.tree.nodes, self.tree.total_pages, self.tree.namespaces) == (0, 0, 0)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=40)


@pytest.mark.slow
class TestTreeDeep(TreeMachine.TestCase):  # type: ignore[misc, name-defined]
    """The same machine with longer examples: counts stay right through many splits (rule 6)."""

    settings = settings(max_examples=5000, stateful_step_count=80, derandomize=False)
