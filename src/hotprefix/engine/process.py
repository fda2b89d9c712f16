"""The engine's own process. Owns: the child's main function, `EngineProcess` (the parent's hold on it), and
how messages cross: pickled, those of the child with their length in four bytes before them.

Rules: the parent reads and writes on its event loop; threads would fight for the interpreter's lock at every
message. The child runs one engine loop on its main thread; a reader thread only moves messages from the
pipe to a queue, and one more does what a request needs before it can be queued (compiling its grammar),
so that the steps of others go on. The child ignores SIGINT and SIGTERM (its parent decides
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
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    def prepare(self, message: Generate) -> Callable[[], None] | None:
        """What is to be done on another thread before `submit`, so that this is quick. None: nothing."""
        ...

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


def child_main(pipe: socket.socket, build: Build, config: Any) -> None:
    """Body of the child process: build the engine, run it until told to exit or the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, inbox), name="engine-inbox", daemon=True).start()

    def tell(message: FromChild) -> None:
        data = pickle.dumps(message)
        pipe.sendall(len(data).to_bytes(4, "big") + data)

    try:
        loop = build(config, lambda text: tell(Loading(text)))
    except Exception as error:
        tell(Failed(_portable(error)))
        sys.exit(1)
    tell(Ready(loop.info))
    try:
        Driver(tell, inbox, loop).run()
    except BrokenPipeError:
        sys.exit(0)


def _read(pipe: socket.socket, inbox: Inbox) -> None:
    """Drain the pipe for ever. The parent is gone when it closes, and with it any use for this process."""
    stream = pipe.makefile("rb")
    while True:
        try:
            inbox.put(pickle.load(stream))
        except (EOFError, OSError, pickle.UnpicklingError):
            os._exit(0)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A message that was set aside is ready to be submitted."""

    message: Submit


Inbox = queue.SimpleQueue[ToChild | Prepared]


class Preparer:
    """Works on its own thread through what messages need, one after the other, and puts them back."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._todo: queue.SimpleQueue[tuple[Submit, list[Callable[[], None]]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, message: Submit, work: list[Callable[[], None]]) -> None:
        self._todo.put((message, work))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine-preparer", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            message, work = self._todo.get()
            with contextlib.suppress(Exception):  # submit meets it again, and tells it
                for one in work:
                    one()
            self._inbox.put(Prepared(message))


class Driver:
    """Alternates between messages and steps."""

    def __init__(self, tell: Callable[[FromChild], None], inbox: Inbox, loop: Loop) -> None:
        self._tell = tell
        self._inbox = inbox
        self._loop = loop
        self._preparer = Preparer(inbox)
        self._live: set[str] = set()
        self._aside: set[str] = set()
        self._aborted: set[str] = set()  # while they were set aside
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

    def _arrived(self) -> Sequence[ToChild | Prepared]:
        """Every waiting message; when idle, wait up to BEAT_S for one."""
        found: list[ToChild | Prepared] = []
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
            self._tell(Deltas(tuple(deltas), busy))
        elif not busy or time.monotonic() - self._beaten > BUSY_BEAT_S:
            self._beat(busy)

    def _beat(self, busy: bool) -> None:
        self._beaten = time.monotonic()
        self._tell(Beat(busy))

    def _handle(self, message: ToChild | Prepared) -> None:
        if isinstance(message, Submit):
            self._set_aside(message)
        elif isinstance(message, Prepared):
            self._go_on(message.message)
        elif isinstance(message, Abort):
            self._aborted.update(self._aside.intersection(message.ids))
            for request_id in message.ids:
                if request_id in self._live:
                    self._loop.abort(request_id)
        elif message.name == "exit":
            self._exit = True
        else:
            action = self._loop.flush_cache if message.name == "flush" else self._loop.stats
            self._reply(message.call, action)

    def _set_aside(self, message: Submit) -> None:
        """Submit what needs nothing; let the rest wait for its preparation."""
        work = [todo for request in message.requests if (todo := self._loop.prepare(request)) is not None]
        if not work:
            self._submit(message)
            return
        self._aside.update(request.id for request in message.requests)
        self._preparer.take(message, work)

    def _go_on(self, message: Submit) -> None:
        """Submit a message that was set aside, and end at once what was aborted meanwhile."""
        self._submit(message)
        ids = {request.id for request in message.requests}
        for request_id in ids & self._aborted & self._live:
            self._loop.abort(request_id)
        self._aside -= ids
        self._aborted -= ids

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
            self._tell(Reply(message.call, error=_portable(error)))
        else:
            self._tell(Reply(message.call))

    def _reply(self, call: int, action: Callable[[], Any]) -> None:
        try:
            reply = Reply(call, action())
        except Exception as error:
            reply = Reply(call, error=_portable(error))
        self._tell(reply)


class EngineProcess:
    """The parent's hold on one child. `on_message` and `on_death` are called on the event loop that made
    this object; nothing comes after `on_death`."""

    def __init__(
        self,
        build: Build,
        config: Any,
        on_message: Callable[[EngineProcess, FromChild], None],
        on_death: Callable[[EngineProcess], None],
    ) -> None:
        self._on_message, self._on_death = on_message, on_death
        self._unsent: list[bytes] = []  # while there is no writer
        self._writer: asyncio.StreamWriter | None = None
        self._gone = asyncio.Event()
        ours, theirs = socket.socketpair()
        self._process: BaseProcess = multiprocessing.get_context("spawn").Process(
            target=child_main, args=(theirs, build, config), name="hotprefix-engine", daemon=True
        )
        self._task = asyncio.get_running_loop().create_task(self._run(ours, theirs))

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that ended it. None while it runs or where it could not start."""
        return self._process.exitcode

    def send(self, message: ToChild) -> None:
        """Never blocks, however busy or stuck the child is."""
        data = pickle.dumps(message)
        if self._writer is None:
            self._unsent.append(data)
        else:
            self._writer.write(data)

    def kill(self) -> None:
        if self._process.pid is not None:
            self._process.kill()

    async def gone(self, limit_s: float) -> bool:
        """Wait until the child has ended, at most `limit_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), limit_s)
        return self._gone.is_set()

    async def _run(self, ours: socket.socket, theirs: socket.socket) -> None:
        """Start the child, then read until its end of the pipe closes."""
        try:
            with theirs:
                await asyncio.to_thread(self._process.start)
            atexit.register(self.kill)  # before multiprocessing's own handler, which would wait for ever
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            self._writer.writelines(self._unsent)
            await self._listen(reader)
        except Exception as error:
            traceback.print_exception(error)
            self.kill()
        (self._writer or ours).close()
        if self._process.pid is not None:
            await asyncio.to_thread(self._process.join)
        atexit.unregister(self.kill)
        self._gone.set()
        self._on_death(self)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Until the pipe closes. What a listener raises is the event loop's to report, and ends nothing."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                size = int.from_bytes(await reader.readexactly(4), "big")
                data = await reader.readexactly(size)
            except (asyncio.IncompleteReadError, OSError):
                return
            loop.call_soon(self._on_message, self, pickle.loads(data))
