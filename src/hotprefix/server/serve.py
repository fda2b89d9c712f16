"""Running the server. Owns: the socket, loading, signals and the way down.

Rules: the address is taken before anything is loaded, and answers 503 until the engine can answer. The first
SIGTERM or SIGINT drains: new requests get 503, and open ones may finish within `drain_s`, then end with an
error. If no request is open, there is no wait. The second signal stops at once. Progress goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn
import uvloop
from starlette.applications import Starlette

from hotprefix.engine.child import Build, Loop, Progress
from hotprefix.engine.client import AsyncEngine
from hotprefix.engine.config import EngineConfig
from hotprefix.errors import ConfigError, EngineDead
from hotprefix.server.app import create_app
from hotprefix.server.config import ServerConfig
from hotprefix.server.protocol import bounded_http
from hotprefix.server.text import Text

LoadText = Callable[[str], Text]


def build(config: EngineConfig, progress: Progress) -> Loop:
    """Build the engine. Called in the engine's process; torch is imported only there, and not for a paced
    engine."""
    from hotprefix.records.open_recorder import open_recorder

    if config.paced is not None:
        from hotprefix.engine.paced.build import build_paced

        return build_paced(config, progress, open_recorder(config))
    from hotprefix.engine.build import build_engine

    return build_engine(config, progress, observer=open_recorder(config))


def load_text(model: str) -> Text:
    """Tokenizer and chat template of a model. Raises ModelLoadError."""
    from hotprefix.server.model_text import ModelText

    return ModelText.load(model)


def serve(
    engine: EngineConfig, config: ServerConfig, *, build: Build = build, load: LoadText = load_text
) -> None:
    """Serve until a signal. Raises ConfigError (the address), ModelLoadError, EngineDead."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with (
        contextlib.closing(_listen(config)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_Run(engine, config, build, load).run(listener))


def _listen(config: ServerConfig) -> socket.socket:
    """The socket. Raises ConfigError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {error}; give another --host or --port",
            param="port",
        ) from error
    return listener


def _say(text: str) -> None:
    print(f"hotprefix: {text}", file=sys.stderr, flush=True)


class _Http(uvicorn.Server):
    """Leaves signals to `_Run`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Run:
    """One run of the server, from loading to its end."""

    def __init__(self, engine: EngineConfig, config: ServerConfig, build: Build, load: LoadText) -> None:
        self._model, self._config, self._load = engine.model, config, load
        self._engine = AsyncEngine(engine, build, on_progress=_say)
        self._app: Starlette = create_app(self._engine, config)
        http = bounded_http(config, self._app.state.service.metrics.error)
        self._http = _Http(
            uvicorn.Config(
                self._app, http=http, ws="none", lifespan="off", log_config=None, access_log=False,  # type: ignore[arg-type]
                proxy_headers=False, server_header=False, timeout_keep_alive=config.idle_timeout_s,  # type: ignore[arg-type]
                timeout_graceful_shutdown=1,
            )
        )  # fmt: skip
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        serving = asyncio.create_task(self._http.serve(sockets=[listener]))
        try:
            _say(f"listening on {url}, loading {self._model}")
            if await self._first(self._loaded()):
                _say(f"ready: {self._engine.info.model} at {url}/v1")
                if await self._first(self._engine.failed.wait()):
                    raise EngineDead(self._engine.health().reason)
            await self._drain()
        finally:
            self._app.state.service.gate.draining = True
            at_once = self._stop_now.is_set() or not self._engine.health().ok
            await self._engine.stop(0.0 if at_once else 5.0)  # first, so that open requests end
            self._http.should_exit, self._http.force_exit = True, self._stop_now.is_set()
            await serving

    def _signalled(self) -> None:
        (self._stop_now if self._stop.is_set() else self._stop).set()

    async def _first(self, work: Coroutine[Any, Any, object]) -> bool:
        """Whether `work` ended before a signal came. Raises what it raised."""
        return await _before(self._stop, work, None)

    async def _loaded(self) -> None:
        text, _ = await asyncio.gather(asyncio.to_thread(self._load, self._model), self._engine.start())
        text.bound(self._engine.info.max_model_len)
        self._app.state.service.text = text
        gc.collect()
        gc.freeze()  # or a full collection would walk all that is loaded, in the middle of a stream

    async def _drain(self) -> None:
        gate = self._app.state.service.gate
        gate.draining = True
        _say(f"stopping: open requests may run for {self._config.drain_s:g} s; a second signal stops at once")
        if not await _before(self._stop_now, gate.idle(), self._config.drain_s):
            _say("stopping: open requests end now")


async def _before(event: asyncio.Event, work: Coroutine[Any, Any, object], limit_s: float | None) -> bool:
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
