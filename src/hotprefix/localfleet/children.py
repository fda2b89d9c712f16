"""The fleet's processes. Owns: `Children`: starting them, passing on what they say, starting those that die
again, and ending them all.

Rules:
1. Each child is the leader of a session of its own, so Ctrl-C reaches only the parent, and killing its group
   ends its engine's process too.
2. A child that ends before it was ever ready, because of what it was given (exit status 2), is not started
   again: the fleet ends with its message.
3. A child that died too often stays away, and that is said. What that means is its owner's matter (`lost`).
4. At the end nothing is left: those that do not go in time are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final

from hotprefix.errors import InputError
from hotprefix.localfleet.lives import Lives

READY: Final = re.compile(r"ready: (.+ at http\S+|\d+ workers.*)")
"""What `hotprefix serve` and `hotprefix route` say when they can answer."""
INPUT_ERROR: Final = 2
LONGEST_LINE: Final = 1 << 16
Say = Callable[[str], None]


class Child:
    """One process, again and again.

    ready: the one that runs has said so. settled: it has been ready once, or has died. over: it is gone for
    good.
    """

    def __init__(self, name: str, command: Sequence[str], lives: Lives) -> None:
        self.name, self.command, self.lives = name, command, lives
        self.ready, self.settled, self.over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None
        self.stopping = False
        self.said = ""

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        process = self.process
        return None if process is None or process.returncode is not None else process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; a kill goes to its whole group."""
        pid = self.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if number is signal.SIGKILL else os.kill)(pid, number)

    def kill(self) -> None:
        """Kill it to see what happens; it is started again at once."""
        self.ready.clear()
        self.lives.forget()
        self.signal(signal.SIGKILL)

    def stop(self) -> None:
        """Let it end what is under way, and then go."""
        self.stopping = True
        self.signal(signal.SIGTERM)


class Children:
    """See the module's rules. folder: removed by children that find their parent gone. say: takes a line.
    failed: set when the fleet cannot go on; `why` is then the reason."""

    def __init__(self, folder: Path, restarts: int, say: Say) -> None:
        self.all: list[Child] = []
        self.failed = asyncio.Event()
        self.why: Exception | None = None
        self._folder, self._restarts, self._say = folder, restarts, say
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, command: Sequence[str]) -> Child:
        """A child more. command: arguments of `hotprefix`."""
        child = Child(name, command, Lives(self._restarts))
        self.all.append(child)
        self._tasks.append(asyncio.create_task(self._keep(child)))
        return child

    def fail(self, why: Exception) -> None:
        """The fleet cannot go on."""
        self.why = self.why or why
        self.failed.set()

    async def stop(self, children: Sequence[Child], limit_s: float) -> None:
        """Let some of them go; those that take longer are killed."""
        for child in children:
            child.stop()
        over = [asyncio.create_task(child.over.wait()) for child in children]
        if over:
            _, late = await asyncio.wait(over, timeout=limit_s)
            for task in late:
                task.cancel()
        await self._kill(children)

    async def close(self) -> None:
        """Kill what still runs."""
        await self._kill(self.all)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _kill(self, children: Sequence[Child]) -> None:
        for child in children:
            child.stopping = True
        while any(not child.over.is_set() for child in children):  # one may just be about to start
            for child in children:
                child.signal(signal.SIGKILL)
            await asyncio.sleep(0.02)

    async def _keep(self, child: Child) -> None:
        try:
            while await self._lives_again(child):
                pass
        except Exception as error:
            self.fail(error)
        child.settled.set()
        child.over.set()

    async def _lives_again(self, child: Child) -> bool:
        """One life. Returns whether there is another."""
        if child.stopping:
            return False
        child.lives.begins(time.monotonic())
        status = await self._live(child)
        if child.stopping:
            return False
        first = not child.settled.is_set()
        child.settled.set()
        if first and status == INPUT_ERROR:
            raise InputError(f"{child.name}: {child.said}")
        pause = child.lives.ended(time.monotonic())
        if pause is None:
            self._say(f"{child.name}: {_how(status)} too often, and is not started again")
            return False
        self._say(f"{child.name}: {_how(status)}; starts again{f' in {pause:g} s' if pause else ''}")
        end = time.monotonic() + pause
        while time.monotonic() < end and not child.stopping:
            await asyncio.sleep(0.05)
        return True

    async def _live(self, child: Child) -> int:
        """Run it to its end, and pass on what it says. Returns its exit status."""
        process = child.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hotprefix.fleet_child", str(self._folder), *child.command,
            stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        if child.stopping:
            child.signal(signal.SIGTERM)
        assert process.stderr is not None
        async for line in _lines(process.stderr):
            text = line.removeprefix("hotprefix: ")
            if text:
                child.said = text
                self._say(f"{child.name}: {text}")
            if READY.fullmatch(text):
                child.ready.set()
                child.settled.set()
        child.ready.clear()
        return await process.wait()


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines without their ends; one that is too long comes in pieces."""
    rest = b""
    while data := await stream.read(LONGEST_LINE):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        for line in lines:
            yield line.decode(errors="replace").rstrip()
    if rest:
        yield rest.decode(errors="replace").rstrip()


def _how(status: int) -> str:
    """How a process ended."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
