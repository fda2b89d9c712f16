"""The cost model of a server that can only be asked over HTTP. Owns: `calibrate_url`.

Rules:
1. Any server with OpenAI's chat route will do. Prompts are random words, so that no cache has them.
2. Two things are timed: the wait for the first token by the prompt's length, and the gap between tokens by
   the number of streams. What a request takes that computes nothing is taken off the first.
3. A wait counts as one step that computes the prompt, a gap as one step of as many decodes as there are
   streams. So the scheduler's time, and what a server does around its engine, are part of the prices.
4. Batches are interleaved and repeated in rounds while the time lasts, the last one to its end. The first
   round leaves out what would take too long, and what the server refuses.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import string
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from statistics import mean, median
from typing import Any, NamedTuple

import aiohttp
from pydantic_core import from_json

from hotprefix.cost.features import Features
from hotprefix.cost.model import CostModel
from hotprefix.errors import InputError, shortened
from hotprefix.lab.cost.fit_prices import cross_validated, step_prices
from hotprefix.lab.cost.measure_steps import Sample

WORDS = (16, 64, 256, 1024, 4096)
STREAMS = (1, 2, 4, 8, 16, 32)
SHORT, LONG = 16, 512
OUTPUTS = 24
TOO_LONG = 0.05
TIMEOUT_S = 600.0


class Server(NamedTuple):
    """Where to ask. url: without `/v1`. model: None = the first that the server names. key: an API key."""

    url: str
    model: str | None = None
    key: str | None = None


class _Answer(NamedTuple):
    """One stream. prompt: its tokens that were computed. times: when each piece of text came, the first time
    is that of the request. outputs: its tokens."""

    prompt: int
    times: list[float]
    outputs: int


class _Client:
    """Asks one server. Raises InputError if it does not answer as one."""

    def __init__(self, session: aiohttp.ClientSession, server: Server, seed: int) -> None:
        self._session, self._server, self._random = session, server, random.Random(seed)
        self.model = server.model or ""

    @asynccontextmanager
    async def _asked(self, method: str, path: str, body: Any = None) -> AsyncIterator[aiohttp.ClientResponse]:
        url = f"{self._server.url.rstrip('/')}{path}"
        try:
            async with self._session.request(method, url, json=body, allow_redirects=False) as answer:
                if answer.status != 200:
                    said = shortened((await answer.content.read(2000)).decode(errors="replace"), 200)
                    raise InputError(f"url={url!r}: {answer.status} {said}", param="url")
                yield answer
        except (aiohttp.ClientError, TimeoutError) as error:
            raise InputError(f"url={url!r}: {str(error) or type(error).__name__}", param="url") from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(
                f"url={url!r}: this is no answer of OpenAI's API ({error!r})", param="url"
            ) from None

    async def get(self, path: str) -> Any:
        async with self._asked("GET", path) as answer:
            return from_json(await answer.read())

    async def choose_model(self) -> None:
        if not self.model:
            async with self._asked("GET", "/v1/models") as answer:
                self.model = str(from_json(await answer.read())["data"][0]["id"])

    async def ask(self, words: int, outputs: int) -> _Answer:
        text = " ".join("".join(self._random.choices(string.ascii_lowercase, k=5)) for _ in range(words))
        body = {
            "model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": outputs,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        times, usage = [time.perf_counter()], None
        async with self._asked("POST", "/v1/chat/completions", body) as answer:
            async for line in answer.content:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = from_json(data)
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if choice["delta"].get("content") or (choice["finish_reason"] and len(times) == 1):
                        times.append(time.perf_counter())
        if usage is None or len(times) < 2:
            raise InputError(f"url={self._server.url!r}: its streams tell no usage or no text", param="url")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return _Answer(usage["prompt_tokens"] - cached, times, usage["completion_tokens"])

    async def idle_s(self) -> float:
        """What a request takes that computes nothing."""
        took = []
        for _ in range(9):
            begun = time.perf_counter()
            await self.get("/v1/models")
            took.append(time.perf_counter() - begun)
        return median(took)


def calibrate_url(
    server: Server,
    name: str,
    seconds: float,
    most_streams: int,
    progress: Callable[[str], None],
    seed: int = 0,
) -> CostModel:
    """Raises InputError if the server does not answer, or nothing could be fitted.

    seconds: how long to measure, about.
    most_streams: at a time.
    """
    return asyncio.run(_calibrate(server, name, seconds, most_streams, progress, seed))


async def _calibrate(
    server: Server, name: str, seconds: float, most_streams: int, progress: Callable[[str], None], seed: int
) -> CostModel:
    headers = {} if server.key is None else {"authorization": f"Bearer {server.key}"}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, read_bufsize=1 << 20) as session:
        client = _Client(session, server, seed)
        await client.choose_model()
        await client.ask(SHORT, 2)  # whatever a first request sets up is not timed
        samples = await _rounds(client, seconds, most_streams, progress)
        kv_token_bytes = await _kv_token_bytes(client)
    prices = step_prices(samples)
    known = "" if kv_token_bytes else "; kv_token_bytes is not known, so it is 1"
    return CostModel(
        name=name, source=f"hotprefix calibrate --url, {len(samples)} timings over HTTP{known}",
        model=client.model, dtype="not known", hardware=f"behind {server.url}",
        date=dt.datetime.now(dt.UTC).date(), base_s=prices.base_s, prefill_token_s=prices.prefill[0][1],
        prefill_context_s=prices.prefill_context_s, decode_s=prices.decode[0][1],
        decode_context_s=prices.decode_context_s, scheduler_base_s=0.0, scheduler_running_s=0.0,
        scheduler_waiting_s=0.0, kv_token_bytes=kv_token_bytes or 1, fit=cross_validated(samples),
    )  # fmt: skip


async def _kv_token_bytes(client: _Client) -> int | None:
    """As our own servers tell it."""
    try:
        found = (await client.get("/load"))["worker"]["kv_token_bytes"]
    except (InputError, LookupError, TypeError):
        return None
    return found if type(found) is int and found > 0 else None


async def _rounds(
    client: _Client, seconds: float, most_streams: int, progress: Callable[[str], None]
) -> list[Sample]:
    """Both kinds of timings, until the time is over."""
    begun, samples = time.perf_counter(), list[Sample]()
    idle_s = await client.idle_s()
    points = [(words, 0) for words in WORDS]
    points += [(words, streams) for streams in STREAMS if streams <= most_streams for words in (SHORT, LONG)]
    kept: list[tuple[int, int]] = []
    too_long: set[bool] = set()
    for words, streams in points:  # the first round, in which what takes too long ends its kind
        if bool(streams) in too_long:
            continue
        at = time.perf_counter()
        try:
            samples.append(await _sample(client, words, streams, idle_s))
        except InputError:
            if not any(bool(of) == bool(streams) for _, of in kept):
                raise
            too_long.add(bool(streams))
            continue
        kept.append((words, streams))
        progress(f"{words} words, {streams or 1} streams")
        if time.perf_counter() - at > seconds * TOO_LONG:
            too_long.add(bool(streams))
    number = 1
    while time.perf_counter() - begun < seconds:
        number += 1
        for words, streams in kept:
            samples.append(await _sample(client, words, streams, idle_s))
            progress(f"round {number}: {words} words, {streams or 1} streams")
    return samples


async def _sample(client: _Client, words: int, streams: int, idle_s: float) -> Sample:
    """One timing. streams: 0 = of the first token."""
    point = f"{words} words, {streams} streams"
    if not streams:
        answer = await client.ask(words, 1)
        n, took = answer.prompt, answer.times[1] - answer.times[0]
        return Sample(point, Features(n, n * (n + 1) // 2, 0, 0), max(took - idle_s, took / 10), 0.0, 1, 0)
    answers = await asyncio.gather(*(client.ask(words, OUTPUTS) for _ in range(streams)))
    context = mean(answer.prompt + answer.outputs / 2 for answer in answers)
    return Sample(point, Features(0, 0, streams, round(streams * context)), _gap(answers), 0.0, streams, 0)


def _gap(answers: list[_Answer]) -> float:
    """Seconds between two tokens while all streams were open: of each stream the time between its first and
    its last piece of text there, by its tokens (pieces may come in bunches); of these the median. Raises
    InputError if no stream has two pieces."""
    begun, ended = max(a.times[1] for a in answers), min(a.times[-1] for a in answers)
    found = []
    for answer in answers:
        pieces = answer.times[1:]
        there = [at for at in pieces if begun <= at <= ended]
        there = there if len(there) > 1 else pieces
        tokens = (len(there) - 1) * answer.outputs / len(pieces)
        if tokens and there[-1] > there[0]:
            found.append((there[-1] - there[0]) / tokens)
    if not found:
        raise InputError(
            "the server sent its answers in one piece: no gap between tokens to measure", param="url"
        )
    return median(found)
