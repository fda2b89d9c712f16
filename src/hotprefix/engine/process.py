"""The engine's own process, from outside. Owns: `EngineProcess`, the parent's hold on it.

Rules:
1. Messages cross the pipe pickled, those of the child with their length in four bytes before them.
2. The parent reads and writes on its event loop; threads would fight for the interpreter's lock at every
   message.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import multiprocessing
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from hotprefix.engine.child import Build, child_main
from hotprefix.engine.pipe_records import FromChild, ToChild


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
