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
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop
from starlette.applications import Starlette

from hotprefix.engine.child import Build, Loop, Progress
from hotprefix.engine.client import AsyncEngine
from hotprefix.engine.config import EngineConfig
from hotprefix.errors import EngineDead
from hotprefix.server.app import create_app
from hotprefix.server.config import ServerConfig
from hotprefix.server.listening import before, http_server, listen, say, url_of
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
        contextlib.closing(listen(config)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_Run(engine, config, build, load).run(listener))


class _Run:
    """One run of the server, from loading to its end."""

    def __init__(self, engine: EngineConfig, config: ServerConfig, build: Build, load: LoadText) -> None:
        self._model, self._config, self._load = engine.model, config, load
        self._engine = AsyncEngine(engine, build, on_progress=say)
        self._app: Starlette = create_app(self._engine, config)
        self._http = http_server(self._app, config, self._app.state.service.metrics.error)
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        url = url_of(listener)
        serving = asyncio.create_task(self._http.serve(sockets=[listener]))
        try:
            say(f"listening on {url}, loading {self._model}")
            if await self._first(self._loaded()):
                say(f"ready: {self._engine.info.model} at {url}/v1")
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
        return await before(self._stop, work, None)

    async def _loaded(self) -> None:
        text, _ = await asyncio.gather(asyncio.to_thread(self._load, self._model), self._engine.start())
        text.bound(self._engine.info.max_model_len)
        self._app.state.service.text = text
        gc.collect()
        gc.freeze()  # or a full collection would walk all that is loaded, in the middle of a stream

    async def _drain(self) -> None:
        gate = self._app.state.service.gate
        gate.draining = True
        say(f"stopping: open requests may run for {self._config.drain_s:g} s; a second signal stops at once")
        if not await before(self._stop_now, gate.idle(), self._config.drain_s):
            say("stopping: open requests end now")
