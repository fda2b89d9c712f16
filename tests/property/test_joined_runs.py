"""Runs that were cut for branches are joined when the branches are gone. No match, eviction or count shows
the join, every pin and remembered match keeps its place, and joining costs no more than is paid for."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from hotprefix.kernel import tokens as tk
from hotprefix.kernel.cache.evict import POLICIES
from hotprefix.kernel.cache.forest import JOIN_WORK
from hotprefix.kernel.cache.node import Node
from hotprefix.kernel.cache.tree import PrefixTree
from hotprefix.kernel.config import Eviction, KernelConfig
from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.plan import StepOutcome
from hotprefix.kernel.request import Namespace, Request
from tests.property import test_eviction_walks as walks
from tests.property.test_tree_machine import TreeMachine

NS = Namespace()
PAGES = 1_024
PAGE = 16


class JoiningMachine(TreeMachine):
    """The tree beside a dictionary of pages, with joins in between."""

    @rule(paid=st.sampled_from([0, 3, 1_000]))
    def tidy(self, paid: int) -> None:
        forest = self.tree._forest
        forest._credit += paid
        credit, work, nodes = forest._credit, forest.work, self.tree.nodes
        self.tree.tidy()
        assert self.tree.nodes <= nodes
        assert forest.work - work <= max(credit, 2 * nodes + 2), "no more than is paid for, and one look"


TestJoining = JoiningMachine.TestCase
TestJoining.settings = settings(max_examples=150, stateful_step_count=40)


@pytest.mark.parametrize("eviction", Eviction)
def test_a_long_walk_with_joins_loses_the_same_pages_in_the_same_order(
    eviction: Eviction, monkeypatch: pytest.MonkeyPatch
) -> None:
    joins = 0

    class Tidying(TreeMachine):
        def evict(self, count: int, waiting: list[list[int]]) -> None:
            nonlocal joins
            super().evict(count=count, waiting=waiting)
            nodes = self.tree.nodes
            self.tree._forest._credit += 10_000
            self.tree.tidy()
            joins += nodes - self.tree.nodes
            self.same_pages_and_counts()
            self.an_old_match_is_still_the_longest_or_leads_to_it()

    monkeypatch.setattr(walks, "TreeMachine", Tidying)
    for seed in range(walks.WALKS):
        walks.walk(eviction, seed)
    assert joins > 20, "the walks have seen joins"


# -- a long prefix, cut by branches -------------------------------------------------------------------


def prefix() -> bytes:
    return tk.encode(range(PAGES * PAGE))


def save(tree: PrefixTree, key: bytes, pages: list[int]) -> None:
    tree.unpin(tree.insert(tree.pin_root(NS), key, pages).handle)


def tidy(tree: PrefixTree) -> None:
    """Join all that can be joined: all the work is paid for."""
    tree._forest._credit += 100_000
    tree.tidy()


def cut_prefix(order: str) -> tuple[PrefixTree, int]:
    """A tree that holds a prefix of 1,024 pages with a branch of one page behind each page but the last;
    returns the tree and the number of branches. order: the order in which the branches come, and in which
    they will go."""
    tree = PrefixTree(PAGE, POLICIES[Eviction.LRU])
    key, page_bytes = prefix(), PAGE * tk.TOKEN_BYTES
    save(tree, key, list(range(PAGES)))
    places = list(range(1, PAGES))
    if order == "upwards":
        places.reverse()
    elif order == "shuffled":
        random.Random(7).shuffle(places)
    for at in places:
        branch = key[: at * page_bytes] + tk.encode([10**6 + at] * PAGE)
        save(tree, branch, [*range(at), PAGES + at])
    match = tree.lookup(NS, key, PAGES)
    assert match is not None
    tree.use(match)
    assert tree.nodes == 2 * PAGES - 1
    return tree, len(places)


def runs_of(tree: PrefixTree) -> int:
    """The number of runs that a match of the whole prefix goes through."""
    match = tree.lookup(NS, prefix(), PAGES)
    assert match is not None
    assert match.pages == PAGES
    return len(match.node.path()) - 1


@pytest.mark.parametrize("order", ["downwards", "upwards", "shuffled"])
def test_a_prefix_whose_branches_have_gone_is_one_run_again(order: str) -> None:
    tree, branches = cut_prefix(order)
    forest = tree._forest
    tree.tidy()
    assert runs_of(tree) == PAGES, "as long as the branches are there it is cut"
    events, work, worst = forest.events, forest.work, 0
    for _ in range(branches):
        assert len(tree.evict(1)) == 1
        before = forest.work
        tree.tidy()
        worst = max(worst, forest.work - before)
        assert forest.work - work <= JOIN_WORK * (forest.events - events)
    assert forest.events - events == branches
    assert runs_of(tree) <= 1 + 2 * PAGES // JOIN_WORK, "what is left is not paid for yet"
    assert worst <= 3 * PAGES, "no eviction copies more than the prefix once, and looks at its runs"
    assert forest.work - work <= JOIN_WORK * branches < branches * PAGES, "few evictions copy it at all"
    for n in range(2 * PAGES // JOIN_WORK):  # other pages are published, which pays for the rest
        save(tree, tk.encode([2 * 10**6 + n] * PAGE), [10_000 + n])
    tree.tidy()
    assert runs_of(tree) == 1
    assert tree.evict(3) != [], "and what it was used for is still known"


def test_a_joined_prefix_is_evicted_in_the_order_of_its_cut_parts() -> None:
    """Its beginning was used after its end was. The end goes first, then the pages that were used in
    between."""
    tree = PrefixTree(1, POLICIES[Eviction.LRU])
    key = tk.encode(range(9))
    save(tree, key, list(range(9)))
    save(tree, key[:24] + tk.encode([100]), [*range(6), 20])
    save(tree, tk.encode([200]), [30])
    save(tree, key[:12] + tk.encode([101]), [*range(3), 21])
    save(tree, tk.encode([201]), [31])
    assert tree.evict(4) == [8, 7, 6, 20]
    tidy(tree)
    assert tree.nodes == 5
    match = tree.lookup(NS, key, 6)
    assert match is not None
    tree.touch(match)  # the run of six pages
    assert tree.evict(2) == [30, 21]
    tidy(tree)
    assert tree.nodes == 2, "the beginning and the middle are one run"
    assert tree.evict(1) == [31]
    assert tree.evict(9) == [5, 4, 3, 2, 1, 0]


def test_the_beginning_of_a_joined_run_keeps_a_recency_of_its_own() -> None:
    tree = PrefixTree(1, POLICIES[Eviction.LRU])
    key = tk.encode(range(6))
    save(tree, key, list(range(6)))
    save(tree, tk.encode([200]), [30])
    save(tree, key[:12] + tk.encode([100]), [0, 1, 2, 20])
    match = tree.lookup(NS, key[:12] + tk.encode([100]), 4)
    assert match is not None
    handle = tree.pin(match)
    tree.unpin(handle)
    tree.discard_planned()
    end = tree.lookup(NS, key, 6)
    assert end is not None
    tree.touch(end)
    assert tree.evict(2) == [30, 20], "older than the prefix's end by now"
    tidy(tree)
    assert tree.nodes == 1
    save(tree, tk.encode([201]), [31])
    half = tree.lookup(NS, key, 3)
    assert half is not None
    tree.touch(half)
    assert tree.evict(4) == [5, 4, 3, 31], "the beginning was used after all the others"
    assert tree.evict(9) == [2, 1, 0]


def test_a_place_that_is_held_is_not_joined_until_it_is_given_back() -> None:
    tree = PrefixTree(1, POLICIES[Eviction.LRU])
    key = tk.encode(range(6))
    save(tree, key, list(range(6)))
    match = tree.lookup(NS, key, 3)
    assert match is not None
    handle = tree.pin(match)
    save(tree, key[:12] + tk.encode([9]), [0, 1, 2, 7])
    match = tree.lookup(NS, key, 6)
    assert match is not None
    tree.use(match)
    assert tree.evict(1) == [7]
    tidy(tree)
    assert tree.nodes == 2
    assert handle.path_pages() == [0, 1, 2]
    tree.unpin(handle)
    tidy(tree)
    assert tree.nodes == 1
    assert tree.evict(9) == [5, 4, 3, 2, 1, 0]


def test_a_remembered_match_is_looked_up_again_after_a_join() -> None:
    """The match ended in the upper run, inside the lower one, or at its end. All of these are one run now."""
    tree = PrefixTree(1, POLICIES[Eviction.LRU])
    key = tk.encode(range(8))
    save(tree, key, list(range(8)))
    save(tree, key[:12] + tk.encode([9]), [0, 1, 2, 20])
    whole = tree.lookup(NS, key, 8)
    assert whole is not None
    tree.use(whole)
    memos = [tree.lookup(NS, key, limit) for limit in (2, 3, 5, 8)]
    assert tree.evict(1) == [20]
    tidy(tree)
    assert tree.nodes == 1
    for memo in memos:
        assert memo is not None
        assert not memo.current
        again = tree.lookup_again(memo, NS, key, memo.pages)
        assert again == tree.lookup(NS, key, memo.pages)
        assert again is not None
        assert tree.pages_of(again) == list(range(memo.pages))


def test_an_engine_finds_a_prefix_in_one_run_after_its_branches_have_gone() -> None:
    """The kernel's own planning passes join the runs of its trees, in L1 and, by the same calls, in L2."""
    config = KernelConfig(total_pages=256, page_size=4, max_running=4, max_batched_tokens=4_096)
    kernel = Kernel(config)
    prompt = list(range(400))
    now = 0.0

    def run(name: str, tokens: list[int]) -> None:
        nonlocal now
        now += 1.0
        kernel.submit(Request(name, tk.encode(tokens), 1), now)
        while kernel.status().waiting or kernel.status().running:
            plan = kernel.plan(now)
            kernel.commit(plan, StepOutcome(sampled={c.request: 7 for c in plan.chunks if c.samples}), now)

    def longest_path() -> int:
        return max(len(node.path()) - 1 for node in kernel._s.l1.tree.walk_nodes())

    run("first", prompt)
    for at in range(4, 400, 4):
        run(f"branch{at}", [*prompt[:at], *[1_000 + at] * 5])
    assert longest_path() > 90
    for n in range(120):
        run(f"again{n}", prompt)
        run(f"other{n}", [10_000 + n * 100 + i for i in range(40)])
    assert longest_path() <= 3


def test_what_a_join_leaves_behind_holds_nothing() -> None:
    tree, branches = cut_prefix("downwards")
    cut = [node for node in tree.walk_nodes() if node.children]
    tree.evict(branches)
    tidy(tree)
    gone: list[Node] = [node for node in cut if not node.pages]
    assert len(gone) >= PAGES - 2
    assert not any(node.children or node.seams or node.pins for node in gone)
