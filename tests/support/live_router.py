"""A router before scripted workers, all in one process, for tests of its page. Owns: its main.

Rules: two workers of one model that answer, one of them under a name and a model that are HTML; one whose
answers fail; one that is not there. Argument: an API key, or none.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from hotprefix.router.worker_spec import parse
from hotprefix.server.config import ServerConfig
from tests.support.routing import FakeWorker, fleet, refuses, report, says, up

EVIL = "<img src=x onerror=\"document.title='owned'\">"


async def run(key: str = "") -> None:
    server = ServerConfig(key_digests=ServerConfig.digests([key]) if key else frozenset())
    models = [{"id": EVIL, "object": "model", "root": EVIL}]
    one, odd = (FakeWorker(name, says("a"), load=report(model=EVIL), models=models) for name in ("w0", "odd"))
    bad = FakeWorker("bad", refuses(500), load=report(model=EVIL), models=models)
    settings = {"policy": "round_robin", "breaker_failures": 1, "breaker_open_s": 1e6, "poll_s": 0.05}
    async with up(odd), fleet(one, bad, server=server, **settings) as before:
        for spec in (replace(parse(odd.url), name=EVIL), parse("http://127.0.0.1:9,name=gone")):
            before.router.roster.add(spec)
        await before.until(lambda: len(before.pool.workers) == 3)
        print(f"listening on {before.url}, policy {before.router.config.policy}", file=sys.stderr)
        print("ready: 4 workers", file=sys.stderr, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
