"""What a worker said of itself, whatever its kind. Owns: `Heard`, and the profile that it makes.

Rules: what a worker did not say is None, and what is put in its place is said (`Priced`). Units: tokens,
pages of the worker's own size, seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hotprefix.cost.model import CostModel, Link
from hotprefix.cost.presets import load_cost
from hotprefix.cost.prices import Prices
from hotprefix.fleet.profile import LinkSpeed, Profile, Role
from hotprefix.router.worker_spec import Kind, WorkerSpec

ROWS, BATCH, CACHED_TOKENS = 256, 2048, 1 << 20
"""Rows, tokens of a step and tokens of KV of a worker that tells none: vLLM's defaults, and a large cache."""


class Figures(NamedTuple):
    """How loaded it is, as in `WorkerReport`. pages: free, evictable, owned, protected, of the worker's own
    size. age_s: how old this is. None: not told."""

    waiting: int
    prefill_tokens: int | None
    decodes: int
    pages: tuple[int, int, int, int] | None
    age_s: float = 0.0


class EventsAt(NamedTuple):
    """Where its KV events are. snapshot: it tells late subscribers all that it has."""

    endpoint: str
    replay: str | None
    snapshot: bool


@dataclass(frozen=True, slots=True)
class Heard:
    """One answer. model: what it serves; workers of equal models are one pool. names: by which clients ask
    for it. cards: the model cards, as /v1/models has them. fingerprint: what its pages' namespace
    begins with."""

    kind: Kind
    model: str
    names: tuple[str, ...] = ()
    cards: tuple[dict[str, object], ...] = ()
    incarnation: int | None = None
    figures: Figures | None = None
    page_size: int | None = None
    total_pages: int | None = None
    max_batched_tokens: int | None = None
    max_running: int | None = None
    kv_token_bytes: int | None = None
    role: str | None = None
    cost: CostModel | None = None
    capacity: float | None = None
    events: EventsAt | None = None
    resume: bool = False
    fingerprint: str | None = None


class Priced(NamedTuple):
    """Prices, and whose they are: "its own", or the name of a preset or file."""

    prices: Prices
    whose: str
    restore: Link | None = None
    fetch: Link | None = None


def priced(heard: Heard, spec: WorkerSpec, otherwise: str) -> Priced:
    """otherwise: the router's own preset or file. Raises InputError if that, or the worker's, is none."""
    if spec.cost is None and heard.cost is not None:
        links = heard.cost.links
        return Priced(heard.cost.prices, "its own", links.restore, links.fetch)
    if spec.cost is not None:
        return Priced(_load(spec.cost), spec.cost)
    return Priced(_load(otherwise), f"{otherwise}, a default")


@lru_cache(64)
def _load(name: str) -> Prices:
    return load_cost(name).prices


def profile(heard: Heard, spec: WorkerSpec, price: Priced, page_size: int, events: bool) -> Profile:
    """The worker as its pool's fleet sees it, in pages of the fleet's size. events: its events are read."""
    own = heard.page_size or page_size
    tokens = heard.total_pages * own if heard.total_pages is not None else CACHED_TOKENS
    told = Role(heard.role) if heard.role in list(Role) else Role.BOTH
    return Profile(
        prices=price.prices,
        total_pages=max(1, tokens // page_size),
        page_size=page_size,
        max_batched_tokens=heard.max_batched_tokens or BATCH,
        max_running=heard.max_running or ROWS,
        kv_token_bytes=heard.kv_token_bytes or 1,
        role=told if spec.role is Role.BOTH else spec.role,
        capacity=heard.capacity,
        restore=_link(price.restore),
        fetch=_link(price.fetch),
        events=events,
    )


def _link(link: Link | None) -> LinkSpeed | None:
    return None if link is None else LinkSpeed(link.latency_s, link.bytes_per_s)
