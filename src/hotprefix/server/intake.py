"""Taking bodies in. Owns: reading within the limits, how much memory bodies may hold, and where they are
worked on.

Rules:
1. Bounds come first, work after. A body over the limit is refused by its Content-Length alone if it has one,
   otherwise when the limit is passed. What it holds is counted before it is parsed.
2. A body that takes long to parse and tokenize is worked on in a thread, so that streams go on. One thread
   works on large bodies and one on those of middle size. More threads would only fight for the interpreter's
   lock, and so a long document waits for long documents only.
3. Memory that such work took goes back to the system.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from hotprefix.server.bodies import bounded, load
from hotprefix.server.config import ServerConfig
from hotprefix.server.errors import ApiError
from hotprefix.server.presence import while_there

INLINE_BYTES = 16 * 1024
LARGE_BYTES = 1024 * 1024
TRIM_BYTES = 256 * 1024
BODIES_HELD = 8

T = TypeVar("T")


class Intake:
    """The intake of one server. held: bytes of bodies that were read and not yet worked on."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._room = BODIES_HELD * config.body_limit
        self.held = 0
        self._reading: dict[asyncio.Timeout, int] = {}
        self._between = ThreadPoolExecutor(1, "bodies")
        self._large = ThreadPoolExecutor(1, "large-bodies")

    async def use(self, request: Request, work: Callable[[Any], T]) -> T:
        """What `work` makes of the body's JSON value. Raises ApiError 400, 413, 415 or 503."""
        async with self.reading(request) as body:
            return await self._run(request, len(body), lambda: work(self._value(body)))

    def _value(self, body: bytearray) -> Any:
        bounded(body, self._config)
        return load(body, self._config)

    async def _run(self, request: Request, size: int, work: Callable[[], T]) -> T:
        if size <= INLINE_BYTES:
            return work()
        lane = self._between if size <= LARGE_BYTES else self._large

        async def done() -> T:
            return await asyncio.get_running_loop().run_in_executor(lane, work)

        try:
            return await while_there(request.receive, done())  # no work if the client leaves the queue
        finally:
            if size > TRIM_BYTES:
                lane.submit(give_memory_back)

    # -- reading ----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def reading(self, request: Request) -> AsyncIterator[bytearray]:
        """The whole body, for as long as the context lasts. Raises ApiError 413, 415 or 503. If all bodies
        together would need more room than there is, the largest of those that are still being read gives
        way."""
        self._check_head(request)
        body = bytearray()
        try:
            async with asyncio.timeout(None) as place:
                try:
                    await self._receive(request, body, place)
                finally:
                    self._reading.pop(place, None)
        except TimeoutError:
            self.held -= len(body)
            message = f"bodies under way hold {self._room} bytes, as much as they may: try again later"
            raise ApiError(503, message, code="too_many_bodies", headers={"retry-after": "1"}) from None
        except BaseException:
            self.held -= len(body)
            raise
        try:
            yield body
        finally:
            self.held -= len(body)

    def _check_head(self, request: Request) -> None:
        # A browser lets a page of any site send a body of another type, or of none, without asking first.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            message = f"content-type {kind!r}: send application/json"
            raise ApiError(415, message, param="content-type", code="unsupported_media_type")
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._config.body_limit:
            raise self._too_large(f"{declared} bytes")

    async def _receive(self, request: Request, body: bytearray, place: asyncio.Timeout) -> None:
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            body += part
            self.held += len(part)
            more = message.get("more_body", False)
            if len(body) > self._config.body_limit:
                raise self._too_large("the body")
            self._reading[place] = len(body)
            if self.held > self._room:
                self._make_room()

    def _make_room(self) -> None:
        largest = max(self._reading, key=self._reading.__getitem__)
        del self._reading[largest]
        largest.reschedule(asyncio.get_running_loop().time())

    def _too_large(self, what: str) -> ApiError:
        limit = self._config.body_limit
        message = f"{what}: a request may have at most {limit} bytes (--body-limit)"
        return ApiError(413, message, code="body_too_large")


def _find_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # not glibc
        return None


_trim = _find_trim()


def give_memory_back() -> None:
    """Return freed memory to the system, if the C library would keep it otherwise."""
    if _trim is not None:
        _trim(0)
