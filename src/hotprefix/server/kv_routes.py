"""Routes about KV events. Owns: GET /kv_event_sources, which says where they come from, and GET /kv_snapshot,
which gives all that is cached to a router that came late.

Rules:
1. A snapshot is taken whole, between two steps, and handed out page by page. All its pages tell the number of
   the last batch of events that it covers, so what follows is that batch's successor.
2. At most KEPT snapshots are remembered, of 8 bytes a page of L1. A page of an older one is gone (410), and
   the reader begins again.
3. A cursor is a snapshot's number in the upper bits and a place in it in the lower ones, so it grows from
   page to page. Cursor 0 takes a new snapshot.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from itertools import count

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hotprefix.engine.messages import EngineLoad, KVSnapshot
from hotprefix.errors import EngineDead, InputError, shortened
from hotprefix.records.kvwire import RANK, Medium
from hotprefix.server.admin import patience
from hotprefix.server.errors import ApiError
from hotprefix.server.latest import Latest
from hotprefix.server.service import Service

KEPT = 4
MOST_PAGES = 1 << 16
USUAL_PAGES = 1 << 14
PLACE_BITS = 32


class KVRoutes:
    """The two routes. load: what the engine said last of its load."""

    def __init__(self, service: Service, load: Latest[EngineLoad]) -> None:
        self._service, self._load = service, load
        self._kept: OrderedDict[int, tuple[KVSnapshot, array[int]]] = OrderedDict()
        self._serials = count(1)

    async def sources(self, request: Request) -> Response:
        """In vLLM's form: a list with one entry for each data-parallel rank; empty without KV events."""
        latest = await self._load.get()
        if latest is None:
            raise EngineDead("the engine does not say where its KV events are")
        kv = latest[0].kv
        if kv is None:
            return JSONResponse([])
        return JSONResponse(
            [
                {
                    "data_parallel_rank": RANK,
                    "endpoint": kv.endpoint,
                    "replay_endpoint": kv.replay,
                    "topic": kv.topic,
                }
            ]
        )

    async def snapshot(self, request: Request) -> Response:
        cursor = _number(request, "cursor", 0, 0, (1 << 63) - 1)
        limit = _number(request, "limit", USUAL_PAGES, 1, MOST_PAGES)
        serial, first = cursor >> PLACE_BITS, cursor & ((1 << PLACE_BITS) - 1)
        if not cursor:
            serial = await self._take()
        if serial not in self._kept:
            raise ApiError(
                410, f"cursor={cursor}: this snapshot is gone; begin again at 0", code="snapshot_gone"
            )
        told, hashes = self._kept[serial]
        last = first + limit
        return Response(
            to_json(
                {
                    "incarnation": told.incarnation,
                    "number": told.number,
                    "medium": Medium.GPU.value,
                    "pages": hashes[first:last].tolist(),
                    "cursor": serial << PLACE_BITS | last if last < len(hashes) else None,
                }
            ),
            media_type="application/json",
            headers={"cache-control": "no-store"},
        )

    async def _take(self) -> int:
        """Take a snapshot and return its number. Raises ApiError 404 if there are no KV events."""
        async with patience():
            told = await self._service.engine.kv_snapshot()
        if told is None:
            raise ApiError(404, "there are no KV events here: they need --kv-events", code="no_kv_events")
        serial = next(self._serials)
        self._kept[serial] = told, array("Q", told.hashes)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return serial


def _number(request: Request, name: str, usual: int, least: int, most: int) -> int:
    given = request.query_params.get(name)
    if given is None:
        return usual
    if given.isascii() and given.isdigit() and len(given) < 20 and least <= int(given) <= most:
        return int(given)
    raise InputError(f"{name}={shortened(given)}: give a whole number from {least} to {most}", param=name)
