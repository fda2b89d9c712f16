"""Prefill and decode-step time over HTTP, our server beside others, in one run.

    python bench/decode.py --openai ours=http://127.0.0.1:8000 --openai vllm=http://127.0.0.1:8001

Prefill: time to first token of one fresh prompt. Decode step: B different prompts whose prefix is
cached already; (time of 65 outputs - time of 1 output) / 64, both warm, so prefill and HTTP set-up
cancel out. The context is the prompt plus half the outputs on average.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path

import httpx

import peers

LONG = 65
Figures = dict[str, dict[str, list[float]]]  # [title][server][round], milliseconds


async def main() -> None:
    p = peers.parser(__doc__ or "")
    p.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    p.add_argument("--prefills", type=int, nargs="+", default=[532, 2048], help="tokens")
    p.add_argument("--context", type=int, default=568, help="tokens of each decoding prompt")
    args = p.parse_args()
    rnd = random.Random(time.time_ns())
    figures: Figures = {}
    async with peers.client() as client:
        servers = await peers.connect(client, args)
        for turn in range(-1, args.rounds):  # round -1 warms up and is dropped
            for tokens in args.prefills if turn >= 0 else args.prefills[:1]:
                prompt = peers.fresh_prompt(rnd, tokens)
                for server in peers.in_turn(servers, turn):
                    ms = 1e3 * (await peers.together(client, server, [prompt], 1))[0].first
                    _note(figures, turn, f"prefill of {tokens} tokens", server.name, ms)
            for batch in args.batches if turn >= 0 else args.batches[:1]:
                prompts = [peers.fresh_prompt(rnd, args.context) for _ in range(batch)]
                for server in peers.in_turn(servers, turn):
                    ms = 1e3 * await _step(client, server, prompts)
                    _note(figures, turn, f"decode step, B={batch}, context {args.context}", server.name, ms)
    for title, by_server in figures.items():
        peers.print_figures(title, "ms", {s.name: by_server[s.name] for s in servers})
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")


async def _step(client: httpx.AsyncClient, server: peers.Server, prompts: list[peers.Ids]) -> float:
    await peers.together(client, server, prompts, 1)
    short = max(s.end for s in await peers.together(client, server, prompts, 1))
    long = max(s.end for s in await peers.together(client, server, prompts, LONG))
    return (long - short) / (LONG - 1)


def _note(figures: Figures, turn: int, title: str, name: str, ms: float) -> None:
    if turn >= 0:
        figures.setdefault(title, {}).setdefault(name, []).append(ms)


if __name__ == "__main__":
    asyncio.run(main())
