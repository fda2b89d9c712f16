"""What an innocent client feels of each attack. Owns: the attacks, bounded in clients and bytes; the table.

    python bench/attacks.py [--requests 40] [--only NAME] [--url http://127.0.0.1:8000]

An innocent client streams short answers one after another, its time to first token is measured: alone, then
while an attack runs, in turns, so that both see the same machine. Ratios of one run are comparable, times are
not. The server is started here on 127.0.0.1 with the default model, unless --url names one. Attackers have a
process of their own, are four clients at most (two hundred for idle sockets), pause between their requests,
and are stopped as soon as the innocent is done.

Two rows are no attacks but as many clients at honest work, and say what an attack may cost at most: "chats"
(a short question each, one token of answer) and "documents" (texts of 500 tokens that no other has).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from urllib.parse import urlsplit

import httpx

TURNS = 2
ATTACKERS = 4
IDLE_SOCKETS = 200
PAUSE_S = 0.05
MIB = 1024 * 1024
HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    "connection: close\r\n"
)

Attack = Callable[[str, int], Awaitable[None]]


async def _send(host: str, port: int, begin: bytes, piece: bytes, pieces: int, pause_s: float = 0.0) -> None:
    """One connection: `begin`, then so many pieces; then whatever the server says."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(begin)
        for _ in range(pieces):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(30):
            await reader.read()
    except (OSError, TimeoutError):
        pass
    finally:
        writer.close()


async def _post(host: str, port: int, body: bytes) -> None:
    await _send(host, port, f"{HEAD}content-length: {len(body)}\r\n\r\n".encode(), body, 1)


@functools.cache
def _text(size: int) -> bytes:
    words = "A document of many words, all of them ordinary. "
    message = {"role": "user", "content": words * (size // len(words))}
    return json.dumps({"messages": [message]}).encode()


@functools.cache
def _messages() -> bytes:
    return b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * 1_000_000) + b"]}"


@functools.cache
def _fields() -> bytes:
    return b"{" + b",".join(b'"f%d":0' % n for n in range(1_500_000)) + b"}"


async def endless_header(host: str, port: int) -> None:
    await _send(host, port, f"{HEAD}x: ".encode(), b"a" * 65536, 32)


async def slow_body(host: str, port: int) -> None:
    await _send(host, port, f"{HEAD}content-length: {8 * MIB}\r\n\r\n".encode(), b" " * 1024, 100, 0.05)


async def long_text(host: str, port: int) -> None:
    await _post(host, port, _text(28 * MIB))


async def just_tokenized(host: str, port: int) -> None:
    """As long as the server still tokenizes."""
    await _post(host, port, _text(MIB - 500))


async def million_messages(host: str, port: int) -> None:
    await _post(host, port, _messages())


async def unknown_fields(host: str, port: int) -> None:
    await _post(host, port, _fields())


async def many_items(host: str, port: int) -> None:
    """As many as the server still parses."""
    await _post(host, port, b'{"messages":[{"role":"user","x":[' + b"{}," * 250_000 + b"0]}]}")


async def idle_sockets(host: str, port: int) -> None:
    await _send(host, port, b"", b"", 0)


_numbers = itertools.count()


async def chats(host: str, port: int) -> None:
    message = {"role": "user", "content": f"Say whether {next(_numbers)} is even."}
    await _post(host, port, json.dumps({"messages": [message], "max_tokens": 1}).encode())


async def documents(host: str, port: int) -> None:
    words = "".join(f"Entry {n} of file {next(_numbers)}. " for n in range(45))
    message = {"role": "user", "content": words}
    await _post(host, port, json.dumps({"messages": [message], "max_tokens": 1}).encode())


ATTACKS: dict[str, tuple[Attack, int]] = {
    "honest: chats": (chats, ATTACKERS),
    "honest: documents": (documents, ATTACKERS),
    "endless header": (endless_header, ATTACKERS),
    "idle sockets": (idle_sockets, IDLE_SOCKETS),
    "slow bodies": (slow_body, ATTACKERS),
    "28 MB text": (long_text, ATTACKERS),
    "1 MB text, tokenized": (just_tokenized, ATTACKERS),
    "million messages": (million_messages, ATTACKERS),
    "unknown fields": (unknown_fields, ATTACKERS),
    "most items parsed": (many_items, ATTACKERS),
}


async def attack(name: str, url: str) -> None:
    """Until killed."""
    place = urlsplit(url)
    run, clients = ATTACKS[name]

    async def again_and_again() -> None:
        while True:
            with contextlib.suppress(OSError):
                await run(str(place.hostname), int(place.port or 80))
            await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(again_and_again() for _ in range(clients)))


@contextlib.asynccontextmanager
async def running(name: str, url: str) -> AsyncIterator[None]:
    process = subprocess.Popen([sys.executable, __file__, "--url", url, "--attack", name])
    await asyncio.sleep(2.0)  # until it is under way
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def innocent(http: httpx.AsyncClient, requests: int) -> list[float]:
    """Seconds to the first token of each request."""
    found = []
    for number in range(requests):
        message = {"role": "user", "content": f"Name a number near {number}."}
        body = {"messages": [message], "max_tokens": 4, "stream": True}
        start = time.perf_counter()
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            first = 0.0
            async for _ in answer.aiter_bytes():
                first = first or time.perf_counter() - start
            found.append(first)
    return found


def share(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


async def measure(url: str, requests: int, only: str | None) -> None:
    heads = ("p50 alone", "p50 under", "ratio", "p99 alone", "p99 under", "ratio")
    print(f"{'attack':24}" + "".join(f"{head:>11}" for head in heads))
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        await innocent(http, 5)
        for name in ATTACKS if only is None else (only,):
            alone: list[float] = []
            under: list[float] = []
            for _ in range(TURNS):
                alone += await innocent(http, requests // TURNS)
                async with running(name, url):
                    under += await innocent(http, requests // TURNS)
            row = f"{name:24}"
            for part in (0.5, 0.99):
                a, u = share(alone, part), share(under, part)
                row += f"{a * 1000:9.0f}ms{u * 1000:9.0f}ms{u / a:11.1f}"
            print(row, flush=True)


@contextlib.contextmanager
def served() -> Iterator[str]:
    command = [sys.executable, "-m", "hotprefix", "serve", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = ""
        for line in process.stderr:
            found = re.search(r"listening on (http://\S+?),", line)
            url = found[1] if found else url
            if "ready:" in line:
                break
        yield url
    finally:
        process.terminate()
        process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--only", choices=list(ATTACKS))
    parser.add_argument("--url")
    parser.add_argument("--attack", choices=list(ATTACKS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack is not None:
        asyncio.run(attack(given.attack, given.url))
        return
    with contextlib.nullcontext(given.url) if given.url else served() as url:
        asyncio.run(measure(url, given.requests, given.only))


if __name__ == "__main__":
    main()
