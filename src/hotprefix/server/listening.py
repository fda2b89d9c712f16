"""What running a server needs, whatever it serves. Owns: the socket, uvicorn without its signals, and waiting
for one of two things.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn

from hotprefix.errors import ConfigError
from hotprefix.server.config import ServerConfig
from hotprefix.server.protocol import bounded_http


def bind(config: ServerConfig) -> socket.socket:
    """A socket with the address, which does not listen yet. Raises ConfigError if it cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise _not_there(config, error) from error
    return listener


def listen(config: ServerConfig) -> socket.socket:
    """The socket. Raises ConfigError if the address cannot be had."""
    listener = bind(config)
    try:
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _not_there(config, error) from error
    return listener


def _not_there(config: ServerConfig, error: Exception) -> ConfigError:
    return ConfigError(
        f"cannot listen on {config.host} port {config.port}: {error}; give another --host or --port",
        param="port",
    )


def url_of(listener: socket.socket) -> str:
    """Where it listens."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def say(text: str) -> None:
    """A line of progress."""
    print(f"hotprefix: {text}", file=sys.stderr, flush=True)


class Http(uvicorn.Server):
    """Leaves signals to those who run it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(app: Any, config: ServerConfig, told: Callable[[int], None]) -> Http:
    """A server of an ASGI application that keeps to the limits. told: called with the status of each
    refusal."""
    return Http(
        uvicorn.Config(
            app, http=bounded_http(config, told), ws="none", lifespan="off", log_config=None,  # type: ignore[arg-type]
            access_log=False, proxy_headers=False, server_header=False,
            timeout_keep_alive=config.idle_timeout_s, timeout_graceful_shutdown=1,  # type: ignore[arg-type]
        )
    )  # fmt: skip


async def before(event: asyncio.Event, work: Coroutine[Any, Any, object], limit_s: float | None) -> bool:
    """Whether `work` ended before the event and within the limit; if not, it is cancelled. Raises what it
    raised."""
    task, other = asyncio.create_task(work), asyncio.create_task(event.wait())
    await asyncio.wait((task, other), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    other.cancel()
    if not task.done():
        task.cancel()
        return False
    task.result()
    return True
