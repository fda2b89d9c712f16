"""The engine's own process, from inside. Owns: its main function and what it does with messages.

Rules:
1. One engine loop runs on the main thread. A reader thread only moves messages from the pipe to a queue. One
   more thread does what a request needs before it can be queued (compiling its grammar), so that the steps of
   other requests go on.
2. SIGINT and SIGTERM are ignored, because the parent decides when this process ends. It leaves at once when
   the pipe closes.
3. Every accepted request gets one terminal delta. An engine loop that raises out of `step` is in an unknown
   state, so the process ends with status 1 and the parent ends every open request.
4. The child says that it is alive between steps, and at least every `BEAT_S` seconds while it is idle.
"""

from __future__ import annotations

import contextlib
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
from typing import Any, Protocol

from hotprefix.engine.messages import (
    Delta,
    EngineInfo,
    EngineLoad,
    EngineStats,
    FlushReport,
    Generate,
    KVSnapshot,
)
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
    def load(self) -> EngineLoad: ...
    def kv_snapshot(self) -> KVSnapshot | None: ...
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
            self._reply(message.call, getattr(self._loop, message.name))

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
