"""An engine loop behind the server without a process of its own, and streams that break off. Owns:
`InlineEngine`, and `taken_up`.

Rules: a submitted request runs to its end at once, so nothing depends on time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import httpx

from hotprefix.engine.client import Health, Stream
from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.messages import EngineInfo, EngineStats, FlushReport, Generate
from hotprefix.router.splice import Splice
from hotprefix.server.config import ServerConfig, key_digest
from hotprefix.server.internal import INTERNAL_HEADER

KEY = "the internal key"
INTERNAL: Mapping[str, str] = {INTERNAL_HEADER: KEY}
CONFIG = ServerConfig(internal_digest=key_digest(KEY.encode()))


class InlineEngine:
    """What the server needs of an engine. seen: every request that was submitted."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self.restarts = 0
        self.seen: list[Generate] = []

    @property
    def info(self) -> EngineInfo:
        return self.loop.info

    def health(self) -> Health:
        return Health(True, "ready")

    async def submit(self, requests: Sequence[Generate]) -> Stream:
        self.seen += requests
        stream = Stream(requests, self._abort)
        for request in requests:
            self.loop.submit(request)
        while self.loop.has_work:
            for delta in self.loop.step():
                stream.put(delta)
        return stream

    def _abort(self, ids: Iterable[str]) -> None:
        for one in ids:
            self.loop.abort(one)

    async def flush_cache(self) -> FlushReport:
        return self.loop.flush_cache()

    async def stats(self) -> EngineStats:
        return self.loop.stats()


async def marked(http: httpx.AsyncClient, path: str, body: bytes) -> bytes:
    """A stream with its marks."""
    answer = await http.post(path, content=body, headers={**INTERNAL, "content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    return answer.content


def unmarked(path: str, body: bytes, stream: bytes) -> bytes:
    """What a client gets of a stream that does not break."""
    splice = Splice(path, body)
    shown = splice.feed(stream)
    assert splice.done
    assert splice.continuation() is None
    return shown


def values(stream: bytes) -> list[Any]:
    """The events of a complete stream but the last, which is [DONE]."""
    *events, done, rest = stream.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def by_choice(stream: bytes) -> dict[int | None, list[Any]]:
    """The events of a complete stream by their choice; None has those without one. How choices interleave,
    and what continuous counts say of other choices, depends on when each of them goes on."""
    found: dict[int | None, list[Any]] = {}
    for value in values(stream):
        index = value["choices"][0]["index"] if value["choices"] else None
        if index is not None:
            value.pop("usage", None)
        found.setdefault(index, []).append(value)
    return found


def boundaries(stream: bytes) -> list[int]:
    """Where the events of a stream end, the last one left out."""
    ends, at = [], stream.find(b"\n\n")
    while at >= 0:
        ends.append(at + 2)
        at = stream.find(b"\n\n", at + 2)
    return ends[:-1]


async def taken_up(http: httpx.AsyncClient, path: str, body: bytes, stream: bytes, *cuts: int) -> bytes:
    """What a client gets if the stream breaks off at the first of the cuts, the stream that goes on at the
    second, and so on. Cuts count bytes of the stream that they cut."""
    splice = Splice(path, body)
    shown = b""
    for cut in cuts:
        shown += splice.feed(stream[:cut])
        wanted = splice.continuation()
        assert wanted is not None
        stream = await marked(http, wanted.path, wanted.body)
    shown += splice.feed(stream)
    assert splice.done
    return shown
