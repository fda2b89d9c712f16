"""The prefix tree's cost: CPU microseconds of matching 128k tokens and of evicting.

usage: python bench/tree.py [PAGE]

The shapes are those that other engines' trees are measured with: one key of 131,072 tokens saved as 1, 32
or 1024 runs; 10,000 leaves of 4 own pages below a common prefix. Process time, one thread, garbage
collection off while the clock runs; each row is the median and the minimum of its repeats.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable

from hotprefix.kernel import tokens as tk
from hotprefix.kernel.cache.evict import POLICIES
from hotprefix.kernel.cache.tree import PrefixTree
from hotprefix.kernel.config import Eviction
from hotprefix.kernel.request import Namespace

TOKENS = 131_072
LEAVES = 10_000
NS = Namespace()


def row(
    name: str, run: Callable[[PrefixTree], object], build: Callable[[], PrefixTree], repeats: int
) -> None:
    """Print one line. `build` makes what `run` gets; it is not timed and is called once per repeat."""
    times = []
    for _ in range(repeats + 2):
        tree = build()
        gc.collect()
        gc.disable()
        start = time.process_time_ns()
        run(tree)
        times.append((time.process_time_ns() - start) / 1000)
        gc.enable()
    times = times[2:]
    print(f"{name:28} {statistics.median(times):10.1f} us   (min {min(times):9.1f}, n={len(times)})")


def save(tree: PrefixTree, key: bytes, pages: list[int]) -> None:
    tree.unpin(tree.insert(tree.pin_root(NS), key, pages).handle)


def in_runs(page: int, key: bytes, run: int) -> PrefixTree:
    """The key in runs of `run` tokens, each published by somebody else."""
    tree = PrefixTree(page, POLICIES[Eviction.LRU])
    for end in range(run, TOKENS + 1, run):
        save(tree, key[: end * tk.TOKEN_BYTES], list(range(end // page)))
    assert tree.nodes == TOKENS // run
    return tree


def leaves(page: int) -> PrefixTree:
    tree = PrefixTree(page, POLICIES[Eviction.LRU])
    common = tk.encode(range(10_000_000, 10_000_256))
    for n in range(LEAVES):
        key = common + tk.encode(range(1000 * n, 1000 * n + 64))
        save(tree, key, list(range(320 // page)))
    return tree


def main() -> None:
    page = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    rng = random.Random(0)
    key = tk.encode(rng.randrange(150_000) for _ in range(TOKENS))
    asked = bytes(bytearray(key))  # equal, not the same object: nothing is saved by identity

    def match(tree: PrefixTree) -> None:
        found = tree.lookup(NS, asked, TOKENS)
        assert found is not None
        assert found.pages == TOKENS // page

    print(f"page {page}")
    for runs, repeats in ((1, 31), (32, 31), (1024, 15)):
        tree = in_runs(page, key, TOKENS // runs)
        row(f"match 128k tokens, {runs} runs", match, lambda t=tree: t, repeats)
    tree = leaves(page)
    row(f"evict one of {LEAVES} leaves", lambda t: t.evict(max(64 // page, 1)), lambda: tree, 31)
    row(f"evict all {LEAVES} leaves", lambda t: t.evict(10**9), lambda: leaves(page), 3)


if __name__ == "__main__":
    main()
