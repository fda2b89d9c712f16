"""Side-by-side timing over HTTP. Owns: the servers under comparison, one client for all of them, and
how repeated figures become medians and ratios.

Rules: a server's text is checked before it is timed; rounds are interleaved over the servers and every
second round goes backwards; prompts are fresh random token ids, the same for every server in a round;
ratios are taken round by round and then their median, so a slow minute of the machine cancels out.
Needs httpx (in the project's `dev` extra).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import httpx

Ids = list[int]
FIRST_ID, LAST_ID = 200, 40_000  # ordinary ids of any vocabulary that the models compared here have


@dataclass(frozen=True)
class Server:
    """api: 'openai' (/v1/completions with token ids) or 'llama' (llama-server's /completion)."""

    name: str
    url: str
    api: str
    model: str = ""

    def body(self, prompt: Ids | str, outputs: int) -> tuple[str, dict[str, object]]:
        """Path and JSON of one streamed greedy completion of exactly `outputs` tokens."""
        if self.api == "llama":
            return "/completion", {
                "prompt": prompt, "n_predict": outputs, "temperature": 0, "top_k": 1, "ignore_eos": True,
                "cache_prompt": True, "stream": True,
            }  # fmt: skip
        return "/v1/completions", {
            "model": self.model, "prompt": prompt, "max_tokens": outputs, "min_tokens": outputs,
            "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """Seconds from the common start. text: what was streamed."""

    first: float
    end: float
    text: str


def parser(description: str) -> argparse.ArgumentParser:
    """Options every script has. The first --openai server is the one that ratios are about."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--openai", action="append", default=[], metavar="NAME=URL", help="ours first")
    p.add_argument("--llama", action="append", default=[], metavar="NAME=URL", help="a llama-server")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--json", metavar="FILE", help="write every sample there")
    return p


async def connect(client: httpx.AsyncClient, args: argparse.Namespace) -> list[Server]:
    """Servers in the order given, each with its model's name and its text checked."""
    servers = []
    for api, specs in (("openai", args.openai), ("llama", args.llama)):
        for spec in specs:
            name, _, url = spec.partition("=")
            model = ""
            if api == "openai":
                reply = await client.get(f"{url}/v1/models")
                model = reply.raise_for_status().json()["data"][0]["id"]
            servers.append(Server(name, url.rstrip("/"), api, model))
    if not servers:
        sys.exit("give at least one --openai NAME=URL")
    for server in servers:
        await _check_text(client, server)
    return servers


async def _check_text(client: httpx.AsyncClient, server: Server) -> None:
    text = (await stream(client, server, "The capital of France is", 8, time.perf_counter())).text
    print(f"{server.name}: 'The capital of France is' -> {text!r}", file=sys.stderr)
    if "Paris" not in text:
        sys.exit(f"{server.name} gives wrong text: it must not be timed")


async def stream(
    client: httpx.AsyncClient, server: Server, prompt: Ids | str, outputs: int, start: float
) -> Sample:
    """One streamed completion. `first` is the arrival of the first data line."""
    path, body = server.body(prompt, outputs)
    first, parts = None, []
    async with client.stream("POST", server.url + path, json=body) as reply:
        if reply.status_code != 200:
            sys.exit(f"{server.name}: HTTP {reply.status_code}: {(await reply.aread())[:300]!r}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            first = time.perf_counter() - start if first is None else first
            event = json.loads(line[6:])
            parts.append(event["content"] if server.api == "llama" else event["choices"][0]["text"])
    if first is None:
        sys.exit(f"{server.name}: the stream held no data")
    return Sample(first, time.perf_counter() - start, "".join(parts))


async def together(
    client: httpx.AsyncClient, server: Server, prompts: Sequence[Ids], outputs: int
) -> list[Sample]:
    """All prompts at once, from one start."""
    start = time.perf_counter()
    return list(await asyncio.gather(*(stream(client, server, p, outputs, start) for p in prompts)))


def fresh_prompt(rnd: random.Random, tokens: int) -> Ids:
    """Random ids, which nothing can have cached."""
    return [rnd.randrange(FIRST_ID, LAST_ID) for _ in range(tokens)]


def in_turn(servers: Sequence[Server], turn: int) -> list[Server]:
    """The order of a round."""
    return list(servers) if turn % 2 == 0 else list(reversed(servers))


def print_figures(title: str, unit: str, figures: dict[str, list[float]]) -> None:
    """One line a server: median, range, and the first server's ratio to it (median and range over
    rounds). figures[name][round]."""
    ours = next(iter(figures.values()))
    print(f"\n{title} ({len(ours)} rounds)")
    for name, values in figures.items():
        line = f"  {name:<16} median {median(values):9.3f} {unit}  [{min(values):.3f} to {max(values):.3f}]"
        if values is not ours:
            ratios = [a / b for a, b in zip(ours, values, strict=True)]
            line += f"   ours / it {median(ratios):6.3f} [{min(ratios):.3f} to {max(ratios):.3f}]"
        print(line, flush=True)


def client() -> httpx.AsyncClient:
    """No pooling limits, no timeouts that a slow peer could hit."""
    return httpx.AsyncClient(timeout=900, limits=httpx.Limits(max_connections=None), trust_env=False)
