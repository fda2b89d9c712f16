"""The page pool's three states."""

from __future__ import annotations

import random

import pytest

from hotprefix.errors import ProtocolError
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.cache.pages import PagePool, PageState
from hotprefix.kernel.cache.tier import Tier
from hotprefix.kernel.config import Eviction
from hotprefix.kernel.request import Namespace


def counts(pool: PagePool) -> tuple[int, int, int]:
    return pool.free, pool.owned, pool._indexed


def test_pages_move_from_free_to_owned_to_indexed_to_free() -> None:
    pool = PagePool(4)
    pages = pool.allocate(3)
    assert sorted(pages) == [0, 1, 2]
    assert counts(pool) == (1, 3, 0)
    pool.index(pages[:2])
    assert counts(pool) == (1, 1, 2)
    assert [pool.state(p) for p in pages] == [PageState.INDEXED, PageState.INDEXED, PageState.OWNED]
    pool.unindex(pages[:1])
    pool.release(pages[2:])
    assert counts(pool) == (3, 0, 1)


@pytest.mark.parametrize("move", ["release", "index", "unindex"])
@pytest.mark.parametrize("state", PageState)
def test_every_other_move_is_refused(move: str, state: PageState) -> None:
    """So a double free, or a page in two places, cannot pass unnoticed."""
    allowed = {"release": PageState.OWNED, "index": PageState.OWNED, "unindex": PageState.INDEXED}
    pool = PagePool(2)
    if state is not PageState.FREE:
        pool.allocate(1)
    if state is PageState.INDEXED:
        pool.index([0])
    if allowed[move] is state:
        getattr(pool, move)([0])
        return
    with pytest.raises(ProtocolError, match=f"page 0 is {state.name}"):
        getattr(pool, move)([0])


def test_a_page_twice_in_one_move_is_refused() -> None:
    pool = PagePool(2)
    pool.allocate(1)
    with pytest.raises(ProtocolError):
        pool.release([0, 0])


def test_no_more_than_there_are() -> None:
    pool = PagePool(2)
    assert pool.allocate(0) == []
    assert pool.allocate(-1) == []
    with pytest.raises(ProtocolError, match="3 pages wanted, 2 free"):
        pool.allocate(3)
    assert counts(pool) == (2, 0, 0)


def test_random_moves_conserve_pages() -> None:
    rng = random.Random(5)
    pool, owned, indexed = PagePool(50), [], []
    for _ in range(5000):
        match rng.randrange(4):
            case 0:
                owned += pool.allocate(rng.randint(0, min(5, pool.free)))
            case 1 if owned:
                pool.release([owned.pop(rng.randrange(len(owned)))])
            case 2 if owned:
                indexed.append(owned.pop())
                pool.index(indexed[-1:])
            case 3 if indexed:
                pool.unindex([indexed.pop(rng.randrange(len(indexed)))])
        assert counts(pool) == (50 - len(owned) - len(indexed), len(owned), len(indexed))
        assert len(set(owned) | set(indexed)) == len(owned) + len(indexed)


def test_an_allocation_that_cannot_be_met_evicts_nothing() -> None:
    evicted: list[int] = []
    l1 = Tier(4, 1, Eviction.LRU, evicted.extend)
    pages = l1.allocate(3)
    assert pages is not None
    key = tk.encode([1, 2, 3])
    handle = l1.tree.insert(l1.tree.pin_root(Namespace()), key, pages).handle
    l1.pool.index(pages)
    assert l1.allocate(2) is None
    assert evicted == []
    l1.tree.unpin(handle)
    assert l1.available == 4
    assert l1.allocate(5) is None
    assert evicted == []
    assert l1.allocate(2) is not None
    assert evicted == [pages[2]], "one was free, so one is evicted: the tail"
    left = l1.tree.lookup(Namespace(), key, 3)
    assert left is not None
    assert left.pages == 2
