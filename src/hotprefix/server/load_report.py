"""GET /load: what a router has to know of this server. Owns: `LoadReport`, its form, and the route.

Rules:
1. What is not known is null, never 0.
2. It is cheap, because routers ask several times a second, and it waits for nothing: while a long step runs
   or the engine is stuck, it has the figures from before, and says how old they are.

Units: tokens, pages, requests, seconds, bytes.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from hotprefix.cost.model import CostModel
from hotprefix.engine.messages import EngineInfo, EngineLoad
from hotprefix.errors import EngineDead
from hotprefix.server.latest import Latest
from hotprefix.server.service import Service

FRESH_S = 0.05
WAIT_S = 0.2


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True)


class Pages(_Told):
    """L1's pages by state."""

    free: int
    evictable: int
    owned: int
    protected: int


class WorkerProfile(_Told):
    """What the engine is.

    model: the name that requests give.
    fingerprint: the first part of its pages' namespace (`Namespace.model`), without which nobody can compute
    the keys of its pages.
    total_pages: of L1.
    kv_token_bytes: keys and values of one token in all layers.
    role: what it does with requests.
    cost: what its steps cost.
    capacity: the requests a second that it was found to carry.
    """

    model: str
    fingerprint: str | None = None
    dtype: str | None = None
    page_size: int
    total_pages: int | None = None
    max_batched_tokens: int | None = None
    max_running: int | None = None
    max_model_len: int
    kv_token_bytes: int | None = None
    role: str = "both"
    cost: CostModel | None = None
    capacity: float | None = None


class KVEvents(_Told):
    """Where KV events are published; the addresses are as they were bound, so `0.0.0.0` and `*` stand for
    this server's own address. snapshot: whether /kv_snapshot is open."""

    endpoint: str
    replay: str | None
    topic: str
    snapshot: bool


class LoadReport(_Told):
    """How the server is.

    incarnation: numbers this life of the engine; it grows when the engine begins again.
    age_s: how old the figures below are.
    waiting: requests that have no row.
    prefill_tokens: positions that are still to be computed before every request decodes.
    decodes: requests that decode.
    worker: None until the engine is loaded.
    kv_events: None = none are published.
    resume: whether it takes answers up that another server has begun.
    """

    incarnation: int | None = None
    age_s: float | None = None
    waiting: int | None = None
    prefill_tokens: int | None = None
    decodes: int | None = None
    pages: Pages | None = None
    worker: WorkerProfile | None = None
    kv_events: KVEvents | None = None
    resume: bool = False


class LoadRoute:
    """The route. latest: what the engine said last of its load."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.latest: Latest[EngineLoad] = Latest(lambda: service.engine.load(), FRESH_S, WAIT_S)

    async def load(self, request: Request) -> Response:
        report = self._report(await self.latest.get())
        return Response(
            report.model_dump_json(), media_type="application/json", headers={"cache-control": "no-store"}
        )

    def _report(self, latest: tuple[EngineLoad, float] | None) -> LoadReport:
        try:
            worker = _profile(self._service.names()[0], self._service.engine.info)
        except EngineDead:
            worker = None
        if latest is None:
            return LoadReport(worker=worker)
        load, age_s = latest
        pages = Pages(free=load.free, evictable=load.evictable, owned=load.owned, protected=load.protected)
        internal = self._service.config.internal_digest is not None
        return LoadReport(
            incarnation=load.incarnation, age_s=age_s, waiting=load.waiting,
            prefill_tokens=load.prefill_tokens, decodes=load.decodes, pages=pages, worker=worker,
            kv_events=None if load.kv is None else KVEvents(**load.kv._asdict(), snapshot=internal),
            resume=internal,
        )  # fmt: skip


def _profile(name: str, info: EngineInfo) -> WorkerProfile:
    told: dict[str, Any] = {
        "model": name, "page_size": info.page_size, "max_model_len": info.max_model_len, "cost": info.cost
    }  # fmt: skip
    return WorkerProfile.model_validate({**info.details, **told})
