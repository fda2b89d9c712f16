"""Running the router. Owns: the socket, signals and the way down.

Rules: the address is taken before any worker is asked. The first SIGTERM or SIGINT drains: new requests get
503, and open ones may finish within `drain_s`. The second signal stops at once. Progress goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket

import uvloop

from hotprefix.router.config import RouterConfig
from hotprefix.router.feeds import feeds
from hotprefix.router.router import Router
from hotprefix.server.config import ServerConfig
from hotprefix.server.listening import before, http_server, listen, say, url_of


def route(config: RouterConfig, server: ServerConfig) -> None:
    """Route until a signal. Raises ConfigError (the address, the list of workers)."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with (
        contextlib.closing(listen(server)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_run(config, server, listener))


async def _run(config: RouterConfig, server: ServerConfig, listener: socket.socket) -> None:
    router = Router(config, server, say, open_feed=feeds(config))
    http = http_server(router.app, server, router.metrics.error)
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (stop_now if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        say(f"listening on {url_of(listener)}, policy {config.policy}")
        if await before(stop, router.begin(), None):
            say(f"ready: {len(router.roster.workers)} workers, {len(router.pools.all)} models")
            gc.collect()
            gc.freeze()  # or a full collection would walk all that is loaded, in the middle of a stream
            await stop.wait()
        router.gate.draining = True
        say(f"stopping: open requests may run for {server.drain_s:g} s; a second signal stops at once")
        if not await before(stop_now, router.gate.idle(), server.drain_s):
            say("stopping: open requests end now")
    finally:
        router.gate.draining = True
        http.should_exit, http.force_exit = True, stop_now.is_set()
        await serving
        await router.close()
