"""Page keys: what a fleet is told of a kernel's pages is what that kernel finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from hotprefix.fleet.config import FleetConfig, RoutingPolicy
from hotprefix.fleet.index import PageIndex
from hotprefix.fleet.records import Change, Shelf
from hotprefix.kernel.config import Publication, TierConfig, Write
from hotprefix.kernel.request import Namespace
from hotprefix.lab.sim.arrivals import Loop
from hotprefix.lab.sim.lower_tiers import Store
from hotprefix.lab.sim.page_keys import PageKeys, PageNews, StoreNews
from hotprefix.lab.sim.replay import Routing
from tests.support.replays import agents, replay, request

A, B = Namespace(model="a"), Namespace(model="b")


def tokens(*ids: int) -> bytes:
    return np.array(ids, dtype="<i4").tobytes()


def test_a_key_covers_everything_before_it() -> None:
    keys = PageKeys(2)
    first = keys.of_prompt(A, tokens(1, 2, 3, 4, 5, 6))
    assert len(set(first)) == 3
    assert all(0 <= key < 2**64 for key in first)
    assert keys.of_prompt(A, tokens(1, 2, 3, 4, 5)) == first[:2], "an incomplete page has no key"
    assert keys.of_prompt(A, tokens(1, 2, 9, 4, 5, 6))[0] == first[0]
    for other in (tokens(1, 2, 9, 4, 5, 6), tokens(2, 1, 3, 4, 5, 6), tokens(0, 2, 3, 4, 5, 6)):
        assert first[2] not in keys.of_prompt(A, other)
    assert not set(first) & set(keys.of_prompt(B, tokens(1, 2, 3, 4, 5, 6)))
    assert not set(first) & set(PageKeys(1).of_prompt(A, tokens(1, 2, 3, 4, 5, 6)))


def test_the_order_of_pages_matters() -> None:
    keys = PageKeys(2)
    there, back = (keys.of_prompt(A, tokens(*ids)) for ids in ((1, 2, 3, 4, 5, 6), (3, 4, 1, 2, 5, 6)))
    assert not set(there) & set(back)


def test_pages_with_equal_tokens_have_keys_of_their_own() -> None:
    assert len(set(PageKeys(2).of_prompt(A, tokens(*[7] * 40)))) == 20


def test_a_chain_goes_on_from_any_page() -> None:
    keys, ids = PageKeys(4), np.random.default_rng(1).integers(0, 2**31 - 1, 64, dtype=np.int32).tobytes()
    whole = keys.sums(keys.root(A), 0, ids)
    for page in range(1, 16):
        assert np.array_equal(keys.sums(int(whole[page - 1]), page, ids[page * 16 :]), whole[page:])


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PageNews, PageIndex]]:
    """Every `PageNews`, and an index that is built from it alone and compared whenever it is read."""
    found: list[tuple[PageNews, PageIndex]] = []
    begin, take = PageNews.__init__, PageNews.take

    def init(self: PageNews, keys: PageKeys, shelf: Shelf = Shelf.L1) -> None:
        begin(self, keys, shelf)
        found.append((self, PageIndex(10**6)))

    def taken(self: PageNews) -> tuple[Change, ...]:
        changes = take(self)
        index = next(one for news, one in found if news is self)
        for change in changes:
            index.remove(1, change.shelf, change.removed)
            index.store(1, change.shelf, change.stored)
        assert set(index._holders) == {key for _, _, key in self._known.values()}
        return changes

    monkeypatch.setattr(PageNews, "__init__", init)
    monkeypatch.setattr(PageNews, "take", taken)
    return found


@pytest.mark.parametrize("pages", [40, 60, 400])
@pytest.mark.parametrize("publication", list(Publication))
def test_what_was_told_less_what_went_is_what_the_kernel_has(
    pages: int, publication: Publication, watched: list[tuple[PageNews, PageIndex]]
) -> None:
    tables = replay(
        agents(12, 5, grow=2), total_pages=pages, instances=2, publication=publication, loop=Loop.CLOSED
    )
    for (news, index), counters in zip(watched[::2], tables.counters, strict=True):
        left = counters.indexed_pages - counters.evicted_pages
        assert len(index) == len(news._known) == left > 0


@pytest.mark.parametrize("write", list(Write))
def test_the_lower_tiers_are_told_in_the_same_way(
    write: Write, watched: list[tuple[PageNews, PageIndex]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[tuple[Store, PageIndex]] = []
    begin, take = Store.__init__, StoreNews.take

    def init(self: Store, *args: Any) -> None:
        begin(self, *args)
        stores.append((self, PageIndex(10**6)))

    def taken(self: StoreNews) -> tuple[Change, ...]:
        changes = take(self)
        for change in changes:
            stores[0][1].remove(1, change.shelf, change.removed)
            stores[0][1].store(1, change.shelf, change.stored)
        assert self._known.keys() == stores[0][0]._pages.keys()
        assert set(self._known.values()) == set(stores[0][1]._holders)
        return changes

    monkeypatch.setattr(Store, "__init__", init)
    monkeypatch.setattr(StoreNews, "take", taken)
    tiers = TierConfig(90, write=write, storage=True, min_restore_pages=1, restore_s_per_page=1e-9)
    replay(
        agents(14, 5), total_pages=45, max_running=2, instances=2, tiers=tiers, storage_pages=120,
        loop=Loop.CLOSED,
    )  # fmt: skip
    assert [len(index) > 0 for _, index in watched] == [True] * 4
    assert 0 < len(stores[0][0]) == len(stores[0][1]) <= 120


def test_one_page_has_one_key_in_every_tier() -> None:
    """Requests far apart on one instance of two: what L1 lost is known to be in L2, and is restored."""
    tiers = TierConfig(500, write=Write.THROUGH, min_restore_pages=1, restore_s_per_page=1e-9)
    routing = Routing(FleetConfig(policy=RoutingPolicy.AFFINITY))
    trace = [request(f"r{i}", range(20 * (i % 3), 20 * (i % 3) + 20), arrival=9.0 * i) for i in range(9)]
    tables = replay(trace, total_pages=30, instances=2, tiers=tiers, routing=routing)
    both = tables.routes.join(tables.requests, on="id").filter(pl.col("cached_l2") > 0)
    assert both.height > 0
    assert both["found_l2"].to_list() == both["cached_l2"].to_list()
