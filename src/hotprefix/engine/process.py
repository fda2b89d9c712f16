"""The engine's own process. Owns: the child's main function and `EngineProcess`, the parent's hold on it.

Rules: the child runs one engine loop on its main thread and nothing else of weight; a reader thread
only moves messages from the pipe to a queue. The child ignores SIGINT and SIGTERM (its parent decides
when it ends) and leaves at once when the pipe closes. Every accepted request gets one terminal delta;
an engine loop that raises out of `step` is in an unknown state, so the process ends with status 1 and
the parent tells every open request. Between steps, and at least every `BEAT_S` seconds, it says that
it is alive.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from hotprefix.engine.messages import Delta, EngineInfo, EngineStats, FlushReport, Generate
from hotprefix.engine.wire import (
    Abort,
    Beat,
    Deltas,
    Failed,
    FromChild,
    Loading,
    Ready,
    Reply,
    Submit,
    ToChild,
)
from hotprefix.errors import HotprefixError

BEAT_S = 1.0
BUSY_BEAT_S = 0.1

Progress = Callable[[str], None]


class Loop(Protocol):
    """What the child drives: a synchronous engine on one thread.

    submit raises InputError, RequestRejected or QueueFull; abort of an id that is not live is
    ignored; each live id gets its terminal delta from `step`, aborted ones included.
    """

    @property
    def info(self) -> EngineInfo: ...
    @property
    def has_work(self) -> bool: ...
    def submit(self, message: Generate) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[Delta]: ...
    def flush_cache(self) -> FlushReport: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


Build = Callable[[Any, Progress], Loop]


def _portable(error: Exception) -> HotprefixError:
    """The error as one of ours, which unpickles anywhere. Others are bugs: their trace goes to stderr."""
    if isinstance(error, HotprefixError):
        return error
    traceback.print_exception(error)
    return HotprefixError(f"{type(error).__name__}: {error}")


def child_main(pipe: Connection, build: Build, config: Any) -> None:
    """Body of the child process: build the engine, run it until told to exit or the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    inbox: queue.SimpleQueue[ToChild] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, inbox), name="engine-inbox", daemon=True).start()
    try:
        loop = build(config, lambda text: pipe.send(Loading(text)))
    except Exception as error:
        pipe.send(Failed(_portable(error)))
        sys.exit(1)
    pipe.send(Ready(loop.info))
    try:
        _Driver(pipe, inbox, loop).run()
    except BrokenPipeError:
        sys.exit(0)


def _read(pipe: Connection, inbox: queue.SimpleQueue[ToChild]) -> None:
    """Drain the pipe for ever. The parent is gone when it closes, and with it any use for this process."""
    while True:
        try:
            inbox.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(0)


class _Driver:
    """Alternates between messages and steps."""

    def __init__(self, pipe: Connection, inbox: queue.SimpleQueue[ToChild], loop: Loop) -> None:
        self._pipe = pipe
        self._inbox = inbox
        self._loop = loop
        self._live: set[str] = set()
        self._exit = False
        self._beaten = 0.0

    def run(self) -> None:
        while not self._exit:
            for message in self._arrived():
                self._handle(message)
            if self._loop.has_work:
                self._step()
            else:
                self._beat(busy=False)
        self._loop.close()

    def _arrived(self) -> Sequence[ToChild]:
        """Every waiting message; when idle, wait up to BEAT_S for one."""
        found: list[ToChild] = []
        with contextlib.suppress(queue.Empty):
            if not self._loop.has_work:
                found.append(self._inbox.get(timeout=BEAT_S))
            while True:
                found.append(self._inbox.get_nowait())
        return found

    def _step(self) -> None:
        deltas = self._loop.step()
        self._live.difference_update(delta.id for delta in deltas if delta.finish is not None)
        busy = self._loop.has_work
        if deltas:
            self._pipe.send(Deltas(tuple(deltas), busy))
        elif not busy or time.monotonic() - self._beaten > BUSY_BEAT_S:
            self._beat(busy)

    def _beat(self, busy: bool) -> None:
        self._beaten = time.monotonic()
        self._pipe.send(Beat(busy))

    def _handle(self, message: ToChild) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            for request_id in message.ids:
                if request_id in self._live:
                    self._loop.abort(request_id)
        elif message.name == "exit":
            self._exit = True
        else:
            action = self._loop.flush_cache if message.name == "flush" else self._loop.stats
            self._reply(message.call, action)

    def _submit(self, message: Submit) -> None:
        """All or none: requests taken before one is refused are aborted again."""
        taken: list[str] = []
        try:
            for request in message.requests:
                self._loop.submit(request)
                taken.append(request.id)
                self._live.add(request.id)
        except Exception as error:
            for request_id in taken:
                self._loop.abort(request_id)
            self._pipe.send(Reply(message.call, error=_portable(error)))
        else:
            self._pipe.send(Reply(message.call))

    def _reply(self, call: int, action: Callable[[], Any]) -> None:
        try:
            reply = Reply(call, action())
        except Exception as error:
            reply = Reply(call, error=_portable(error))
        self._pipe.send(reply)


class EngineProcess:
    """The parent's hold on one child: its pipe and two threads, one that writes and one that reads.
    `on_message` and `on_death` are called on the event loop that made this object; nothing comes after
    `on_death`."""

    def __init__(
        self,
        build: Build,
        config: Any,
        on_message: Callable[[EngineProcess, FromChild], None],
        on_death: Callable[[EngineProcess], None],
    ) -> None:
        self._on_message, self._on_death = on_message, on_death
        self._loop = asyncio.get_running_loop()
        self._outbox: queue.SimpleQueue[ToChild | None] = queue.SimpleQueue()
        self._gone = asyncio.Event()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=child_main, args=(theirs, build, config), name="hotprefix-engine", daemon=True
        )
        threading.Thread(target=self._run, args=(theirs,), name="engine-reader", daemon=True).start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that ended it. None while it runs or where it could not start."""
        return self._process.exitcode

    def send(self, message: ToChild) -> None:
        """Never blocks, however busy or stuck the child is."""
        self._outbox.put(message)

    def kill(self) -> None:
        if self._process.pid is not None:
            self._process.kill()

    async def gone(self, limit_s: float) -> bool:
        """Wait until the child has ended, at most `limit_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), limit_s)
        return self._gone.is_set()

    def _run(self, theirs: Connection) -> None:
        """Start the child, then read until its end of the pipe closes."""
        try:
            self._process.start()
            atexit.register(self.kill)  # before multiprocessing's own handler, which would wait for ever
            theirs.close()
            threading.Thread(target=self._write, name="engine-writer", daemon=True).start()
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._tell(self._on_message, self, self._pipe.recv())
            self._process.join()
        finally:
            atexit.unregister(self.kill)
            self._outbox.put(None)
            self._tell(self._end)

    def _end(self) -> None:
        self._gone.set()
        self._on_death(self)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self._pipe.send(message)

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has been closed
            self._loop.call_soon_threadsafe(function, *args)
