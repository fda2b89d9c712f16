"""One request at one worker. Owns: `Exchange`: sending it, telling a failure before the first byte from an
answer, and passing the answer on.

Rules:
1. Until the first byte of the answer's body is there nothing is sent to the client, so a failure before it
   can be made good elsewhere.
2. What the worker sends afterwards goes to the client as it comes, and not faster than the client reads. An
   answer that breaks off is not ended here: another worker may go on with it.
3. Only what says something of the worker counts for its breaker: connections that fail, answers that are no
   HTTP, 5xx and silence against it, 2xx for it. A 4xx says something of the request and nothing of the
   worker, whatever state the breaker is in; a client that leaves says nothing, either.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp
from multidict import CIMultiDict
from pydantic_core import from_json
from starlette.types import Send

from hotprefix.errors import shortened
from hotprefix.fleet.records import Seen
from hotprefix.router.asking import reason
from hotprefix.router.calls import Call, Why
from hotprefix.router.headers import to_client
from hotprefix.router.passage import WHY_LOST, Way
from hotprefix.router.worker import Worker

READ_USAGE_BYTES = 256 * 1024
AT_ONCE_BYTES = 1 << 20
RETRIED = frozenset({429})


class Query(NamedTuple):
    """A request as it goes to a worker, its headers apart."""

    method: str
    path: str
    query: str
    body: bytes | bytearray | None
    done_at_end: bool


class WorkerFailed(Exception):
    """The worker failed before the first byte of its answer. kind: a word for the metrics. accepted: it may
    have begun to work on the request, and may still; sending it elsewhere could run it twice."""

    def __init__(self, kind: str, message: str, *, accepted: bool = False) -> None:
        super().__init__(message)
        self.kind, self.accepted = kind, accepted


class Broken(Exception):
    """The answer broke off after its first byte, and the client has not been told. kind: as above."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Kept:
    """A whole answer, as long as it is small, so that its usage can be read at its end. wanted: it is one."""

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, part: bytes) -> None:
        if not self.wanted or self._size > READ_USAGE_BYTES:
            return
        self._size += len(part)
        self._parts.append(part)

    def cached(self) -> int | None:
        """Prompt tokens that the answer says were not computed. None: it does not say."""
        body = b"".join(self._parts)
        if self._size > READ_USAGE_BYTES or b"cached_tokens" not in body:
            return None
        try:
            cached = from_json(body)["usage"]["prompt_tokens_details"]["cached_tokens"]
        except (ValueError, KeyError, TypeError):
            return None
        return cached if isinstance(cached, int) and cached >= 0 else None


class Exchange:
    """One attempt. It is a context: leaving it closes the connection unless the answer was read to its
    end."""

    def __init__(self, worker: Worker, call: Call, now: Callable[[], float]) -> None:
        self._worker, self._call, self._now = worker, call, now
        self._answer: aiohttp.ClientResponse | None = None
        self._told = False
        self._first = b""

    async def __aenter__(self) -> Exchange:
        self._worker.calls.add(self._call)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._worker.calls.discard(self._call)
        if self._answer is not None:
            self._answer.close()

    @property
    def status(self) -> int:
        assert self._answer is not None
        return self._answer.status

    @property
    def events(self) -> bool:
        """The answer is a stream of events."""
        assert self._answer is not None
        return self._answer.headers.get("content-type", "").lower().startswith("text/event-stream")

    @property
    def retried(self) -> bool:
        """The answer is one that another worker may better."""
        return self.status >= 500 or self.status in RETRIED

    async def send(self, query: Query, headers: CIMultiDict[str]) -> None:
        """Send the request and wait for the answer's first byte. Raises WorkerFailed."""
        try:
            await self._send(query, headers)
        except asyncio.CancelledError:
            if not self._call.caught(Why.WORKER_SILENT):
                raise
            raise self._failed("silent", "it went silent") from None
        except TimeoutError as error:
            accepted = not isinstance(error, aiohttp.ConnectionTimeoutError)
            kind = "timeout" if accepted else "connect"
            raise self._failed(kind, reason(error), accepted=accepted) from None
        except (aiohttp.ClientConnectorError, aiohttp.ClientOSError) as error:
            raise self._failed("connect", reason(error)) from None
        except aiohttp.ServerDisconnectedError:
            raise self._failed("disconnect", "it closed the connection") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._failed("protocol", reason(error)) from None

    async def _send(self, query: Query, headers: CIMultiDict[str]) -> None:
        body: Any = query.body
        if body is not None and len(body) > AT_ONCE_BYTES:
            body = io.BytesIO(body)  # sent in pieces
        self._answer = await self._worker.upstream.request(
            query.method, query.path, query.query, body, headers
        )
        if self.status >= 500:
            self._against("5xx", f"status {self.status}")
            return
        self._first = await self._answer.content.readany()
        if self.status < 300:
            self._for()

    def complaint(self) -> str:
        """What an answer that is an error says."""
        try:
            said = str(from_json(self._first)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            said = ""
        return f"status {self.status}" + (f": {shortened(said, 200)}" if said else "")

    async def begin(self, send: Send) -> None:
        """Pass status and headers on."""
        assert self._answer is not None
        headers = to_client(self._answer.raw_headers)
        await send({"type": "http.response.start", "status": self.status, "headers": headers})

    async def relay(self, send: Send, way: Way, seen: Callable[[Seen], None]) -> None:
        """Pass the answer on to its end. seen: told of the first token, or at the end of a whole answer.
        Raises Broken."""
        kept = Kept(wanted=self.status == 200 and not self.events)
        last: bytes | None = b""
        try:
            last = await self._pass_on(send, way, kept, seen)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if not way.done:
                kind = "timeout" if isinstance(error, TimeoutError) else "cut"
                raise self._broken(kind, reason(error)) from None
        except asyncio.CancelledError:
            if not self._call.caught(Why.WORKER_SILENT):
                raise
            if not way.done:
                raise self._broken("silent", "it went silent") from None
        if last is None:
            raise self._broken("end", "it ended the stream before its end")
        self._worker.calls.discard(self._call)
        if kept.wanted:
            seen(Seen(cached=kept.cached(), whole=True))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _pass_on(
        self, send: Send, way: Way, kept: Kept, seen: Callable[[Seen], None]
    ) -> bytes | None:  # fmt: skip
        """Returns the client's last bytes; None: the answer is not complete."""
        assert self._answer is not None
        part, content, untold = self._first, self._answer.content, not kept.wanted and self.status == 200
        while part or not content.at_eof():
            if part:
                out = way.feed(part)
                if untold and way.begun:
                    untold = False
                    seen(Seen())
                kept.add(part)
                if out:
                    await self._give(send, out)
                if way.lost:
                    raise self._broken(way.lost, WHY_LOST[way.lost])
                if self._worker.silent:  # since bytes were given
                    if way.done:
                        break
                    raise self._broken("silent", "it went silent")
            part = await content.readany()
        return way.ended()

    async def _give(self, send: Send, data: bytes) -> None:
        """Give the client bytes, all or, if it has left, none."""
        self._call.giving = True
        try:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            self._call.giving = False

    # -- the breaker ------------------------------------------------------------------------------

    def _broken(self, kind: str, why: str) -> Broken:
        self._told = False  # a failure outweighs the good beginning
        self._against(kind, why)
        return Broken(kind, f"worker {self._worker.name} failed in the middle of the answer ({why})")

    def _failed(self, kind: str, message: str, *, accepted: bool = False) -> WorkerFailed:
        self._against(kind, message)
        return WorkerFailed(kind, message, accepted=accepted)

    def _against(self, kind: str, why: str) -> None:
        if not self._told:
            self._told = True
            self._worker.failed(kind, why, self._now())

    def _for(self) -> None:
        self._told = True
        self._worker.succeeded()
