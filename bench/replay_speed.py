"""Requests replayed a second: our simulator against aisimulate, on Mooncake's conversation trace.

usage: python bench/replay_speed.py CONVERSATION.jsonl[.gz] [--peer-python PATH] [--load NAME ...]
                                    [--rounds 3] [--rows 5000] [--page 64] [--json FILE] [--profile]

Target: >= 1,000 requests a second on one core, and <= 3 times the wall time of aisimulate (0.13; a Rust
runtime behind Python). Its interpreter is given by --peer-python; without one, ours is measured alone.

Held equal: rows, arrivals, one instance, L1 in tokens, page size, 8,192 tokens a step, 256 running, chunked
prefill, prefix cache, LRU, first come first served without look-ahead, no pages kept for outputs to come,
pages visible from the step that computes them, no lower tiers; both read the rows as part of the time.
Different: the peer times a step by two parabolas (16.5 + 0.01518 n + 4.21e-7 n^2 ms for n prefill tokens;
5.74 + 54.01 p - 25.74 p^2 ms for decodes that read a share p of L1); ours is linear, so it goes through
those curves at a full step and at the load's mean p. Ours also keeps the tables of a replay. So the regimes
are shown beside the times: requests that decode at a time, TTFT, reuse and virtual time must agree before
the ratio means anything.

Rounds are interleaved, every second one backwards; all on one core. Shown are median and range; the ratio is
round by round, of wall time and of CPU time (the one to trust on a busy machine).
"""

from __future__ import annotations

import argparse
import cProfile
import datetime as dt
import gc
import gzip
import itertools
import json
import os
import pstats
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import polars as pl

from hotprefix import compiled
from hotprefix.cost.model import CostModel
from hotprefix.kernel.config import Flight, KernelConfig, Publication, Refresh
from hotprefix.lab.sim.replay import Replay
from hotprefix.lab.sim.simulate import Tables, simulate
from hotprefix.lab.trace.open_trace import open_trace

BLOCK: Final = 512
STEP_TOKENS: Final = 8192
RUNNING: Final = 256


@dataclass(frozen=True, slots=True)
class Load:
    """kv_tokens: of L1. speed: times as fast as recorded. used: share of L1 that decodes read, on average."""

    name: str
    kv_tokens: int
    speed: float
    used: float


ONE_H200: Final = 11_528 * 64  # what aisimulate finds beside Qwen3-32B in FP8
LOADS: Final = {
    load.name: load
    for load in (
        Load("saturated", ONE_H200, 1.0, 0.98),
        Load("half", ONE_H200, 0.5, 0.7),
        Load("roomy", 8 * ONE_H200, 1.0, 0.08),
    )
}

PEER: Final = """
import json, sys, time
from aisimulate.compiler import prediction_to_replay_spec
from aisimulate.config import CorePredictionConfig
from aisimulate.runner import EngineReplayRunnerFactory
from aisimulate.sweeper.replay import ReplayOutputRequirements

for line in sys.stdin:
    spec = prediction_to_replay_spec(CorePredictionConfig.model_validate(json.loads(line)))
    runner = EngineReplayRunnerFactory().create(0)
    wall, cpu = time.perf_counter(), time.process_time()
    report = runner.run(spec, output_requirements=ReplayOutputRequirements(include_raw_report=True))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(json.dumps({"wall": wall, "cpu": cpu, "report": report.metadata["native_report"]}), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One replay. wall_s, cpu_s: of the machine; virtual_s, ttft_s (mean): of the simulated clock. decoding:
    requests that decode at a time. reuse: share of prompt tokens found at first admission."""

    finished: int
    wall_s: float
    cpu_s: float
    virtual_s: float
    ttft_s: float
    reuse: float
    decoding: float


# -- ours -----------------------------------------------------------------------------------------------


def cost_model(load: Load) -> CostModel:
    """The peer's curves, made linear at this load (module docstring)."""
    full_ms = 16.50142 + 0.01518344 * STEP_TOKENS + 4.209989e-7 * STEP_TOKENS**2
    return CostModel(
        name="linear", source="aisimulate's built-in polynomials", model="none", dtype="none",
        hardware="none", date=dt.date(2026, 1, 1), base_s=0.00574,
        prefill_token_s=full_ms / STEP_TOKENS / 1000, prefill_context_s=0.0, decode_s=0.0,
        decode_context_s=(54.01 - 25.74 * load.used) / load.kv_tokens / 1000,
        scheduler_base_s=0.0, scheduler_running_s=0.0, scheduler_waiting_s=0.0, kv_token_bytes=1,
    )  # fmt: skip


def our_tables(rows: Path, load: Load, page: int) -> Tables:
    kernel = KernelConfig(
        total_pages=load.kv_tokens // page, page_size=page, max_batched_tokens=STEP_TOKENS,
        max_running=RUNNING, publication=Publication.SCHEDULE, flight=Flight.NONE, refresh=Refresh.OFF,
        lookahead=0, output_reserve=0.0,
    )  # fmt: skip
    return simulate(Replay(kernel, cost_model(load), speed=load.speed), open_trace(rows), block_size=BLOCK)


def ours(rows: Path, load: Load, page: int) -> tuple[Run, Tables]:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    tables = our_tables(rows, load, page)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    done = tables.requests.filter(pl.col("outcome") == "finished")
    ttft, reuse, decoding = done.select(
        ttft=(pl.col("first_token_s") - pl.col("arrival_s")).mean(),
        reuse=pl.col("matched_at_admission").sum() / pl.col("input_tokens").sum(),
        decoding=(pl.col("finish_s") - pl.col("first_token_s")).sum() / tables.virtual_s,
    ).row(0)
    return Run(done.height, wall, cpu, tables.virtual_s, ttft, reuse, decoding), tables


def show_steps(tables: Tables) -> None:
    """What the kernel had to do."""
    [counters] = tables.counters
    prefill, decode, outputs = tables.windows.select("prefill_s", "decode_s", "output_tokens").sum().row(0)
    print(
        f"  ours: {counters.steps:,} steps, {outputs / counters.steps:.1f} "
        f"decodes a step, {prefill / (prefill + decode):.0%} of the time in steps that prefill, "
        f"{counters.retractions} retractions"
    )


def profile(rows: Path, load: Load, page: int) -> None:
    with cProfile.Profile() as profiler:
        our_tables(rows, load, page)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


# -- the peer -------------------------------------------------------------------------------------------


class Peer:
    """aisimulate in a process of its own, asked for one replay at a time."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(self, rows: Path, load: Load, page: int) -> Run:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(peer_config(rows, load, page)), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("the peer ended; its reason is above")
        found = json.loads(answer)
        report = found["report"]
        done = report["completed_requests"]
        gaps = report["total_output_tokens"] - done
        return Run(
            done, found["wall"], found["cpu"], report["duration_ms"] / 1000, report["mean_ttft_ms"] / 1000,
            report["first_admission_prefix_cache_reused_ratio"],
            gaps * report["mean_itl_ms"] / report["duration_ms"],
        )  # fmt: skip


def peer_config(rows: Path, load: Load, page: int) -> dict[str, Any]:
    """What `aisimulate predict -c` takes. The model matters not: time and capacity are given."""
    worker = {
        "timing": {"type": "polynomial"},
        "scheduler": {"max_batched_tokens": STEP_TOKENS, "max_sequences": RUNNING},
        "kv_cache": {"block_size": page, "capacity": {"type": "fixed", "blocks": load.kv_tokens // page}},
    }
    source = {"type": "trace", "paths": [str(rows)], "format": "mooncake", "block_size": BLOCK}
    return {
        "traffic": {"source": source, "load": {"type": "trace_timestamps", "speedup": load.speed}},
        "engine": {
            "mode": "aggregated", "model": "Qwen/Qwen3-32B-FP8", "hardware": "h200_sxm", "backend": "vllm",
            "context_length": 131_072, "workers": {"aggregated": worker},
        },
    }  # fmt: skip


# -- side by side ---------------------------------------------------------------------------------------


def spread(values: Iterable[float], form: str = ",.2f") -> str:
    found = sorted(values)
    return f"{statistics.median(found):{form}} [{found[0]:{form}} to {found[-1]:{form}}]"


def show(name: str, runs: list[Run], count: int) -> None:
    last = runs[-1]
    print(
        f"  {name:10} {spread((count / r.wall_s for r in runs), ',.0f')} requests/s; "
        f"wall {spread(r.wall_s for r in runs)} s, CPU {spread(r.cpu_s for r in runs)} s"
    )
    print(
        f"  {'':10} {last.finished:,} finished in {last.virtual_s:,.0f} virtual s, mean TTFT "
        f"{last.ttft_s:,.2f} s, reuse {last.reuse:.2%}, {last.decoding:.1f} decoding",
        flush=True,
    )


def compare(rows: Path, load: Load, args: argparse.Namespace, peer: Peer | None) -> dict[str, list[Run]]:
    print(f"{load.name}: {load.kv_tokens:,} tokens of L1 in pages of {args.page}, speed {load.speed}")
    runs: dict[str, list[Run]] = {"ours": []} if peer is None else {"ours": [], "aisimulate": []}
    for turn in range(args.rounds):
        for name in runs if turn % 2 == 0 else list(reversed(runs)):
            if name == "ours":
                run, tables = ours(rows, load, args.page)
            else:
                assert peer is not None
                run = peer.run(rows, load, args.page)
            runs[name].append(run)
    for name, found in runs.items():
        show(name, found, args.rows)
    show_steps(tables)
    if peer is not None:
        pairs = list(zip(runs["ours"], runs["aisimulate"], strict=True))
        print(
            f"  ours / aisimulate: wall {spread(a.wall_s / b.wall_s for a, b in pairs)}, "
            f"CPU {spread(a.cpu_s / b.cpu_s for a, b in pairs)}, target <= 3",
            flush=True,
        )
    return runs


def first_rows(trace: Path, count: int, folder: str) -> Path:
    """Both get the same plain file; the peer reads no gzip."""
    path = Path(folder) / "rows.jsonl"
    opener = gzip.open if trace.suffix == ".gz" else open
    with opener(trace, "rt", encoding="utf-8") as source, path.open("w", encoding="utf-8") as rows:
        rows.writelines(itertools.islice(source, count))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--peer-python")
    parser.add_argument("--load", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="where our time goes, instead of timing it")
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        rows = first_rows(args.trace, args.rows, folder)
        if args.profile:
            for name in args.load:
                profile(rows, LOADS[name], args.page)
            return
        kind = "compiled" if compiled.in_use() else "interpreted"
        print(f"load {os.getloadavg()[0]:.1f} before; the kernel is {kind}")
        if args.peer_python is None:
            found = {name: compare(rows, LOADS[name], args, None) for name in args.load}
        else:
            with Peer(args.peer_python) as peer:
                found = {name: compare(rows, LOADS[name], args, peer) for name in args.load}
    print(f"load {os.getloadavg()[0]:.1f} after")
    if args.json is not None:
        plain = {
            load: {name: [asdict(r) for r in runs] for name, runs in of.items()} for load, of in found.items()
        }
        args.json.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
