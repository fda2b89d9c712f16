"""`hotprefix fleet`. Owns: one run of it, its signals and the way down.

Rules: the address is taken before anything is loaded. The first SIGTERM or SIGINT stops: the router drains as
`hotprefix route` does, then the engines go. The second kills everything. Progress goes to stderr.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Mapping
from typing import Any

from hotprefix.localfleet.arguments import cores, share
from hotprefix.localfleet.config import LocalFleetConfig
from hotprefix.localfleet.fleet import LocalFleet
from hotprefix.server.config import ServerConfig
from hotprefix.server.listening import before, say


def run_fleet(config: LocalFleetConfig, server: ServerConfig, given: Mapping[str, Any]) -> None:
    """Run until a signal. given: the command's parameters and their values. Raises ConfigError (the address),
    InputError (what a child says of its options), EngineDead."""
    asyncio.run(_run(config, server, given))


async def _run(config: LocalFleetConfig, server: ServerConfig, given: Mapping[str, Any]) -> None:
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (stop_now if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    async with LocalFleet(config, given, say) as fleet:
        port = fleet.port(server)
        say(f"starting {config.engines} engines{_parts(given, config.engines)}, then the router")
        if await before(stop, _up(fleet, port), None):
            host = f"[{server.host}]" if ":" in server.host else server.host
            ready = sum(worker.ready.is_set() for worker in fleet.workers)
            say(f"ready: {ready} of {config.engines} engines at http://{host}:{port}/v1")
            await before(stop, fleet.going(_for_ever()), None)
        say("stopping: the router, then the engines; a second signal kills them")
        await before(stop_now, fleet.stop(server.drain_s), None)


async def _up(fleet: LocalFleet, port: int) -> None:
    await fleet.start_engines()
    await fleet.start_router("router", port)


def _for_ever() -> Coroutine[Any, Any, bool]:
    return asyncio.Event().wait()


def _parts(given: Mapping[str, Any], workers: int) -> str:
    """What each gets of the machine, as far as it was not told."""
    part = share(given, workers)
    told = []
    if "threads" in part:
        told.append(f"{part['threads']} of {cores()} cores")
    if "kv_tokens" in part:
        told.append(f"{part['kv_tokens']} tokens of KV")
    return f" with {' and '.join(told)} each" if told else ""
