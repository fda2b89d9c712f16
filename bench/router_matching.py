"""What reading a prompt costs the router: body in, keys out; exact, as the engine computes them.

usage: python bench/router_matching.py [--model NAME] [--rounds N] [--json FILE]

Bodies of 1 and 32 KB, as JSON bytes of chats. `turns`: a conversation of 14 turns of 2.2 KB whose last one is
new. `document`: one message whose last 2 KB are new. `seen`: all was seen before. `cold`: nothing was. Each
figure is the median over fresh bodies; rounds are interleaved, and the ratio to `seen` of 1 KB is formed
within each round. Process time of all threads, since the machine may be shared, and wall time beside it.
`map` is the memory and the time of another engine's blocks (foreign_keys.py).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hotprefix.engine.model.files import resolve_model
from hotprefix.records.kvwire import Stored
from hotprefix.router.foreign_keys import ForeignKeys
from hotprefix.router.matching import CHAT, ExactMatcher, ModelReader
from hotprefix.router.prompt import Prompt

WORDS = tuple(
    f"{start}{end}" for start in ("ti", "wor", "peo", "ca", "hou", "sy") for end in ("me", "ld", "ple", "se")
)
KB, PAGE, BODIES = 1024, 16, 20


class Nothing:
    async def read(self, path: str, body: bytes, headers: Mapping[str, str], tenant: str | None) -> Prompt:
        raise AssertionError("the body could not be read exactly")


def text(size: int, seed: object) -> str:
    draw = random.Random(str(seed))
    words: list[str] = []
    while sum(map(len, words)) + len(words) < size:
        words += draw.choices(WORDS, k=50)
    return " ".join(words)[:size]


def chat(*contents: str) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 64, "stream": True}).encode()


def turns(new: object) -> bytes:
    return chat(*(text(2200, f"turn {at}") for at in range(14)), text(2 * KB, new))


def document(new: object) -> bytes:
    return chat(text(30 * KB, "document") + "\n\n" + text(2 * KB, new))


SHAPES: dict[str, Callable[[object], bytes]] = {
    "1 KB, seen": lambda new: chat(text(KB, "same")),
    "1 KB, cold": lambda new: chat(text(KB, new)),
    "32 KB turns, seen": lambda new: turns("same"),
    "32 KB turns, last 2 KB new": turns,
    "32 KB document, last 2 KB new": document,
    "32 KB, cold": lambda new: chat(text(32 * KB, new)),
}


def timed(loop: asyncio.AbstractEventLoop, matcher: ExactMatcher, bodies: list[bytes]) -> tuple[float, float]:
    """Median milliseconds of a body: process time, and wall time."""
    used, wall = [], []
    for body in bodies:
        begun, at = time.process_time(), time.perf_counter()
        prompt = loop.run_until_complete(matcher.read(CHAT, body, {}, None))
        wall.append((time.perf_counter() - at) * 1000)
        used.append((time.process_time() - begun) * 1000)
        assert prompt.keys
    return statistics.median(used), statistics.median(wall)


def reading(model: str | None, rounds: int) -> dict[str, Any]:
    reader = ModelReader.load(resolve_model(model).path if model else resolve_model().path, PAGE, "bench")
    matcher, loop = ExactMatcher(lambda name: reader, Nothing()), asyncio.new_event_loop()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SHAPES}
    for number in range(rounds + 1):
        names = list(SHAPES) if number % 2 else list(reversed(SHAPES))
        for name in names:
            bodies = [SHAPES[name](f"{name} {number} {at}") for at in range(BODIES + 1)]
            loop.run_until_complete(matcher.read(CHAT, bodies[0], {}, None))
            gc.collect()
            found[name].append(timed(loop, matcher, bodies[1:]))
    matcher.close()
    loop.close()
    base = [used for used, _ in found["1 KB, seen"][1:]]
    figures = {}
    for name, values in found.items():
        used, wall = zip(*values[1:], strict=True)
        ratio = statistics.median(mine / its for mine, its in zip(used, base, strict=True))
        figures[name] = {
            "process_ms": round(statistics.median(used), 3), "wall_ms": round(statistics.median(wall), 3),
            "lowest_ms": round(min(wall), 3), "ratio": round(ratio, 2),
        }  # fmt: skip
        print(f"{name:32} {figures[name]}")
    return figures


def mapping(size: int, blocks: int = 50_000, batch: int = 100) -> dict[str, float]:
    """Blocks of `size` tokens: bytes each, microseconds each."""
    draw = random.Random(size)
    events = []
    for number in range(blocks // batch):
        ids = tuple(draw.randrange(50_000) for _ in range(size * batch))
        events.append(Stored(tuple(range(number * batch, (number + 1) * batch)), None, ids, size))
    foreign = ForeignKeys("bench", PAGE)
    begun = time.process_time()
    for event in events:
        foreign.apply((event,))
    seconds = time.process_time() - begun
    del foreign
    tracemalloc.start()
    foreign = ForeignKeys("bench", PAGE)
    for event in events:
        foreign.apply((event,))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    figures = {"bytes": round(used / len(foreign)), "us": round(seconds / blocks * 1e6, 2)}
    print(f"{f'map, blocks of {size}':32} {figures}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    figures = {
        "reading": reading(asked.model, asked.rounds),
        "map": {n: mapping(n) for n in (16, 32, 128, 1)},
    }
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
