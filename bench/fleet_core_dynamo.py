"""Dynamo's radix tree from Python, for fleet_core.py: run by a Python that has ai-dynamo-runtime.

Prints JSON: microseconds of a match of 2,048 blocks, and blocks applied a second. Events go in as JSON, as
this interface asks for, so most of the second figure is reading JSON; its index alone is quicker in Rust.
"""

from __future__ import annotations

import json
import random
import statistics
import time

from dynamo.llm import RadixTree

BLOCKS, BATCH = 2048, 64


def stored(number: int, hashes: list[int], parent: int | None) -> bytes:
    blocks = [{"block_hash": h, "tokens_hash": h} for h in hashes]
    data = {"stored": {"parent_hash": parent, "blocks": blocks}}
    return json.dumps({"event_id": number, "data": data, "dp_rank": 0}).encode()


def match_us(workers: int, holders: int) -> float:
    generator = random.Random(workers)
    tree, prompt = RadixTree(), [generator.getrandbits(63) for _ in range(BLOCKS)]
    for worker in range(workers):
        share = generator.randrange(64, BLOCKS) if worker < holders else 64
        tree.apply_event(worker, stored(0, prompt[:share], None))
    times = []
    for _ in range(53):
        begun = time.perf_counter()
        scores = tree.find_matches(prompt).scores
        times.append((time.perf_counter() - begun) * 1e6)
    assert len(scores) == workers
    return round(statistics.median(times[3:]), 1)


def blocks_per_s() -> float:
    generator = random.Random(0)
    tree = RadixTree()
    batches = [
        stored(n, [generator.getrandbits(63) for _ in range(BATCH)], None) for n in range(262_144 // BATCH)
    ]
    begun = time.perf_counter()
    for batch in batches:
        tree.apply_event(1, batch)
    tree.find_matches([1])  # waits for what is queued
    return round(BATCH * len(batches) / (time.perf_counter() - begun))


print(
    json.dumps(
        {
            "match_us_64": match_us(64, 8),
            "match_us_64_all": match_us(64, 64),
            "match_us_1024": match_us(1024, 8),
            "match_us_1024_all": match_us(1024, 1024),
            "blocks_per_s": blocks_per_s(),
        }
    )
)
