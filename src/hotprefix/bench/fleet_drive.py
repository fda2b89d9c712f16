"""Plays a workload on a router over HTTP. Owns: the clients, the stopwatch, and what became of each request.

Rules: decoding is greedy and end-of-sequence tokens are ignored. Times count from the PLANNED moment of
sending, so a client that is late counts. A request that fails is a record without figures; whether that ends
the bench is its caller's matter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic_core import from_json

from hotprefix.bench.fleet_workloads import FleetWorkload, Line

NO_LIMIT = aiohttp.ClientTimeout(total=600)


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """One request. lost: what went wrong; the figures are then not measured. Tokens; seconds."""

    id: str
    prompt: int = 0
    reused: int = 0
    ttft_s: float = 0.0
    completion_s: float = 0.0
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Played:
    """One run of a workload. makespan_s: from its start to the last end."""

    records: tuple[FleetRecord, ...]
    makespan_s: float


class _Player:
    """One run. kill: called once when half of the lines have had a first token."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, model: str, workload: FleetWorkload,
        kill: Callable[[], Awaitable[None]] | None,
    ) -> None:  # fmt: skip
        self._http, self._url, self._model, self._workload = http, f"{url}/v1/completions", model, workload
        self._kill = kill
        self._begun = 0
        self._killing: asyncio.Future[None] | None = None
        self.records: list[FleetRecord] = []

    async def play(self) -> Played:
        begin = time.perf_counter()
        await asyncio.gather(*(self._line(begin, n, line) for n, line in enumerate(self._workload.lines)))
        took = time.perf_counter() - begin
        if self._killing is not None:
            await self._killing
        return Played(tuple(sorted(self.records, key=lambda record: record.id)), took)

    async def _line(self, begin: float, number: int, line: Line) -> None:
        planned = begin + line.start_s
        for at, turn in enumerate(line.turns):
            planned += turn.think_s
            await asyncio.sleep(max(0.0, planned - time.perf_counter()))
            self.records.append(await self._ask(f"{number}/{at}", turn.prompt, planned))
            planned = time.perf_counter()

    async def _ask(self, name: str, prompt: tuple[int, ...], planned: float) -> FleetRecord:
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": self._workload.outputs, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        usage: dict[str, Any] | None = None
        first: float | None = None
        ended = False
        try:
            async with self._http.post(self._url, json=body, timeout=NO_LIMIT) as answer:
                if answer.status != 200:
                    return FleetRecord(name, lost=f"{answer.status} {(await answer.text())[:200]}")
                async for line in answer.content:
                    data = line.removeprefix(b"data:").strip()
                    ended = ended or data == b"[DONE]"
                    if not data or ended:
                        continue
                    event = from_json(data)
                    if "error" in event:
                        return FleetRecord(name, lost=str(event["error"])[:200])
                    usage = event.get("usage") or usage
                    if first is None and event.get("choices"):
                        first = time.perf_counter() - planned
                        self._one_more_has_begun()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return FleetRecord(name, lost=f"{type(error).__name__}: {error}"[:200])
        if not ended or usage is None or first is None:
            return FleetRecord(name, lost="the stream ended too soon")
        reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return FleetRecord(name, usage["prompt_tokens"], reused, first, time.perf_counter() - planned)

    def _one_more_has_begun(self) -> None:
        self._begun += 1
        if self._kill is not None and self._killing is None and 2 * self._begun >= len(self._workload.lines):
            self._killing = asyncio.ensure_future(self._kill())


async def play(
    http: aiohttp.ClientSession, url: str, model: str, workload: FleetWorkload,
    kill: Callable[[], Awaitable[None]] | None = None,
) -> Played:  # fmt: skip
    """Play a workload once. url: the router's."""
    return await _Player(http, url, model, workload, kill if workload.kills else None).play()
