"""Another engine's blocks as our pages: what vLLM told, sizes, salts, adapters, media and groups."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from hotprefix.fleet.records import Change, Shelf
from hotprefix.records.kvwire import Batch, Cleared, PageEvent, Removed, Stored, from_wire
from hotprefix.router.foreign_keys import ForeignKeys, shelf_of
from tests.support.feeds import MODEL, page_keys
from tests.support.foreign_engine import Blocks, Naive, applied

FOLDER = Path(__file__).parents[1] / "fixtures" / "vllm-0.32"
A = list(range(100, 164))


def recorded() -> list[Batch]:
    lines = (FOLDER / "kv_events.jsonl").read_text().splitlines()
    return [from_wire(msgspec.msgpack.decode(bytes.fromhex(json.loads(line)["frames"][2]))) for line in lines]


class Followed:
    """Foreign keys, and what is there by the changes that they told."""

    def __init__(self, page_size: int = 4, limit: int = 1 << 18) -> None:
        self.foreign = ForeignKeys(MODEL, page_size, limit)
        self.pages: set[tuple[Shelf, int]] = set()

    def take(self, *events: PageEvent) -> Followed:
        self.pages = applied(self.pages, self.foreign.apply(events))
        return self

    def on(self, shelf: Shelf = Shelf.L1) -> set[int]:
        return {key for where, key in self.pages if where is shelf}


# -- vLLM ---------------------------------------------------------------------------------------------


def test_recorded_blocks_of_32_are_pages_of_16_of_the_same_token_ids() -> None:
    first, more, salted, evicting, reset = recorded()
    prompt = first.events[0].tokens  # type: ignore[union-attr]
    followed = Followed(16).take(*first.events)
    keys = page_keys(prompt, 16)
    assert followed.on() == set(keys)
    assert len(keys) == 14
    longer = prompt + more.events[0].tokens  # type: ignore[union-attr]
    assert followed.take(*more.events).on() == set(page_keys(longer, 16))
    followed.take(*salted.events)
    assert followed.on() == {*page_keys(longer, 16), *page_keys(prompt, 16, "tenant1")}
    followed.take(*evicting.events)
    assert followed.on() >= set(page_keys(evicting.events[-1].tokens, 16))  # type: ignore[union-attr]
    assert followed.take(*reset.events).on() == set(keys)


def test_after_each_recorded_batch_the_pages_are_those_that_brute_force_finds() -> None:
    followed, naive = Followed(16), Naive(16, {0: Blocks(32)})
    for batch in recorded():
        naive.apply(batch.events)
        assert followed.take(*batch.events).pages == naive.pages()
    assert followed.foreign.counters.mapped == 7 + 2 + 7 + 12 + 7


# -- sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 16, 24])
def test_blocks_of_any_size_are_the_same_pages(size: int) -> None:
    blocks, followed = Blocks(size), Followed(4)
    prompt = A[:48]
    followed.take(blocks.stored(prompt))
    keys = page_keys(prompt)
    assert followed.on() == set(keys)
    followed.take(blocks.removed(blocks.names(prompt)[-1:]))
    assert followed.on() == set(keys[: (48 - size) // 4])
    followed.take(blocks.stored(prompt, first=48 // size - 1))
    assert followed.on() == set(keys)


def test_a_page_that_two_blocks_touch_comes_and_goes_with_each_of_them() -> None:
    blocks, followed = Blocks(2), Followed(4)
    one, two = blocks.names(A[:4])
    keys = set(page_keys(A[:4]))
    assert followed.take(blocks.stored(A[:4])).on() == keys
    assert followed.take(blocks.removed([one])).on() == set()
    assert followed.take(blocks.removed([two])).on() == set()
    assert followed.take(blocks.stored(A[:2])).on() == set()
    assert followed.take(blocks.stored(A[:4], first=1)).on() == keys


def test_a_page_that_two_blocks_begin_with_stays_until_both_are_gone() -> None:
    blocks, followed = Blocks(8), Followed(4)
    other = [*A[:4], 1, 2, 3, 4]
    followed.take(blocks.stored(A[:8]), blocks.stored(other))
    assert followed.on() == {*page_keys(A[:8]), *page_keys(other)}
    assert followed.take(blocks.removed(blocks.names(A[:8]))).on() == set(page_keys(other))
    assert followed.take(blocks.removed(blocks.names(other))).on() == set()


# -- what keeps equal tokens apart ------------------------------------------------------------------------


def test_salt_and_adapter_are_part_of_the_key() -> None:
    blocks, followed = Blocks(4), Followed(4)
    for salt, adapter in ((None, None), ("x", None), (None, "lora"), ("lora", "lora"), ("x", "lora")):
        named = Blocks(4, seed=hash((salt, adapter)))
        followed.take(named.stored(A[:12], salt, adapter=adapter))
        keys = set(page_keys(A[:12], 4, salt, adapter))
        assert followed.on() >= keys, (salt, adapter)
    assert len(followed.on()) == 5 * 3
    numbered = Stored((1, 2), None, tuple(A[:8]), 4, ((7,), (7,)), adapter_id=7)
    assert followed.take(numbered).on() >= set(page_keys(A[:8], 4, None, "id 7"))
    assert blocks.names(A[:4])


@pytest.mark.parametrize(
    "extra",
    [
        ((("img", 0),), None, None), (None, ("an image's hash",), None), ((1.5,), None, None),
        (("salt", "image"), None, None), ((None,), None, None),
    ],
)  # fmt: skip
def test_blocks_of_other_content_and_all_behind_them_are_left_out(extra: tuple[object, ...]) -> None:
    followed = Followed(4)
    stored = Stored((1, 2, 3), None, tuple(A[:12]), 4, extra)  # type: ignore[arg-type]
    clean = 1 if extra[0] is None else 0
    followed.take(stored, Stored((4,), 3, tuple(A[12:16]), 4))
    assert followed.on() == set(page_keys(A[: 4 * clean]))
    assert followed.foreign.counters.other_content == 3 - clean
    assert followed.foreign.counters.unknown_parent == 1
    assert followed.take(Removed((1, 2, 3, 4))).on() == set()


# -- media and groups ---------------------------------------------------------------------------------


def test_each_medium_has_a_shelf() -> None:
    names = ["GPU", "gpu", None, "CPU", "CPU_PINNED", "STORAGE", "DISK", "EXTERNAL"]
    assert [shelf_of(name) for name in names] == [0, 0, 0, 1, 1, 2, 2, 2]


def test_a_block_is_known_until_all_media_have_lost_it_and_for_a_while_after() -> None:
    blocks, followed = Blocks(4), Followed(4)
    names, keys = blocks.names(A[:8]), set(page_keys(A[:8]))
    followed.take(blocks.stored(A[:8]), blocks.copied(names, "CPU"))
    assert (followed.on(), followed.on(Shelf.L2)) == (keys, keys)
    followed.take(blocks.removed(names))
    assert (followed.on(), followed.on(Shelf.L2)) == (set(), keys)
    followed.take(blocks.removed(names, "CPU"))
    assert followed.pages == set()
    assert len(followed.foreign._live) == 0
    followed.take(blocks.copied(names, "STORAGE"))
    assert followed.on(Shelf.L3) == keys, "a copy may be told after the original has gone"
    followed.take(Cleared())
    assert followed.pages == set()
    assert followed.take(blocks.copied(names, "CPU")).pages == set()


def test_a_page_counts_when_all_groups_of_layers_have_it() -> None:
    full, window = Blocks(4, 0), Blocks(8, 1)
    followed = Followed(4)
    keys = page_keys(A[:16])
    assert followed.take(full.stored(A[:16])).on() == set(keys), "no other group is known yet"
    followed.take(window.stored(A[:8]))
    assert followed.on() == set(keys[:2])
    followed.take(window.stored(A[:16], first=1), full.removed(full.names(A[:16])[3:]))
    assert followed.on() == set(keys[:3])
    followed.take(window.removed(window.names(A[:16])[:1]))
    assert followed.on() == set(keys[2:3])
    followed.take(Cleared(), full.stored(A[:4]))
    assert followed.on() == set(), "the groups stay known"


# -- bounds -------------------------------------------------------------------------------------------


def test_the_oldest_blocks_are_forgotten_and_their_pages_taken_out() -> None:
    blocks, followed = Blocks(4), Followed(4, limit=8)
    followed.take(blocks.stored(A[:32]))
    followed.take(blocks.stored([1, *A[:15]]))
    assert followed.foreign.counters.forgotten == 4
    assert followed.on() == {*page_keys(A[:32])[4:], *page_keys([1, *A[:15]])}
    followed.take(blocks.removed(blocks.names([1, *A[:15]])))
    assert len(followed.foreign._past) == 2
    naive = Naive(4, {0: blocks})
    naive.apply([blocks.stored(A[:32]), blocks.removed(blocks.names(A[:32])[:4])])
    assert followed.pages == naive.pages()


def test_a_block_that_stays_remembers_no_page_of_those_that_are_forgotten() -> None:
    """Many prompts go on from one block in the middle of a page."""
    blocks, live, past = Blocks(1), Followed(2, limit=4), Followed(2, limit=4)
    for number in range(20):
        prompt = [1, 2, 3, number]
        live.take(blocks.stored(prompt))
        past.take(blocks.stored(prompt), blocks.removed(blocks.names(prompt)[3:]))
    for followed in (live, past):
        shared = followed.foreign._live[blocks.names([1, 2, 3])[2]]
        assert len(shared.pages or ()) == 1


def test_keys_of_a_change_come_once_and_say_how_the_batch_ends() -> None:
    blocks, foreign = Blocks(4), ForeignKeys(MODEL, 4)
    names = blocks.names(A[:8])
    first = foreign.apply((blocks.stored(A[:8]), blocks.removed(names[1:]), blocks.stored(A[:8], first=1)))
    assert first == (Change(Shelf.L1, tuple(page_keys(A[:8]))),)
    assert foreign.apply((blocks.removed(names), blocks.stored(A[:4]))) == (
        Change(Shelf.L1, tuple(page_keys(A[:4])), tuple(page_keys(A[:8])[1:])),
    )


@pytest.mark.parametrize(("size", "most"), [(16, 560), (32, 700), (8, 620)])
def test_the_memory_of_a_block_is_bounded(size: int, most: int) -> None:
    """Bytes of a block, pages of 16. The documentation names them."""
    blocks, foreign = Blocks(size), ForeignKeys(MODEL, 16)
    events = [blocks.stored([n, *range(size * 64 - 1)]) for n in range(20)]
    tracemalloc.start()
    for event in events:
        foreign.apply((event,))
    used = tracemalloc.get_traced_memory()[0] / len(foreign)
    tracemalloc.stop()
    print(f"blocks of {size}: {used:.0f} bytes each")
    assert used < most
