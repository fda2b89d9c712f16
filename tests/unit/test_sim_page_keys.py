"""Page keys: what a fleet is told of a kernel's pages is what that kernel finds."""

from __future__ import annotations

import numpy as np
import pytest

from hotprefix.fleet.index import PageIndex
from hotprefix.fleet.records import Shelf
from hotprefix.kernel.config import Publication
from hotprefix.kernel.request import Namespace
from hotprefix.lab.sim.arrivals import Loop
from hotprefix.lab.sim.page_keys import PageKeys, PageNews
from tests.support.replays import agents, replay

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


def test_pages_with_equal_tokens_have_keys_of_their_own() -> None:
    assert len(set(PageKeys(2).of_prompt(A, tokens(*[7] * 40)))) == 20


def test_a_chain_goes_on_from_any_page() -> None:
    keys, ids = PageKeys(4), np.random.default_rng(1).integers(0, 2**31 - 1, 64, dtype=np.int32).tobytes()
    whole = keys.sums(keys.root(A), 0, ids)
    for page in range(1, 16):
        assert np.array_equal(keys.sums(int(whole[page - 1]), page, ids[page * 16 :]), whole[page:])


@pytest.mark.parametrize("pages", [40, 60, 400])
@pytest.mark.parametrize("publication", list(Publication))
def test_what_was_told_less_what_went_is_what_the_kernel_has(
    pages: int, publication: Publication, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two instances, so that there is a fleet to tell. The index is built from the news alone."""
    watched: list[tuple[PageNews, PageIndex]] = []
    begin, take = PageNews.__init__, PageNews.take

    def init(self: PageNews, keys: PageKeys) -> None:
        begin(self, keys)
        watched.append((self, PageIndex(10**6)))

    def taken(self: PageNews) -> object:
        changes = take(self)
        index = next(one for news, one in watched if news is self)
        for change in changes:
            index.remove(1, Shelf.L1, change.removed)
            index.store(1, Shelf.L1, change.stored)
        assert set(index._holders) == {key for _, _, key in self._known.values()}
        return changes

    monkeypatch.setattr(PageNews, "__init__", init)
    monkeypatch.setattr(PageNews, "take", taken)
    tables = replay(
        agents(12, 5, grow=2), total_pages=pages, instances=2, publication=publication, loop=Loop.CLOSED
    )
    for (news, index), counters in zip(watched, tables.counters, strict=True):
        left = counters.indexed_pages - counters.evicted_pages
        assert len(index) == len(news._known) == left > 0
