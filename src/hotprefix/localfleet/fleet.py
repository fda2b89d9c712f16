"""Engines and routers on this machine. Owns: `LocalFleet`: their folder, key, ports and processes, from start
to end.

Rules:
1. The key is made anew each time and stands in a file that only this user can read, in a folder that is
   removed at the end.
2. The router is started when each engine is ready, or has died once.
3. The fleet lives while its routers and at least one engine can be kept alive.
4. On the way down routers go first, because they drain; engines then have nothing left to do.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from hotprefix.errors import EngineDead
from hotprefix.localfleet.arguments import LOOPBACK, Engine, Typed
from hotprefix.localfleet.children import Child, Children, Say
from hotprefix.localfleet.config import LocalFleetConfig
from hotprefix.localfleet.ports import Ports
from hotprefix.server.config import ServerConfig

GRACE_S: Final = 10.0
"""What a child may take beyond its open requests."""


class LocalFleet:
    """given: the command's parameters and their values; the options of engines and router are taken from it.
    Made inside the event loop. As a context: at its end all is stopped at once.

    engines: where they listen.
    workers: their processes, in the same order.
    routers: processes of routers.
    """

    def __init__(self, config: LocalFleetConfig, given: Mapping[str, Any], say: Say) -> None:
        self._config, self._say, self._ports = config, say, Ports()
        self.folder = Path(tempfile.mkdtemp(prefix="hotprefix-fleet-"))
        key = self.folder / "key"
        with os.fdopen(os.open(key, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        self.children = Children(self.folder, config.restarts, say)
        self.typed = Typed(given, config.engines, key)
        self.engines: list[Engine] = []
        self.workers: list[Child] = []
        self.routers: list[Child] = []
        self._watching: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._watching:
            task.cancel()
        await self.children.close()
        self._ports.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def port(self, at: ServerConfig) -> int:
        """A port for a router. Raises ConfigError if it cannot be had."""
        return self._ports.take(at)

    async def start_engines(self, *last: Mapping[str, Any]) -> None:
        """Start them, and wait until each is ready or has died once. last: options of the last ones that are
        not as they were given. Raises what `going` raises."""
        at = ServerConfig(host=LOOPBACK, port=0)
        self.engines = [Engine(f"worker-{n}", self._ports.take(at)) for n in range(self._config.engines)]
        others: list[Mapping[str, Any]] = [{} for _ in self.engines[len(last) :]]
        self.workers = [
            self.children.start(engine.name, self.typed.engine(engine, **other))
            for engine, other in zip(self.engines, [*others, *last], strict=True)
        ]
        self._watching.append(asyncio.create_task(self._while_one_lives("every engine", self.workers)))
        await self.going(_all_settled(self.workers))

    async def start_router(self, name: str, port: int, **other: Any) -> Child:
        """A router before the engines, and wait until it is ready. other: options that are not as they were
        given."""
        command = self.typed.router(port, self.engines, **other)
        child = self.children.start(name, command)
        self.routers.append(child)
        self._watching.append(asyncio.create_task(self._while_one_lives(name, [child])))
        await self.going(child.ready.wait())
        return child

    async def going(self, work: Any) -> None:
        """Wait for something. Raises InputError or EngineDead if the fleet cannot go on before that, and what
        the work raises."""
        task = asyncio.ensure_future(work)
        failed = asyncio.ensure_future(self.children.failed.wait())
        try:
            await asyncio.wait((task, failed), return_when=asyncio.FIRST_COMPLETED)
            if self.children.why is not None:
                raise self.children.why
            task.result()
        finally:
            for each in (task, failed):
                each.cancel()
            await asyncio.gather(task, failed, return_exceptions=True)

    async def stop(self, drain_s: float) -> None:
        """Routers first, then engines; open requests may end."""
        await self.children.stop(self.routers, drain_s + GRACE_S)
        await self.children.stop(self.workers, GRACE_S)

    async def _while_one_lives(self, what: str, children: Sequence[Child]) -> None:
        for child in children:
            await child.over.wait()
        if not all(child.stopping for child in children):
            self.children.fail(EngineDead(f"{what} died too often: {children[-1].said}"))


async def _all_settled(children: Sequence[Child]) -> None:
    for child in children:
        await child.settled.wait()
