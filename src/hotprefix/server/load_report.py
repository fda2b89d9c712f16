"""What a server tells a router of itself. Owns: `LoadReport`, the form of the answer of GET /load.

Rules: what is not known is null, never 0. Units: tokens, pages, requests, seconds, bytes.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from hotprefix.cost.model import CostModel


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True)


class Pages(_Told):
    """L1's pages by state."""

    free: int
    evictable: int
    owned: int
    protected: int


class WorkerProfile(_Told):
    """What the engine is. model: the name that requests give. total_pages: of L1. kv_token_bytes: keys and
    values of one token in all layers. cost: what its steps cost. capacity: the requests a second that it was
    found to carry."""

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
    """Where KV events are published, as it was bound. snapshot: whether /kv_snapshot is open."""

    endpoint: str
    replay: str | None
    topic: str
    snapshot: bool


class LoadReport(_Told):
    """incarnation: numbers this life of the engine; it grows when the engine begins again. age_s: how old the
    figures below are. waiting: requests that have no row. prefill_tokens: positions that are still to be
    computed before every request decodes. decodes: requests that decode. worker: None until the engine is
    loaded. kv_events: None = none are published. resume: whether it takes answers up that another server has
    begun."""

    incarnation: int | None = None
    age_s: float | None = None
    waiting: int | None = None
    prefill_tokens: int | None = None
    decodes: int | None = None
    pages: Pages | None = None
    worker: WorkerProfile | None = None
    kv_events: KVEvents | None = None
    resume: bool = False
