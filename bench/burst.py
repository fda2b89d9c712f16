"""Bursts of identical cold prompts over HTTP, our server beside others, in one run.

    python bench/burst.py --openai ours=http://127.0.0.1:8000 --openai vllm=http://127.0.0.1:8001 \
        --llama llama=http://127.0.0.1:8081 --rounds 5

Prints mean and maximum time to first token and the slowest completion per burst size; size 1 is one
lone prefill, with which our own bursts are compared as well.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from statistics import fmean, median

import peers

METRICS = ("mean TTFT", "max TTFT", "slowest completion")
Figures = dict[tuple[int, str], dict[str, list[float]]]  # [(size, metric)][server][round]


async def main() -> None:
    p = peers.parser(__doc__ or "")
    p.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    p.add_argument("--prompt", type=int, default=532, help="tokens")
    p.add_argument("--outputs", type=int, default=128, help="tokens")
    args = p.parse_args()
    rnd = random.Random(time.time_ns())
    figures: Figures = {(n, m): {} for n in args.sizes for m in METRICS}
    async with peers.client() as client:
        servers = await peers.connect(client, args)
        for turn in range(-1, args.rounds):  # round -1 warms up and is dropped
            for size in args.sizes if turn >= 0 else args.sizes[:1]:
                prompt = peers.fresh_prompt(rnd, args.prompt)
                for server in peers.in_turn(servers, turn):
                    samples = await peers.together(client, server, [prompt] * size, args.outputs)
                    if turn >= 0:
                        _note(figures, size, server.name, samples)
    _report(figures, args.sizes, [s.name for s in servers], args.prompt)
    if args.json:
        rows = [{"size": n, "metric": m, "seconds": by_server} for (n, m), by_server in figures.items()]
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


def _note(figures: Figures, size: int, name: str, samples: list[peers.Sample]) -> None:
    firsts = [s.first for s in samples]
    values = (fmean(firsts), max(firsts), max(s.end for s in samples))
    for metric, value in zip(METRICS, values, strict=True):
        figures[size, metric].setdefault(name, []).append(value)


def _report(figures: Figures, sizes: list[int], names: list[str], prompt: int) -> None:
    for (size, metric), by_server in figures.items():
        ordered = {name: by_server[name] for name in names}
        peers.print_figures(f"{size} x {prompt} tokens: {metric}", "s", ordered)
    if 1 not in sizes:
        return
    print("\nmean TTFT of a burst / one lone prefill, same round")
    for name in names:
        alone = figures[1, "mean TTFT"][name]
        for size in (n for n in sizes if n > 1):
            ratios = [b / a for a, b in zip(alone, figures[size, "mean TTFT"][name], strict=True)]
            print(f"  {name:<16} x{size:<3} {median(ratios):6.2f} [{min(ratios):.2f} to {max(ratios):.2f}]")


if __name__ == "__main__":
    asyncio.run(main())
