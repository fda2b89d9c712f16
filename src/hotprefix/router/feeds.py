"""Opening a worker's KV events. Owns: `feeds`, which makes a `KVFeed` for a worker of a pool.

Rules: events of own engines are keys as they are; those of others become keys by their token ids, in the
pool's namespace. A snapshot is asked for only with the internal key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from hotprefix.router.config import RouterConfig
from hotprefix.router.foreign_keys import ForeignKeys
from hotprefix.router.heard import EventsAt
from hotprefix.router.kv_feed import KVFeed
from hotprefix.router.kv_snapshot import Snapshot
from hotprefix.router.pools import Pool
from hotprefix.router.roster import OpenFeed
from hotprefix.router.upstream import Upstream
from hotprefix.router.worker import Worker
from hotprefix.router.worker_spec import Kind
from hotprefix.server.internal import INTERNAL_HEADER

MOST_BYTES = 16 * 1024 * 1024


def feeds(config: RouterConfig) -> OpenFeed:
    """Makes feeds."""

    def opened(worker: Worker, events: EventsAt, pool: Pool) -> KVFeed:
        own = worker.heard is not None and worker.heard.kind is Kind.HOTPREFIX
        foreign = None if own else ForeignKeys(pool.fingerprint, pool.page_size)
        key = config.internal_key if events.snapshot else None
        snapshot = None if key is None else _snapshot(worker.upstream, key)
        return KVFeed(
            worker.name, events.endpoint, events.replay, snapshot, pool.page_size, pool.desk, foreign=foreign
        )

    return opened


def _snapshot(upstream: Upstream, key: str) -> Snapshot:
    async def page_at(cursor: int, limit: int) -> Mapping[str, Any]:
        """Raises ValueError for what is no page, and aiohttp's errors."""
        query = f"cursor={cursor}&limit={limit}"
        async with upstream.request("GET", "/kv_snapshot", query, headers={INTERNAL_HEADER: key}) as answer:
            if answer.status != 200:
                raise ValueError(f"/kv_snapshot answers {answer.status}")
            body = await answer.content.read(MOST_BYTES + 1)
            while not answer.content.at_eof() and len(body) <= MOST_BYTES:
                body += await answer.content.read(MOST_BYTES + 1 - len(body))
        found = from_json(body)
        if not isinstance(found, dict):
            raise ValueError("/kv_snapshot is no object")
        return found

    return page_at
