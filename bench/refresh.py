"""What a `window` pass costs: 128 waiting requests with 32k-token prompts, a tree of 10,000 nodes.

usage: python bench/refresh.py [--sglang PYTHON] [--rounds 50]

CPU time of one pass (median, range), in three situations: nothing has changed since the last pass; every
request's end node has gained a branch; the same node is the end of all 128 and has gained one. With
--sglang, the interpreter of an environment that has SGLang, 128 full matches of its radix tree (python and
native core) on the same keys, timed alternately with ours, and the ratio. Targets: a pass <= 0.01 x
128 matches and <= 1 % of a decode step (bench/decode.py; the default model's is 10 to 30 ms).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterable

PAGE, WAITING, PROMPT, NODES = 16, 128, 32768, 10_000


def prompts() -> list[array[int]]:
    """Groups of 8 share 24k tokens; each prompt is cached but for its last 100 tokens."""
    found = []
    for n in range(WAITING):
        group = random.Random(n // 8)
        own = random.Random(1000 + n)
        tokens = array("i", (group.randrange(150_000) for _ in range(24 * 1024)))
        tokens.extend(own.randrange(150_000) for _ in range(PROMPT - len(tokens)))
        found.append(tokens)
    return found


def cached(prompt: array[int]) -> array[int]:
    return prompt[: (PROMPT - 100) // PAGE * PAGE]


def filler() -> Iterable[array[int]]:
    """Short prompts below a common start, for a tree of NODES nodes in all."""
    common = array("i", range(256))
    for n in range(NODES):
        yield common + array("i", (200_000 + 64 * n + i for i in range(64)))


def cpu_us(action: Callable[[], object]) -> float:
    gc.collect()
    gc.disable()
    begun = time.process_time_ns()
    action()
    spent = (time.process_time_ns() - begun) / 1000
    gc.enable()
    return spent


def ours() -> dict[str, Callable[[], float]]:
    """Situations by name; each call times one pass."""
    from hotprefix.kernel.config import KernelConfig
    from hotprefix.kernel.kernel import Kernel
    from hotprefix.kernel.request import Namespace, Request

    pages = 5 * NODES + WAITING * PROMPT // PAGE
    kernel = Kernel(KernelConfig(total_pages=pages, page_size=PAGE, max_running=1))
    tiers, tree = kernel._s.l1, kernel._s.l1.tree

    def insert(key: array[int]) -> None:
        data = key.tobytes()
        count = len(key) // PAGE
        handle = tree.pin_root(Namespace())
        match = tree.lookup(Namespace(), data, count)
        have = match.pages if match else 0
        own = tiers.pool.allocate(count - have)
        known = tree.pages_of(match) if match and have else []
        inserted = tree.insert(handle, data, known + own)
        tiers.pool.index(own)
        tree.unpin(inserted.handle)

    for key in filler():
        insert(key)
    waiting = prompts()
    for prompt in waiting:
        insert(cached(prompt))
    for n, prompt in enumerate(waiting):
        kernel.submit(Request(f"r{n}", prompt.tobytes(), 1), 0.0)
    refresh = kernel._planner._refresh
    refresh.run()
    branch = iter(range(300_000, 1 << 30))
    print(f"tree of {tree.nodes} nodes, {tree.total_pages} pages")

    def again() -> float:
        return cpu_us(refresh.run)

    def each_changed() -> float:
        for prompt in waiting:
            insert(cached(prompt) + array("i", [next(branch)] * PAGE))
        return cpu_us(refresh.run)

    def full_lookups() -> float:
        for seq in kernel._s.queue:
            seq.memo = None
        return cpu_us(refresh.run)

    return {"nothing changed": again, "each end changed": each_changed, "no memo at all": full_lookups}


PEER = r"""
import gc, json, random, sys, time
from array import array
import torch
torch.set_num_threads(1)
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
sys.path.insert(0, sys.argv[1])
import refresh as bench

class Allocator:
    device, page_size, size, size_full = torch.device("cpu"), bench.PAGE, 1 << 24, 1 << 24
    def free_segment(self, v, start_pos=0): ...
    free_full_segment = free_segment
    def free(self, v): ...
    def available_size(self): return 0
    def mamba_full_cache_donor(self): return None

class Table:
    req_to_token = torch.zeros((4, 8), dtype=torch.int32)

def make(kind):
    p = CacheInitParams(disable=False, req_to_token_pool=Table(), token_to_kv_pool_allocator=Allocator(),
                        page_size=bench.PAGE)
    if kind == "python":
        return RadixCache(p)
    p.tree_components, p.tree_core_backend = (ComponentType.FULL,), "rust"
    return UnifiedRadixCache(p)

waiting = [array("q", p) for p in bench.prompts()]
trees = {kind: make(kind) for kind in ("python", "rust")}
values = torch.arange(bench.PROMPT, dtype=torch.int64)
for tree in trees.values():
    for key in bench.filler():
        key = array("q", key)
        tree.insert(InsertParams(key=RadixKey(key), value=values[: len(key)]))
    for p in waiting:
        key = p[: len(bench.cached(p))]
        tree.insert(InsertParams(key=RadixKey(key), value=values[: len(key)]))
print("ready", flush=True)
for line in sys.stdin:
    kind = line.strip()
    spent = bench.cpu_us(lambda: [
        trees[kind].match_prefix(MatchPrefixParams(key=RadixKey(p))) for p in waiting
    ])
    print(json.dumps(spent), flush=True)
"""


class Peer:
    def __init__(self, python: str) -> None:
        folder = __file__.rpartition("/")[0] or "."
        self._child = subprocess.Popen(
            [python, "-W", "ignore", "-c", PEER, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdout is not None
        while self._child.stdout.readline().strip() != "ready":
            if self._child.poll() is not None:
                sys.exit("the peer did not start")

    def match_all(self, kind: str) -> float:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(f"{kind}\n")
        self._child.stdin.flush()
        return float(json.loads(self._child.stdout.readline()))


def show(name: str, values: list[float], against: dict[str, list[float]]) -> None:
    line = f"{name:28} {statistics.median(values):10.0f} us  [{min(values):.0f} to {max(values):.0f}]"
    for peer, theirs in against.items():
        ratios = sorted(a / b for a, b in zip(values, theirs, strict=True))
        line += f"   / {peer} {statistics.median(ratios):.4f} [{ratios[0]:.4f} to {ratios[-1]:.4f}]"
    print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sglang", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    situations = ours()
    peer = Peer(args.sglang) if args.sglang else None
    times: dict[str, list[float]] = {name: [] for name in situations}
    theirs: dict[str, list[float]] = {kind: [] for kind in ("python", "rust")} if peer else {}
    for _ in range(args.rounds):
        for name, run in situations.items():
            times[name].append(run())
        for kind, values in theirs.items():
            assert peer is not None
            values.append(peer.match_all(kind))
    print(f"one pass over {WAITING} waiting requests, CPU time, {args.rounds} rounds")
    for name, values in times.items():
        show(name, values, theirs)
    for kind, values in theirs.items():
        show(f"SGLang, {kind}: {WAITING} matches", values, {})


if __name__ == "__main__":
    main()
