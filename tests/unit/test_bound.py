"""The clairvoyant bound against every possible cache, and LRU and FIFO against plain lists."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotprefix.errors import ConfigError
from hotprefix.lab.bound.clairvoyant import clairvoyant
from hotprefix.lab.bound.paths import Bound, Paths, read_paths
from hotprefix.lab.bound.recency import fifo, lru
from hotprefix.lab.trace.ideal import EndlessCache
from hotprefix.lab.trace.trace_request import TraceRequest

BLOCK = 4


def request(
    blocks: list[int], length: int | None = None, answer: list[int] | None = None, outputs: int = 1
) -> TraceRequest:
    return TraceRequest(
        id="",
        input_length=len(blocks) * BLOCK if length is None else length,
        output_length=outputs,
        blocks=np.array(blocks, dtype=np.int32),
        output_blocks=None if answer is None else np.array(answer, dtype=np.int32),
    )


def paths(*blocks: list[int]) -> Paths:
    return read_paths([request(b) for b in blocks], BLOCK)


def reused(bound: Bound) -> list[int]:
    return (bound.by_request // BLOCK).tolist()


# -- traces for hypothesis: paths in one tree -----------------------------------------------------


def as_trace(words: list[tuple[list[int], int]]) -> list[TraceRequest]:
    """Words over a small alphabet; each prefix has an id. The last `n` of a word are an answer."""
    names: dict[tuple[int, ...], int] = {}
    found = []
    for word, n in words:
        ids = [names.setdefault(tuple(word[:k]), len(names)) for k in range(1, len(word) + 1)]
        cut = max(1, len(ids) - n)
        found.append(request(ids[:cut], answer=ids[cut:] or None, outputs=n * BLOCK + 1))
    return found


words = st.lists(st.integers(0, 2), min_size=1, max_size=4)
prompts = st.lists(st.tuples(words, st.just(0)), min_size=1, max_size=6).map(as_trace)
answered = st.lists(st.tuples(words, st.integers(0, 2)), min_size=1, max_size=6).map(as_trace)


def best(trace: list[TraceRequest], capacity: int) -> int:
    """Reused blocks of the best prefix-closed cache there is, by trying them all."""
    steps = [(tuple(r.blocks), tuple(r.output_blocks if r.output_blocks is not None else ())) for r in trace]
    parent = {
        b: a
        for prompt, answer in steps
        for a, b in zip((None, *prompt, *answer), prompt + answer, strict=False)
    }

    @cache
    def after(step: int, held: frozenset[int]) -> int:
        if step == len(steps):
            return 0
        prompt, answer = steps[step]
        hits = next((n for n, block in enumerate(prompt) if block not in held), len(prompt))
        there = held.union(prompt, answer)
        return hits + max(
            after(step + 1, frozenset(kept))
            for size in range(min(capacity, len(there)) + 1)
            for kept in combinations(sorted(there), size)
            if all(parent[b] is None or parent[b] in kept for b in kept)
        )

    return after(0, frozenset())


@settings(max_examples=60)
@given(trace=prompts, capacity=st.integers(0, 4))
def test_clairvoyant_is_the_best_there_is(trace: list[TraceRequest], capacity: int) -> None:
    (bound,) = clairvoyant(read_paths(trace, BLOCK), [capacity])
    assert bound.reused_units == best(trace, capacity)


@settings(max_examples=60)
@given(trace=answered, capacity=st.integers(0, 4))
def test_clairvoyant_is_no_less_where_answers_bring_blocks_back(
    trace: list[TraceRequest], capacity: int
) -> None:
    (bound,) = clairvoyant(read_paths(trace, BLOCK), [capacity])
    assert bound.reused_units >= best(trace, capacity)


def test_a_parent_that_is_generated_again_is_all_that_separates_bound_and_best() -> None:
    """1 need not be kept until the fourth request writes it again; a tree must, for 2 to mean anything, and
    then has no room for 5."""
    trace = [request([5]), request([0, 1, 2]), request([5]), request([0], answer=[1]), request([0, 1, 2])]
    assert best(trace, 3) == 4
    (bound,) = clairvoyant(read_paths(trace, BLOCK), [3])
    assert reused(bound) == [0, 0, 1, 1, 3]


@settings(max_examples=200)
@given(trace=answered)
def test_more_capacity_never_lowers_clairvoyant_reuse(trace: list[TraceRequest]) -> None:
    capacities = list(range(30))
    bounds = clairvoyant(read_paths(trace, BLOCK), capacities)
    reuse = [b.reused_units for b in bounds]
    assert reuse == sorted(reuse)
    assert [b.capacity for b in bounds] == capacities
    assert reuse[0] == 0
    endless = EndlessCache(BLOCK)
    assert bounds[-1].by_request.tolist() == [endless.add(r).tokens for r in trace]


@settings(max_examples=200)
@given(trace=answered, capacity=st.integers(1, 8))
def test_lru_and_fifo_are_what_plain_lists_do_and_never_beat_the_bound(
    trace: list[TraceRequest], capacity: int
) -> None:
    (bound,) = clairvoyant(read_paths(trace, BLOCK), [capacity])
    recent, first = lru(read_paths(trace, BLOCK), capacity), fifo(read_paths(trace, BLOCK), capacity)
    assert reused(recent) == plain_lru(trace, capacity)
    assert reused(first) == plain_fifo(trace, capacity)
    assert max(recent.reused_units, first.reused_units) <= bound.reused_units


def test_lru_and_fifo_on_longer_traces() -> None:
    """Where the last unit to stay is the first that a prompt needs, which short traces seldom come to."""
    rng = random.Random(5)
    for _ in range(600):
        words = [([rng.choice([0, 0, 1, 2]) for _ in range(rng.randint(1, 5))], 0) for _ in range(20)]
        trace, capacity = as_trace(words), rng.randint(1, 10)
        assert reused(fifo(read_paths(trace, BLOCK), capacity)) == plain_fifo(trace, capacity)
        assert reused(lru(read_paths(trace, BLOCK), capacity)) == plain_lru(trace, capacity)


def plain(trace: list[TraceRequest]) -> list[tuple[list[int], list[int]]]:
    return [(r.blocks.tolist(), [] if r.output_blocks is None else r.output_blocks.tolist()) for r in trace]


def plain_lru(trace: list[TraceRequest], capacity: int) -> list[int]:
    held: list[int] = []  # least recent first, and of one request the deepest first
    hits = []
    for prompt, answer in plain(trace):
        hits.append(next((n for n, b in enumerate(prompt) if b not in held), len(prompt)))
        path = prompt + answer
        held = ([b for b in held if b not in path] + path[::-1])[-capacity:]
    return hits


def plain_fifo(trace: list[TraceRequest], capacity: int) -> list[int]:
    held: list[int] = []
    hits = []
    for prompt, answer in plain(trace):
        hits.append(next((n for n, b in enumerate(prompt) if b not in held), len(prompt)))
        for block in prompt + answer:
            if block not in held:
                held = [*held, block][-capacity:]
    return hits


# -- by example -----------------------------------------------------------------------------------

CYCLE = ([0, 1, 2], [3, 4, 5], [6, 7, 8]) * 3


def test_a_cycle_above_capacity_is_lost_on_lru_and_kept_in_part_by_who_knows() -> None:
    assert reused(lru(paths(*CYCLE), 6)) == [0] * 9
    assert reused(fifo(paths(*CYCLE), 6)) == [0] * 9
    (bound,) = clairvoyant(paths(*CYCLE), [6])
    assert reused(bound) == [0, 0, 0, 3, 3, 0, 3, 3, 0]
    assert (bound.reused_units, bound.total_units, bound.reused_tokens, bound.total_tokens) == (
        12,
        27,
        48,
        108,
    )
    assert bound.share == 12 / 27


def test_a_path_longer_than_the_cache_keeps_its_beginning() -> None:
    twice = paths([0, 1, 2, 3], [0, 1, 2, 3])
    assert reused(lru(twice, 3)) == [0, 3]
    assert reused(fifo(twice, 3)) == [0, 0], "the root came first"
    assert reused(clairvoyant(twice, [3])[0]) == [0, 3]


def test_what_nobody_uses_again_pushes_nothing_out() -> None:
    trace = paths([0, 1], [2, 3, 4, 5], [0, 1])
    assert reused(clairvoyant(trace, [2])[0]) == [0, 0, 2]
    assert reused(lru(trace, 2)) == [0, 0, 0]


def test_the_partial_last_block_counts_with_the_tokens_it_has() -> None:
    trace = read_paths([request([0, 1], length=6)] * 2, BLOCK)
    (bound,) = clairvoyant(trace, [9])
    assert (bound.reused_units, bound.by_request.tolist(), bound.total_tokens) == (2, [0, 6], 12)


def test_by_pages_only_complete_ones_count_and_one_token_is_computed() -> None:
    whole, partial = request([0, 1], length=8), request([0, 1], length=7)
    assert reused(clairvoyant(read_paths([whole, whole], BLOCK, BLOCK), [9])[0]) == [0, 1]
    assert reused(clairvoyant(read_paths([whole, request([0, 1, 2])], BLOCK, BLOCK), [9])[0]) == [0, 2]
    assert reused(clairvoyant(read_paths([partial, whole], BLOCK, BLOCK), [9])[0]) == [0, 1]
    halves = read_paths([partial, whole, whole], BLOCK, 2)
    assert (halves.unit_tokens, halves.ids, halves.counted.tolist()) == (2, 4, [3, 3, 3])
    assert [u.tolist() for u in halves.units] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert clairvoyant(halves, [9])[0].by_request.tolist() == [0, 6, 6]


@pytest.mark.parametrize("prompt", [[0], [0, 1]])
def test_generated_pages_are_there_but_the_last_token_has_no_kv(prompt: list[int]) -> None:
    """Six prompt tokens grow block 1, named or not; the seventh and eighth are generated, and one more for
    its KV."""
    after = request([0, 1, 2], length=12)
    for outputs, hits in ((2, 1), (3, 2)):
        first = request(prompt, length=6, answer=[1], outputs=outputs)
        assert reused(clairvoyant(read_paths([first, after], BLOCK, BLOCK), [9])[0]) == [0, hits]


def test_an_answer_counts_for_its_own_prompt_only_where_it_names_the_partial_block() -> None:
    for prompt, count in (([0], 1), ([0, 1], 2), ([0, 7], 1)):
        trace = read_paths([request(prompt, length=6, answer=[1], outputs=9)], BLOCK)
        assert trace.counted.tolist() == [count]
        assert trace.units[0].tolist() == [0, 1]


def test_requests_without_blocks_and_no_requests_at_all() -> None:
    for trace in (read_paths([request([], length=9)] * 2, BLOCK), read_paths([], BLOCK)):
        for bound in (*clairvoyant(trace, [1]), lru(trace, 1), fifo(trace, 1)):
            assert (bound.reused_units, bound.total_units, bound.share) == (0, 0, 0.0)


@pytest.mark.parametrize("page_size", [0, 3, 8])
def test_a_page_that_does_not_divide_the_block_is_refused(page_size: int) -> None:
    with pytest.raises(ConfigError, match=f"page_size={page_size}"):
        read_paths([], BLOCK, page_size)
