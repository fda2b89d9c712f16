"""How far a replay is off a server under bursts over HTTP, at shares of its saturation.

    python bench/near_saturation.py --out out/near [--requests 120] [--loads 0.5 0.7 0.95] [--calibrate 60]

Calibrates, starts our server with an event log for each load, sends bursts of prompts that share beginnings
(some clients leave early), and replays each log with the calibrated prices. Saturation is measured first: all
requests at once. Then it calibrates again, so that the table can say what the machine's own drift explains.
Errors are replay minus server, with their sign; times are from the request's arrival at the server, by its
log. What a client over HTTP waits beyond that is told beside it. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from hotprefix.cost.model import CostModel
from hotprefix.engine.config import EngineConfig
from hotprefix.lab.sim.replay import Replay
from hotprefix.lab.sim.simulate import simulate
from hotprefix.lab.trace.open_trace import open_trace
from hotprefix.records.derive import Derivation
from hotprefix.records.read_log import ReadReport, read_log
from hotprefix.records.request_row import RequestRow
from hotprefix.records.schema import Step

PREFIXES, PREFIX_TOKENS, OWN_TOKENS, OUTPUTS = 6, 256, (48, 160), (16, 96)
LEAVES = 0.07  # share of clients that leave after a few tokens
KV_TOKENS = 32768


@dataclass(frozen=True)
class Ask:
    """One request. at: seconds from the start. leaves: after so many tokens, None = stays."""

    at: float
    prompt: list[int]
    outputs: int
    leaves: int | None


def asks(count: int, span: float, seed: int) -> list[Ask]:
    """Bursts of one to eight, at random moments of `span` seconds; span 0: all at once."""
    rnd = random.Random(seed)
    heads = [[rnd.randrange(200, 40_000) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)]
    made: list[Ask] = []
    while len(made) < count:
        at, head = rnd.uniform(0, span), rnd.choice(heads)
        for _ in range(min(rnd.randint(1, 8), count - len(made))):
            own = [rnd.randrange(200, 40_000) for _ in range(rnd.randint(*OWN_TOKENS))]
            outputs = rnd.randint(*OUTPUTS)
            leaves = rnd.randint(2, 12) if rnd.random() < LEAVES else None
            made.append(Ask(at + rnd.uniform(0, 0.05), head + own, outputs, leaves))
    return sorted(made, key=lambda ask: ask.at)


@contextmanager
def server(log: Path, threads: int) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "hotprefix", "serve", "--port", str(port), "--events", str(log),
        "--kv-tokens", str(KV_TOKENS), "--threads", str(threads),
    ]  # fmt: skip
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        yield url
    finally:
        child.terminate()
        child.wait(60)


async def drive(url: str, work: list[Ask]) -> list[float | None]:
    """Each client's time to the first token; None for one that left."""
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        await one(client, url, Ask(0.0, [300] * 40, 4, None), time.perf_counter())
        start = time.perf_counter()
        return list(await asyncio.gather(*(one(client, url, ask, start) for ask in work)))


async def one(client: httpx.AsyncClient, url: str, ask: Ask, start: float) -> float | None:
    await asyncio.sleep(max(0.0, start + ask.at - time.perf_counter()))
    body = {"prompt": ask.prompt, "max_tokens": ask.outputs, "ignore_eos": True, "temperature": 0,
            "stream": True}  # fmt: skip
    sent, first, seen = time.perf_counter(), None, 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as r:
        r.raise_for_status()
        async for line in r.aiter_lines():
            if line.startswith("data: {"):
                first = time.perf_counter() - sent if first is None else first
                seen += 1
                if ask.leaves is not None and seen >= ask.leaves:
                    return None
    return first


def rows_of(log: Path) -> list[RequestRow]:
    derivation, found = Derivation(), []
    for record in read_log(log, ReadReport()):
        found += derivation.feed(record)
    return [*found, *derivation.finish()]


def calibrated(out: Path, seconds: float, threads: int) -> CostModel:
    subprocess.run(
        [sys.executable, "-m", "hotprefix", "calibrate", "--out", str(out), "--seconds", str(seconds),
         "--threads", str(threads), "--kv-tokens", str(KV_TOKENS)],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return CostModel.load(out)


def told(name: str, live: list[float], guess: list[float], between: list[list[float]]) -> dict[str, object]:
    """Percentiles, errors and what the calibration explains of them."""
    row: dict[str, object] = {"time": name, "requests": len(live)}
    for p in (50, 95):
        real, said = np.percentile(live, p), np.percentile(guess, p)
        ends = [np.percentile(values, p) / real - 1 for values in between]
        row |= {f"live p{p}": round(float(real), 4), f"error p{p}": f"{said / real - 1:+.1%}",
                f"explained p{p}": f"{min(ends):+.0%} to {max(ends):+.0%}"}  # fmt: skip
    row["mean error"] = f"{np.mean(guess) / np.mean(live) - 1:+.1%}"
    return row


def compared(log: Path, clients: list[float | None], costs: list[CostModel]) -> list[dict[str, object]]:
    """costs: the prices, then the same shorter and longer, and those of the second calibration."""
    trace = open_trace(log)
    kernel = EngineConfig(kv_tokens=KV_TOKENS).kernel()
    tables = [simulate(Replay(kernel, cost), trace, block_size=trace.block_size).requests for cost in costs]
    by_id = [{row["trace_id"]: row for row in table.iter_rows(named=True)} for table in tables]
    ended = [row for row in rows_of(log)[1:] if row.outcome in ("length", "stop") and row.ttft_s is not None]
    live = {row.request: row for row in ended}
    names = [name for name in live if name in by_id[0]]
    equal = sum(by_id[0][name]["cached_l1"] == live[name].cached for name in names)
    print(f"reuse equal in {equal} of {len(names)} requests that ended; {len(clients)} were sent", flush=True)

    def simulated(column: str, which: int) -> list[float]:
        return [by_id[which][n][column] - by_id[which][n]["arrival_s"] for n in names]

    found = []
    for label, column, field in (
        ("TTFT (log)", "first_token_s", "ttft_s"),
        ("completion (log)", "finish_s", "total_s"),
    ):
        guesses = [simulated(column, i) for i in range(len(costs))]
        found.append(told(label, [getattr(live[n], field) for n in names], guesses[0], guesses[1:]))
    waited = np.percentile([t for t in clients if t is not None], (50, 95))
    print(f"a client over HTTP waited for its first token: p50 {waited[0]:.3f} s, p95 {waited[1]:.3f} s")
    return found


def steps(log: Path, cost: CostModel, context: int) -> str:
    """Predicted / measured time of the steps that only decode, by how many requests decode in them: how far
    the prices are off, whatever the arrivals do. context: tokens that a request attends to, on average."""
    sums: dict[int, list[float]] = {}
    before = None
    for record in read_log(log, ReadReport()):
        if not isinstance(record, Step):
            continue
        if before is not None and before.running and not record.prefill_tokens and record.decode_tokens:
            found = sums.setdefault(record.decode_tokens.bit_length(), [0, 0.0, 0.0])
            found[0] += 1
            found[1] += record.t - before.t
            n = record.decode_tokens
            found[2] += cost.prices.step_s(0, 0, n, n * context)
            found[2] += cost.prices.scheduler_s(record.running, record.waiting)
        before = record
    return ", ".join(
        f"{1 << bits - 1}-{(1 << bits) - 1} decodes {said / real:.2f} (n={n:.0f})"
        for bits, (n, real, said) in sorted(sums.items())
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--requests", type=int, default=120)
    p.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.7, 0.95])
    p.add_argument("--calibrate", type=float, default=60.0, help="seconds, before and after")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seed", type=int, default=1)
    given = p.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    cost = calibrated(given.out / "before.json", given.calibrate, given.threads)
    print(cost.label, flush=True)
    work = asks(given.requests, 0.0, given.seed)
    with server(given.out / "all.jsonl", given.threads) as url:
        begun = time.perf_counter()
        asyncio.run(drive(url, work))
        rate = len(work) / (time.perf_counter() - begun)
    print(f"saturation: {rate:.2f} requests/s", flush=True)
    logs = []
    for load in given.loads:
        log = given.out / f"load{load:g}.jsonl"
        with server(log, given.threads) as url:
            span = given.requests / (rate * load)
            logs.append((load, log, asyncio.run(drive(url, asks(given.requests, span, given.seed + 1)))))
    after = calibrated(given.out / "after.json", given.calibrate, given.threads)
    off = 2 * (cost.fit.uncertainty or 0.0) if cost.fit else 0.0
    costs = [cost, cost.scaled(1 - off), cost.scaled(1 + off), after]
    results = []
    for load, log, clients in logs:
        print(f"\nat {load:.0%} of saturation", flush=True)
        context = PREFIX_TOKENS + sum(OWN_TOKENS) // 2 + sum(OUTPUTS) // 4
        for which, prices in (("before", cost), ("after", after)):
            print(f"step times, predicted / measured, prices of {which}: {steps(log, prices, context)}")
        for row in compared(log, clients, costs):
            print(json.dumps(row), flush=True)
            results.append({"load": load} | row)
    (given.out / "errors.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
