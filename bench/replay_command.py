"""A replay as a user runs one: whole commands, `hotprefix replay` against `aisimulate predict`.

usage: python bench/replay_command.py CONVERSATION.jsonl[.gz] --peer-command PATH [--load saturated]
                                      [--rounds 5] [--rows 5000] [--page 512]

Loads, rows and what is held equal: see replay_speed.py. Wall time from start to exit, interleaved, every
second round backwards. Ours starts a process for the run, keeps every table (Parquet, CSV) and renders the
HTML report; the peer writes its JSON report and prints a table, with the wall time that it measured itself
of its replay alone; that is shown as well. Both may use two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from replay_speed import LOADS, RUNNING, STEP_TOKENS, Load, cost_model, first_rows, peer_config, spread

EXPERIMENT = """
name = "one-replay"
question = "What do these rows make of one instance?"
baseline = "lru"
seeds = 1
cost = "{folder}/cost.json"
[trace]
source = "{rows}"
[load]
loop = "open"
speed = {speed}
[capacity]
size = {tokens}
unit = "tokens"
[kernel]
page_size = {page}
max_batched_tokens = {step}
max_running = {running}
refresh = "off"
flight = "none"
lookahead = 0
output_reserve = 0.0
[[arms]]
name = "lru"
"""


# As a user has it: an interpreter told to keep no bytecode compiles every file of ours again in each process.
USUAL = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def prepare(folder: Path, rows: Path, load: Load, page: int) -> None:
    (folder / "cost.json").write_text(cost_model(load).model_dump_json(), encoding="utf-8")
    text = EXPERIMENT.format(
        folder=folder, rows=rows, speed=load.speed, tokens=load.kv_tokens, page=page, step=STEP_TOKENS,
        running=RUNNING,
    )  # fmt: skip
    (folder / "exp.toml").write_text(text, encoding="utf-8")
    (folder / "peer.json").write_text(json.dumps(peer_config(rows, load, page)), encoding="utf-8")


def timed(command: list[str], folder: Path) -> tuple[float, str]:
    begun = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=USUAL, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return seconds, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--peer-command", required=True)
    parser.add_argument("--load", choices=list(LOADS), default="saturated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--page", type=int, default=512)
    args = parser.parse_args()
    ours = [str(Path(sys.executable).parent / "hotprefix"), "replay", "exp.toml", "--out", "out"]
    peer = [args.peer_command, "predict", "-c", "peer.json", "--overwrite"]
    found: dict[str, list[float]] = {"ours": [], "aisimulate": [], "its replay alone": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, first_rows(args.trace, args.rows, name), LOADS[args.load], args.page)
        print(f"{args.load}, pages of {args.page}; load {os.getloadavg()[0]:.1f} before")
        for turn in range(args.rounds):
            for who in ("ours", "aisimulate") if turn % 2 == 0 else ("aisimulate", "ours"):
                shutil.rmtree(folder / "out", ignore_errors=True)
                seconds, told = timed(ours if who == "ours" else peer, folder)
                found[who].append(seconds)
                if who == "aisimulate":
                    milliseconds = re.search(r"Wall Time \(ms\): ([\d,.]+)", told)
                    assert milliseconds is not None
                    found["its replay alone"].append(float(milliseconds[1].replace(",", "")) / 1000)
    for who, times in found.items():
        print(f"  {who:16} {spread(times)} s")
    ratios = [a / b for a, b in zip(found["ours"], found["aisimulate"], strict=True)]
    print(f"  ours / aisimulate {spread(ratios)}; load {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
