"""A server on a real socket in the test's event loop. Owns: `listening`, and `Raw`, a client that misbehaves.

Rules: 127.0.0.1 and a free port only; whatever a test leaves open is closed at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from hotprefix.server.app import create_app
from hotprefix.server.config import ServerConfig
from hotprefix.server.protocol import bounded_http
from hotprefix.server.service import Service
from tests.support.server import BytesText, FakeEngine


@dataclass
class Listening:
    """port: where it listens. service: its parts. connections: those that uvicorn knows of."""

    port: int
    service: Service
    http: uvicorn.Server

    @property
    def connections(self) -> int:
        return len(self.http.server_state.connections)

    def errors(self, status: int) -> int:
        """How many answers of that status were counted."""
        wanted = f'hotprefix_http_errors_total{{status="{status}"}} '
        lines = self.service.metrics.text().decode().splitlines()
        return sum(int(float(line.removeprefix(wanted))) for line in lines if line.startswith(wanted))


@contextlib.asynccontextmanager
async def listening(config: ServerConfig, engine: FakeEngine | None = None) -> AsyncIterator[Listening]:
    app = create_app(engine or FakeEngine(), config, BytesText())
    listener = socket.create_server(("127.0.0.1", 0))
    service: Service = app.state.service
    http = uvicorn.Server(
        uvicorn.Config(
            app, http=bounded_http(config, service.metrics.error), ws="none", lifespan="off", log_config=None,
            access_log=False, timeout_keep_alive=config.idle_timeout_s, timeout_graceful_shutdown=1,
        )
    )  # fmt: skip
    serving = asyncio.create_task(http._serve([listener]))
    while not http.started:
        await asyncio.sleep(0.001)
    try:
        yield Listening(listener.getsockname()[1], service, http)
    finally:
        http.should_exit = http.force_exit = True
        await serving


class Raw:
    """One TCP connection. Reads and writes raise nothing where the server closed it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> bool:
        """Whether the server still took it."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError:
            return False
        return not self._writer.is_closing()

    async def until_closed(self) -> bytes:
        """Everything the server still says, to the end it makes of the connection."""
        found = b""
        try:
            while part := await self._reader.read(65536):
                found += part
        except OSError:
            pass
        return found

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """(status, headers, JSON) of the next answer that declares its length."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await self._reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, json.loads(body) if body else None

    def close(self) -> None:
        self._writer.close()


@contextlib.asynccontextmanager
async def raw(server: Listening) -> AsyncIterator[Raw]:
    client = Raw(*await asyncio.open_connection("127.0.0.1", server.port))
    try:
        yield client
    finally:
        client.close()
