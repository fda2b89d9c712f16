"""The engine seen from an asyncio program. Owns: `AsyncEngine`, the child's life and the open streams.

Rules:
1. Every stream ends with exactly one terminal delta, also if the child dies (`Finish.ERROR`), and its id is
   forgotten then.
2. Nothing here blocks the event loop.
3. A dead child is replaced: at once the first time, then after growing pauses, at most `restarts` times in a
   row. An answered request ends the row.
4. A child in which even a harmless request fails is killed.
5. Requests never move to the new child: each that was lost is told so.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from hotprefix.engine import pipe_records
from hotprefix.engine.child import Build
from hotprefix.engine.messages import (
    Delta,
    EngineInfo,
    EngineLoad,
    EngineStats,
    FlushReport,
    Generate,
    KVSnapshot,
    Usage,
)
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.process import EngineProcess
from hotprefix.errors import EngineDead, HotprefixError
from hotprefix.kernel.plan import Finish

log = logging.getLogger(__name__)


class EngineState(StrEnum):
    """The child's state. FAILED: it died more often than allowed and is not started again."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the engine can be used.

    ok: a request would be answered.
    reason: why it would not, for people to read.
    alive: it is ok, or will be without help from outside. False if the child hangs or died too often: then a
    new process is needed around it.
    """

    ok: bool
    reason: str
    alive: bool = True


@dataclass(frozen=True, slots=True)
class Supervision:
    """When a child counts as hung, and how it is replaced. Seconds.

    idle_hang_s: silence after which an idle child counts as hung.
    busy_hang_s: the same for a child with work; it always gets at least five times the longest step seen.
    restarts: how many deaths in a row are followed by a new child.
    pause_s: wait before the second restart in a row; it doubles with each further one, up to 30 s.
    give_up: a hung child is expected to come back until its silence is this many times the limit.
    """

    idle_hang_s: float = 5.0
    busy_hang_s: float = 30.0
    restarts: int = 5
    pause_s: float = 0.5
    give_up: float = 4.0


class Stream:
    """The deltas of requests that were submitted together: interleaved, in order for each request.

    Iteration ends after the terminal delta of the last request. `close` aborts the requests that have not
    ended; call it on every exit, or use `async with`.
    """

    def __init__(self, requests: Sequence[Generate], abort: Callable[[Iterable[str]], None]) -> None:
        self.usage = {request.id: Usage(len(request.prompt), 0) for request in requests}
        self._open = {request.id for request in requests}
        self._abort = abort
        self._come: deque[Delta] = deque()
        self._wake: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the terminal delta of every request was taken."""
        return not self._open

    def put(self, delta: Delta) -> None:
        self.usage[delta.id] = delta.usage
        self._come.append(delta)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def close(self) -> None:
        open_ids, self._open = self._open, set()
        self._abort(open_ids)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if not self._open:
            raise StopAsyncIteration
        while not self._come:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        delta = self._come.popleft()
        if delta.finish is not None:
            self._open.discard(delta.id)
        return delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class AsyncEngine:
    """An engine in a child process. All methods are for one event loop.

    build: build(config, progress) makes the engine loop. It runs in the child, so it must be importable
    there.
    on_progress: gets lines about loading.
    failed: set if the child died too often to be started again.
    Every method that needs an answer from the child raises EngineDead if the child cannot give one.
    """

    def __init__(
        self, config: Any, build: Build, *, supervision: Supervision | None = None,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self.failed = asyncio.Event()
        self._config, self._build, self._on_progress = config, build, on_progress
        self._rules = supervision or Supervision()
        self._state = EngineState.STOPPED
        self._reason = "the engine has not been started"
        self._info: EngineInfo | None = None
        self._child: EngineProcess | None = None
        self._streams: dict[str, Stream] = {}
        self._calls: dict[int, tuple[asyncio.Future[Any], Sequence[str]]] = {}
        self._numbers = itertools.count()
        self._loaded: asyncio.Future[None] | None = None
        self._restart: asyncio.Task[None] | None = None
        self._probe: asyncio.Task[None] | None = None
        self._deaths = self._restarts = 0
        self._heard_at = 0.0
        self._busy = False
        self._longest_step = 0.0

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def info(self) -> EngineInfo:
        """What the child told when it was loaded. Raises EngineDead before the first load."""
        if self._info is None:
            raise EngineDead(self._reason)
        return self._info

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    @property
    def restarts(self) -> int:
        """Children that were started after the first one."""
        return self._restarts

    @property
    def open_requests(self) -> int:
        """Requests whose terminal delta has not come."""
        return len(self._streams)

    async def start(self) -> None:
        """Start the child and wait until it can answer. Raises EngineDead, or what building the engine raised
        (ModelLoadError, ConfigError)."""
        self._loaded = asyncio.get_running_loop().create_future()
        self._spawn()
        await self._loaded

    async def stop(self, limit_s: float = 5.0) -> None:
        """End the child: it is asked first, and killed after `limit_s`. Open streams end with an error at
        once."""
        child, self._state, self._reason = self._child, EngineState.STOPPED, "the engine was stopped"
        self._tell_all(EngineDead(self._reason))  # before asking a child that may hang
        if self._restart:
            self._restart.cancel()
        if child is None:
            return
        child.send(pipe_records.Control(-1, "exit"))
        if not await child.gone(limit_s):
            child.kill()
            await child.gone(limit_s)

    def health(self) -> Health:
        """Whether a request would be answered: loaded, alive and still going round its loop."""
        if self._state is not EngineState.READY:
            return Health(
                False, f"{self._state}: {self._reason}", alive=self._state is not EngineState.FAILED
            )
        silent = time.monotonic() - self._heard_at
        limit = self._rules.idle_hang_s
        if self._busy:
            limit = max(self._rules.busy_hang_s, 5 * self._longest_step)
        if silent > limit:
            alive = silent <= self._rules.give_up * limit
            return Health(False, f"hung: the engine has been silent for {silent:.1f} s", alive)
        return Health(True, "ready")

    async def submit(self, requests: Sequence[Generate]) -> Stream:
        """Hand over several requests, all or none, and wait until they are queued. Raises RequestRejected,
        QueueFull, InputError or EngineDead; ValueError if an id is in use."""
        stream = Stream(requests, self.abort)
        ids = list(stream.usage)
        if len(ids) != len(requests) or any(request_id in self._streams for request_id in ids):
            raise ValueError("a request id is already in use: give each request its own")
        reply = self._call(lambda call: pipe_records.Submit(call, tuple(requests)), ids)
        self._streams.update(dict.fromkeys(ids, stream))
        try:
            await reply
        except asyncio.CancelledError:
            stream.close()
            raise
        return stream

    async def generate(self, request: Generate) -> AsyncIterator[Delta]:
        """Run one request; leaving the iteration early aborts it. Raises as `submit`."""
        async with await self.submit([request]) as stream:
            async for delta in stream:
                yield delta

    def abort(self, ids: Iterable[str]) -> None:
        """End requests early. Their streams get their terminal delta. Ids that are not open are ignored."""
        known = tuple(request_id for request_id in ids if request_id in self._streams)
        if known and self._child:
            self._child.send(pipe_records.Abort(known))

    async def flush_cache(self) -> FlushReport:
        report: FlushReport = await self._call(lambda call: pipe_records.Control(call, "flush_cache"))
        return report

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._call(lambda call: pipe_records.Control(call, "stats"))
        return stats

    async def load(self) -> EngineLoad:
        load: EngineLoad = await self._call(lambda call: pipe_records.Control(call, "load"))
        return load

    async def kv_snapshot(self) -> KVSnapshot | None:
        """What is cached, as KV events have told it; None without KV events."""
        found: KVSnapshot | None = await self._call(lambda call: pipe_records.Control(call, "kv_snapshot"))
        return found

    def _call(
        self, message: Callable[[int], pipe_records.ToChild], ids: Sequence[str] = ()
    ) -> asyncio.Future[Any]:
        """Send a message that is answered by a Reply. ids: the requests in it; they are forgotten if it is
        refused."""
        if self._state is not EngineState.READY or self._child is None:
            raise EngineDead(f"the engine is {self._state}: {self._reason}")
        call = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._child.send(message(call))  # if it cannot be pickled this raises, and no answer is awaited
        self._calls[call] = (future, ids)
        return future

    def _spawn(self) -> None:
        self._state, self._reason = EngineState.LOADING, "the engine is loading"
        self._refused: HotprefixError | None = None
        self._child = EngineProcess(self._build, self._config, self._on_message, self._on_death)

    def _on_message(self, child: EngineProcess, message: pipe_records.FromChild) -> None:
        if child is not self._child:
            return
        now = time.monotonic()
        if isinstance(message, pipe_records.Beat | pipe_records.Deltas):
            if self._busy and message.busy:
                self._longest_step = max(self._longest_step, now - self._heard_at)
            self._busy = message.busy
        self._heard_at = now
        match message:
            case pipe_records.Deltas():
                for delta in message.items:
                    self._deliver(delta)
            case pipe_records.Reply():
                self._answer(message)
            case pipe_records.Loading():
                self._on_progress(message.text)
            case pipe_records.Ready():
                self._on_ready(message.info)
            case pipe_records.Failed():
                self._refused = message.error

    def _on_ready(self, info: EngineInfo) -> None:
        if self._state is not EngineState.LOADING:  # it was stopped meanwhile
            return
        self._state, self._reason, self._info = EngineState.READY, "ready", info
        self._busy = False
        if self._loaded and not self._loaded.done():
            self._loaded.set_result(None)

    def _deliver(self, delta: Delta) -> None:
        stream = self._streams.get(delta.id)
        if stream is None:
            return
        if delta.finish is not None:
            del self._streams[delta.id]
            if delta.finish in (Finish.STOP, Finish.LENGTH):
                self._deaths = 0
            elif delta.finish is Finish.ERROR:
                self._look_after()
        stream.put(delta)

    def _look_after(self) -> None:
        """A request failed: check the child, unless it is gone, stopped or being checked already."""
        if self._probe is None and self._child is not None and self._state is EngineState.READY:
            self._probe = asyncio.get_running_loop().create_task(self._check(self._child))

    async def _check(self, child: EngineProcess) -> None:
        """Send the child a harmless request. If that fails too, the child is beyond help (after a device
        error that stays, for example) and is replaced."""
        request = Generate(
            f"probe-{next(self._numbers)}", (0,), SamplingParams(max_tokens=1, ignore_eos=True)
        )
        try:
            finish = [delta.finish async for delta in self.generate(request)][-1]
        except HotprefixError:
            return
        finally:
            self._probe = None
        if finish is Finish.ERROR and child is self._child:
            log.error("the engine process fails every request: replacing it")
            child.kill()

    def _answer(self, reply: pipe_records.Reply) -> None:
        future, ids = self._calls.pop(reply.call)
        if reply.error is not None:
            for request_id in ids:
                del self._streams[request_id]
        elif ids:
            self._busy = True  # the first step may be long, and no beat comes before its end
        if future.done():
            return
        if reply.error is not None:
            future.set_exception(reply.error)
        else:
            future.set_result(reply.value)

    def _on_death(self, child: EngineProcess) -> None:
        """The child is gone: end every stream and call that waits for it, then replace it."""
        if child is not self._child:
            return
        self._child = None
        ended = EngineDead(f"the engine process ended (exit status {child.exit_code})")
        self._tell_all(ended)
        error = self._refused or ended
        if self._loaded and not self._loaded.done():
            if self._state is not EngineState.STOPPED:  # not if it was asked to end while loading
                self._state, self._reason = EngineState.FAILED, str(error)
            self._loaded.set_exception(error)
        if self._state in (EngineState.STOPPED, EngineState.FAILED):
            return
        log.error("%s", error)
        self._deaths += 1
        if self._deaths > self._rules.restarts:
            self._state = EngineState.FAILED
            self.failed.set()
            self._reason = f"the engine process died {self._deaths} times in a row; the last time: {error}"
            return
        self._state, self._reason = EngineState.RESTARTING, str(error)
        self._restart = asyncio.get_running_loop().create_task(self._respawn())

    def _tell_all(self, error: HotprefixError) -> None:
        for request_id, stream in list(self._streams.items()):
            usage = stream.usage[request_id]
            self._deliver(Delta(request_id, "", (), usage, finish=Finish.ERROR, error=str(error)))
        calls, self._calls = self._calls, {}
        for future, _ in calls.values():
            if not future.done():
                future.set_exception(error)

    async def _respawn(self) -> None:
        if self._deaths > 1:
            await asyncio.sleep(min(30.0, self._rules.pause_s * 2 ** (self._deaths - 2)))
        self._restarts += 1
        self._spawn()
