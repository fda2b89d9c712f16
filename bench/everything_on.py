"""What everything on costs the real engine: throughput with refresh, records and metrics against without.

usage: python bench/everything_on.py [--rounds 40] [--dtype auto] [--threads N]

A burst of 12 requests (4 groups; 64 shared and 32 own tokens, 32 outputs each), 4 running, the rest waiting,
so that every step has a queue to refresh. `off`: no refresh, no observer. `on`: window refresh on every pass,
event log, KV events over ZMQ to a subscriber of another thread, the live page's heat, and statistics taken
and pickled twice a second, as a scrape and the page do. `off again`: what two equal arms differ by. Target:
`on` loses at most 2 %.

All loops share the model and its pages, so they run one at a time; rounds alternate and every second one
goes backwards. Tokens a second are of prompts and outputs; CPU is the process time of all threads, thus also
what a second core hides. Ratios are round by round: median, and 95 % of the bootstrapped median.
What the loop's own thread adds is measured apart, since the noise of the forward passes is larger than it:
seconds outside the executor, `on` less `off`, as a share of the wall time of `off`.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.messages import Generate
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.token_engine import TokenEngine
from hotprefix.kernel.config import KernelConfig, Refresh
from hotprefix.records.kvevents import KVPublisher
from hotprefix.records.recorder import Recorder, RecordOptions

PAGE, PAGES = 16, 640
REQUESTS, GROUPS, SHARED, OWN, OUTPUTS, RUNNING = 12, 4, 64, 32, 32, 4
SCRAPE_S = 0.5
TOKENS = REQUESTS * (SHARED + OWN + OUTPUTS)
ARMS = ("off", "on", "off again")


@dataclass
class Found:
    """Of one arm, round by round. refreshed, records, batches: that it did what it is timed for."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    outside_s: list[float] = field(default_factory=list)
    steps: int = 0
    refreshed: int = 0
    records: int = 0
    batches: int = 0


@contextmanager
def subscriber(address: str) -> Iterator[None]:
    """Somebody who takes the KV events and throws them away."""
    context = zmq.Context.instance()
    ended = threading.Event()

    def take() -> None:
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(address)
        while not ended.is_set():
            if socket.poll(50):
                socket.recv_multipart()
        socket.close(0)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    yield
    ended.set()
    thread.join()


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    groups = [[rng.randrange(200, 40_000) for _ in range(SHARED)] for _ in range(GROUPS)]
    return [groups[n % GROUPS] + [rng.randrange(200, 40_000) for _ in range(OWN)] for n in range(REQUESTS)]


def make_loop(bare: TokenEngine, on: bool, folder: Path, address: str) -> EngineLoop:
    kernel = KernelConfig(
        total_pages=PAGES, page_size=PAGE, max_running=RUNNING, refresh=Refresh.WINDOW if on else Refresh.OFF
    )
    if not on:
        return bare.loop(kernel)
    log = folder / f"{time.monotonic_ns()}.jsonl"
    options = RecordOptions(bytes(32), log, make_publisher=lambda: KVPublisher(address))
    return bare.loop(kernel, observer=Recorder(options))


def run(loop: EngineLoop, burst: Sequence[Sequence[int]], scrape: bool) -> tuple[float, float]:
    """(wall seconds, CPU seconds) to the last token; closing the loop is not in them."""
    params = SamplingParams(max_tokens=OUTPUTS, temperature=0.0, ignore_eos=True)
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    for number, prompt in enumerate(burst):
        loop.submit(Generate(f"r{number}", tuple(prompt), params))
    asked = wall
    while loop.has_work:
        loop.step()
        if scrape and time.perf_counter() - asked > SCRAPE_S:
            asked = time.perf_counter()
            pickle.dumps(loop.stats())
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(bare: TokenEngine, rounds: int, folder: Path) -> dict[str, Found]:
    found = {arm: Found() for arm in ARMS}
    address = f"ipc://{folder}/kv"
    for turn in range(rounds + 1):
        burst = prompts(turn)
        for arm in ARMS if turn % 2 else reversed(ARMS):
            on = arm == "on"
            loop = make_loop(bare, on, folder, address)
            with subscriber(address):
                wall, cpu = run(loop, burst, on)
            if turn:
                note(found[arm], loop, wall, cpu)
            loop.close()
    return found


def note(found: Found, loop: EngineLoop, wall: float, cpu: float) -> None:
    stats = loop.stats()
    found.wall_s.append(wall)
    found.cpu_s.append(cpu)
    found.outside_s.append(wall - stats.insight.execute_s)
    found.steps = stats.steps
    found.refreshed = stats.insight.kernel.refresh_touches
    found.records = stats.insight.observed.written_records
    found.batches = stats.insight.observed.kv_batches


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    rng = random.Random(0)
    again = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), again[50], again[1949]


def show(found: dict[str, Found]) -> None:
    for arm, f in found.items():
        rates = sorted(TOKENS / s for s in f.wall_s)
        print(
            f"  {arm:10} {statistics.median(rates):7.0f} tokens/s [{rates[0]:.0f} to {rates[-1]:.0f}], "
            f"CPU {statistics.median(f.cpu_s):.2f} s, {f.steps} steps, {f.refreshed} prefixes refreshed, "
            f"{f.records} records, {f.batches} KV batches"
        )
    off = found["off"]
    for arm in ARMS[1:]:
        wall = [a / b for a, b in zip(off.wall_s, found[arm].wall_s, strict=True)]
        cpu = [a / b for a, b in zip(found[arm].cpu_s, off.cpu_s, strict=True)]
        added = zip(found[arm].outside_s, off.outside_s, off.wall_s, strict=True)
        share = median_interval([(on - without) / wall_s for on, without, wall_s in added])
        print(f"  {arm} - off, outside the executor {share[0]:.3%} [{share[1]:.3%} to {share[2]:.3%}] of off")
        for name, values, target in (("throughput", wall, " (target >= 0.98)"), ("CPU", cpu, "")):
            middle, low, high = median_interval(values)
            print(f"  {arm} / off, {name:10} {middle:.4f} [{low:.4f} to {high:.4f}]{target}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    bare = TokenEngine.load("default", args.dtype, "cpu", pages=PAGES, page_size=PAGE, threads=args.threads)
    print(f"load {os.getloadavg()[0]:.1f} before")
    with tempfile.TemporaryDirectory() as folder:
        show(measure(bare, args.rounds, Path(folder)))
    print(f"load {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
