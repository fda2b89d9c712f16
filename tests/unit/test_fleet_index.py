"""Who holds which page: what is stored, removed, dropped and forgotten, and how far each holder reaches."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotprefix.fleet.index import PageIndex, Reach
from hotprefix.fleet.records import Shelf
from hotprefix.fleet.survey import bits

A, B, C = 1, 2, 4


def by_holder(found: Reach) -> dict[int, int]:
    pairs = [(bit, pages) for mask, pages in found for bit in bits(mask)]
    assert len(dict(pairs)) == len(pairs)  # every holder once
    return dict(pairs)


def test_holders_by_shelf_and_a_page_that_left_memory_is_still_on_disk() -> None:
    """`Mooncake#2214`."""
    index = PageIndex(100)
    index.store(A, Shelf.L1, (1, 2))
    index.store(A | B, Shelf.L3, (2,))
    assert index.holders(2) == (A, 0, A | B)
    index.remove(A, Shelf.L1, (2,))
    assert index.holders(2) == (0, 0, A | B)
    assert by_holder(index.reach((1, 2), Shelf.L1)) == {0: 1}
    assert by_holder(index.reach((1, 2), Shelf.L3)) == {0: 2}
    index.remove(A | B, Shelf.L3, (2,))
    assert index.holders(2) == (0, 0, 0)
    assert len(index) == 1


def test_a_page_stored_or_removed_twice_is_as_if_once() -> None:
    """`dynamo#8012`, `sglang#29750`."""
    index = PageIndex(100)
    for _ in range(2):
        index.store(A, Shelf.L1, (1, 2, 2))
    assert (len(index), index.holders(2)) == (2, (A, 0, 0))
    for _ in range(2):
        index.remove(A, Shelf.L1, (2, 3))
    assert (len(index), index.holders(1), index.holders(2)) == (1, (A, 0, 0), (0, 0, 0))


def test_keys_with_equal_holders_share_one_record() -> None:
    index = PageIndex(10_000)
    for holder in range(64):
        index.store(1 << holder, Shelf.L1, tuple(range(1000)))
    assert len(index._shared) == 1
    index.remove(A, Shelf.L1, tuple(range(500)))
    assert len(index._shared) == 2
    index.drop((1 << 64) - 1)
    assert (len(index), len(index._holders), len(index._shared)) == (0, 0, 0)


def test_a_drop_of_one_shelf_leaves_the_others() -> None:
    index = PageIndex(100)
    index.store(A | B, Shelf.L1, (1, 2))
    index.store(A, Shelf.L2, (1,))
    index.drop(A, Shelf.L1)
    assert (index.holders(1), index.holders(2)) == ((B, A, 0), (B, 0, 0))


def test_after_a_drop_equal_records_count_as_equal() -> None:
    """Records that become equal stay two; both are changed by the next drop."""
    index = PageIndex(100)
    index.store(A | B, Shelf.L1, (1, 2))
    index.store(B, Shelf.L1, (3, 4, 5))
    index.drop(A)
    assert [index.holders(key) for key in (1, 3)] == [(B, 0, 0)] * 2
    index.store(C, Shelf.L1, (1, 3))
    assert [index.holders(key) for key in (1, 2, 3)] == [(B | C, 0, 0), (B, 0, 0), (B | C, 0, 0)]
    index.drop(B)
    assert [index.holders(key) for key in (1, 2, 3)] == [(C, 0, 0), (0, 0, 0), (C, 0, 0)]
    assert len(index) == 2


def test_the_oldest_keys_that_no_request_asked_for_are_forgotten_first() -> None:
    index = PageIndex(64)  # four go at a time, beside the one too many
    index.store(A, Shelf.L1, tuple(range(64)))
    index.asked((0, 1, 99))
    index.store(A, Shelf.L1, (64,))
    assert index.forgotten == 5
    assert len(index) == 60
    assert [key for key in range(65) if not index.holders(key)[0]] == [2, 3, 4, 5, 6]


@given(st.integers(0, 3), st.lists(st.integers(0, 40), max_size=60))
def test_the_limit_holds_whatever_is_asked_for(sixteenths: int, asked: list[int]) -> None:
    index = PageIndex(16 * sixteenths + 5)
    for key in range(100):
        index.asked(tuple(asked))
        index.store(A, Shelf.L1, (key, key + 1))
        assert len(index) <= 16 * sixteenths + 5


HELD = st.lists(st.integers(0, 20), min_size=0, max_size=7)


@given(HELD, st.integers(0, 20))
def test_reach_is_exact_where_holders_hold_prefixes(held: list[int], asked: int) -> None:
    index, keys = PageIndex(1000), tuple(range(100, 120))
    for holder, pages in enumerate(held):
        index.store(1 << holder, Shelf.L1, keys[:pages])
    expected = {holder: min(pages, asked) for holder, pages in enumerate(held) if min(pages, asked)}
    assert by_holder(index.reach(keys[:asked], Shelf.L1)) == expected


@given(st.lists(st.sets(st.integers(0, 11)), max_size=4))
def test_reach_with_pages_missing_in_between_is_never_too_short(held: list[set[int]]) -> None:
    index, keys = PageIndex(1000), tuple(range(100, 112))
    for holder, pages in enumerate(held):
        index.store(1 << holder, Shelf.L1, tuple(keys[p] for p in sorted(pages)))
    found = by_holder(index.reach(keys, Shelf.L1))
    for holder, pages in enumerate(held):
        exact = next((p for p in range(12) if p not in pages), 12)
        deepest = max(pages) + 1 if 0 in pages else 0
        assert exact <= found.get(holder, 0) <= deepest
        assert holder not in found or 0 in pages


@pytest.mark.patches
@pytest.mark.parametrize("workers", [1, 64, 1024])
def test_few_keys_are_looked_at(workers: int) -> None:
    """If all hold all, the first and the last; with one that holds less, about as many as halvings."""
    index, keys, asked = PageIndex(10_000), tuple(range(2048)), []
    index.store((1 << workers) - 1, Shelf.L1, keys)
    mask = index._mask
    index._mask = lambda key, depth: asked.append(key) or mask(key, depth)  # type: ignore[func-returns-value, method-assign]
    assert by_holder(index.reach(keys, Shelf.L1)) == dict.fromkeys(range(workers), 2048)
    assert len(asked) == 2
    index.remove(A, Shelf.L1, keys[random.Random(1).randrange(2048) :])
    asked.clear()
    index.reach(keys, Shelf.L1)
    assert len(asked) <= 2 + 11
