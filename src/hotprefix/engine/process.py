"""The engine's own process. Owns: the child's main function, `EngineProcess` (the parent's hold on it), and
how messages cross: pickled, those of the child with their length in four bytes before them.

Rules:
1. The parent reads and writes on its event loop; threads would fight for the interpreter's lock at every
   message.
2. The child runs one engine loop on its main thread. A reader thread only moves messages from the pipe to a
   queue. One more thread does what a request needs before it can be queued (compiling its grammar), so that
   the steps of other requests go on.
3. The child ignores SIGINT and SIGTERM, because its parent decides when it ends. It leaves at once when the
   pipe closes.
4. Every accepted request gets one terminal delta. An engine loop that raises out of `step` is in an unknown
   state, so the process ends with status 1 and the parent ends every open request.
5. The child says that it is alive between steps, and at least every `BEAT_S` seconds while it is idle.
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
from hotprefix.engine.pipe_records import (
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

    `submit` raises InputError, RequestRejected or QueueFull. `abort` ignores an id that is not live. Each
    live id gets its terminal delta from `step`, also if it was aborted.
    """

    @property
    def info(self) -> EngineInfo: ...
    @property
    def has_work(self) -> bool: ...
    def prepare(self, message: Generate) -> Callable[[], None] | None:
        """Slow work that another thread is to do before `submit`. None if there is none."""
        ...

    def submit(self, message: Generate) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[Delta]: ...
    def flush_cache(self) -> FlushReport: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


Build = Callable[[Any, Progress], Loop]


def _portable(error: Exception) -> HotprefixError:
    """The error as one of ours, which can be unpickled anywhere. Any other error is a bug: its trace goes to
    stderr."""
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
    """Move messages from the pipe to the inbox until the pipe closes. Then the parent is gone, and this
    process ends."""
    stream = pipe.makefile("rb")
    while True:
        try:
            inbox.put(pickle.load(stream))
        except (EOFError, OSError, pickle.UnpicklingError):
            os._exit(0)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A message that was set aside can be submitted now."""

    message: Submit


Inbox = queue.SimpleQueue[ToChild | Prepared]


class Preparer:
    """Does on its own thread what messages need, one message after the other, and puts them back into the
    inbox."""

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
            with contextlib.suppress(Exception):  # submit raises it again, and reports it
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
        self._aborted: set[str] = set()  # while their messages were set aside
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
        """Every message that has come. If there is none and the loop is idle, wait up to BEAT_S for one."""
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
        """Submit the message if its requests need no preparation; otherwise let it wait for that."""
        work = [todo for request in message.requests if (todo := self._loop.prepare(request)) is not None]
        if not work:
            self._submit(message)
            return
        self._aside.update(request.id for request in message.requests)
        self._preparer.take(message, work)

    def _go_on(self, message: Submit) -> None:
        """Submit a message that was set aside, and end at once the requests that were aborted meanwhile."""
        self._submit(message)
        ids = {request.id for request in message.requests}
        for request_id in ids & self._aborted & self._live:
            self._loop.abort(request_id)
        self._aside -= ids
        self._aborted -= ids

    def _submit(self, message: Submit) -> None:
        """Submit all requests or none: if one is refused, those taken before it are aborted again."""
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
    """The parent's hold on one child. `on_message` and `on_death` are called on the event loop that made this
    object; no call comes after `on_death`."""

    def __init__(
        self,
        build: Build,
        config: Any,
        on_message: Callable[[EngineProcess, FromChild], None],
        on_death: Callable[[EngineProcess], None],
    ) -> None:
        self._on_message, self._on_death = on_message, on_death
        self._unsent: list[bytes] = []  # messages sent before there is a writer
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
        """The child's exit status; negative: the signal that ended it. None while it runs or if it could not
        start."""
        return self._process.exitcode

    def send(self, message: ToChild) -> None:
        """Send a message. Never blocks, however busy or stuck the child is."""
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
            atexit.register(self.kill)  # runs before multiprocessing's own, which would wait for ever
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
        """Read messages until the pipe closes. An exception out of `on_message` is left to the event loop to
        report, and does not end the reading."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                size = int.from_bytes(await reader.readexactly(4), "big")
                data = await reader.readexactly(size)
            except (asyncio.IncompleteReadError, OSError):
                return
            loop.call_soon(self._on_message, self, pickle.loads(data))
