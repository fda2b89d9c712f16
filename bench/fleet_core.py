"""The fleet core's cost: a decision, blocks applied, memory of an entry.

usage: python bench/fleet_core.py [--json FILE] [--dynamo PYTHON]

Decisions are for a prompt of 2,048 page keys (32k tokens in pages of 16), of which all workers have the first
64 and 8 workers (or, in the worst case, all) each a share of its own, with 8 requests under way on each
worker. Whether the compiled copy runs is printed (hotprefix compile; HOTPREFIX_INTERPRETED=1 leaves it
alone). Process time, one thread, garbage collection off while the clock runs; medians and quartiles.
--dynamo: a Python that has ai-dynamo-runtime, whose index then does the same beside ours.
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
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from hotprefix import compiled
from hotprefix.cost.prices import Prices
from hotprefix.fleet.config import FleetConfig
from hotprefix.fleet.fleet import Fleet
from hotprefix.fleet.index import PageIndex
from hotprefix.fleet.records import Decision, Keys, Profile, RouteRequest, Shelf, Stage, WorkerReport

PAGE, PAGES, UNDER_WAY = 16, 2048, 8
BATCH, BLOCKS = 64, 262_144
PRICES = Prices(0.005, ((0, 1e-4),), 1e-9, ((0, 1e-4),), 1e-8, 1e-4, 1e-6, 1e-6)
DYNAMO = Path(__file__).with_name("fleet_core_dynamo.py")


def keys(generator: random.Random, count: int) -> Keys:
    """Chained keys of a prompt of its own."""
    return tuple(generator.getrandbits(64) for _ in range(count))


def fleet_of(workers: int, holders: int) -> tuple[Fleet, Keys]:
    """A fleet in which all workers have the first 64 pages of one prompt, `holders` of them each a share of
    its own, and every worker has requests under way."""
    generator = random.Random(workers)
    fleet = Fleet(FleetConfig())
    profile = Profile(PRICES, 100_000, PAGE, 8192, 256, 131_072)
    prompt = keys(generator, PAGES)
    for number in range(workers):
        fleet.join(f"w{number}", profile, 0.0)
        fleet.report(f"w{number}", WorkerReport(0.0, 0, 0, 0, 50_000, 40_000, 5_000, 5_000), 0.0)
        share = generator.randrange(64, PAGES) if number < holders else 64
        fleet.cached(f"w{number}", Shelf.L1, 0.0, prompt[:share])
    for number in range(workers * UNDER_WAY):
        own = keys(generator, 64)
        fleet.route(RouteRequest(f"u{number}", own, 64 * PAGE + 1, 100), 0.0)
    return fleet, prompt


def decisions(workers: int, holders: int, count: int) -> list[float]:
    """Microseconds of each decision."""
    fleet, prompt = fleet_of(workers, holders)
    times = []
    gc.collect()
    gc.disable()
    for number in range(count):
        request = RouteRequest(f"r{number}", prompt, PAGES * PAGE + 1, 100)
        begun = time.process_time_ns()
        decision = fleet.route(request, 1.0)
        times.append((time.process_time_ns() - begun) / 1000)
        assert isinstance(decision, Decision)
        fleet.progress(f"r{number}", Stage.CANCELLED, 1.0)
    gc.enable()
    return times[3:]


def applied(holders: int) -> float:
    """Blocks a second: stored in batches, by `holders` workers each, a tenth of them removed again."""
    generator = random.Random(0)
    batches = [keys(generator, BATCH) for _ in range(BLOCKS // BATCH // holders)]
    index = PageIndex(10 * BLOCKS)
    gc.collect()
    gc.disable()
    begun, blocks = time.process_time_ns(), 0
    for number, batch in enumerate(batches):
        for holder in range(holders):
            index.store(1 << holder, Shelf.L1, batch)
            blocks += BATCH
        if number % 10 == 0:
            index.remove(1, Shelf.L1, batch)
            blocks += BATCH
    seconds = (time.process_time_ns() - begun) / 1e9
    gc.enable()
    return blocks / seconds


def entry_bytes(holders: int) -> float:
    """Bytes of an entry that so many workers hold, its key included."""
    generator = random.Random(0)
    mask = sum(1 << (7 * n) for n in range(holders))
    tracemalloc.start()
    index = PageIndex(10 * BLOCKS)
    for _ in range(BLOCKS // BATCH):
        index.store(mask, Shelf.L1, keys(generator, BATCH))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / BLOCKS


def spread(figures: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(figures, n=4)
    return {"median": round(median, 1), "q1": round(low, 1), "q3": round(high, 1), "n": len(figures)}


def row(name: str, found: object) -> object:
    print(f"{name:34} {found}")
    return found


def repeated(run: Callable[[], float], count: int = 5) -> dict[str, float]:
    return spread([run() for _ in range(count)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dynamo")
    asked = parser.parse_args()
    print("compiled" if compiled.in_use() else "interpreted")
    figures = {
        "compiled": compiled.in_use(),
        "decision_us_64": row("decision, 64 workers, us", spread(decisions(64, 8, 203))),
        "decision_us_64_all": row("  each has another share", spread(decisions(64, 64, 203))),
        "decision_us_1024": row("decision, 1,024 workers, us", spread(decisions(1024, 8, 53))),
        "decision_us_1024_all": row("  each has another share", spread(decisions(1024, 1024, 53))),
        "blocks_per_s_1": row("blocks/s, one holder", repeated(lambda: applied(1))),
        "blocks_per_s_8": row("blocks/s, 8 holders each", repeated(lambda: applied(8))),
        "entry_bytes_1": row("bytes an entry, 1 holder", round(entry_bytes(1), 1)),
        "entry_bytes_64": row("bytes an entry, 64 holders", round(entry_bytes(64), 1)),
    }
    if asked.dynamo:
        done = subprocess.run(
            [asked.dynamo, str(DYNAMO)], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
        )
        figures["dynamo"] = row("Dynamo's index", json.loads(done.stdout.splitlines()[-1]))
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
