"""The live page of an engine. Owns: `/` (page.py), and `/live.json`, what it shows.

Rules: no page waits for a busy engine: it gets the last snapshot, with its age (latest.py).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hotprefix import __version__
from hotprefix.engine.messages import EngineStats, Fared, Insight
from hotprefix.kernel.plan import Hindrance, Queue
from hotprefix.kernel.state.estimates import Predictions
from hotprefix.server.latest import Latest
from hotprefix.server.page import Page, data
from hotprefix.server.service import Service

FRESH_S = 0.5
WAIT_S = 1.0
WHY = {
    Hindrance.RETRY: "a failed step's requests run alone first",
    Hindrance.ROWS: "the running batch is full",
    Hindrance.STORAGE: "its pages are on their way from L3",
    Hindrance.STEP: "the step in flight computes its pages",
    Hindrance.PAGES: "it does not fit into L1",
    Hindrance.FRAMES: "a layer group has no frames for it",
    Hindrance.BUDGET: "it fits, and starts when a step has tokens left",
}


class LivePage:
    """The two routes. clock: seconds, monotonic."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._page = Page("hotprefix.server")
        self._stats = Latest(lambda: service.engine.stats(), FRESH_S, WAIT_S, clock)

    async def page(self, request: Request) -> Response:
        return self._page.response()

    async def data(self, request: Request) -> Response:
        latest = await self._stats.get()
        stats, age_s = latest or (None, None)
        health = self._service.engine.health()
        found: dict[str, Any] = {
            "version": __version__, "ok": health.ok, "state": health.reason,
            "restarts": self._service.engine.restarts,
            "age_s": None if age_s is None else round(age_s, 1),
        }  # fmt: skip
        if stats is not None:
            info = self._service.engine.info
            found |= {"model": self._service.names()[0], "max_running": info.details.get("max_running")}
            found |= shown(stats)
        return data(found)


def shown(stats: EngineStats) -> dict[str, Any]:
    """What the page shows of a snapshot. Pages, tokens, tokens per second."""
    found: dict[str, Any] = {
        "running": stats.running, "waiting": stats.waiting, "page_size": stats.page_size,
        "tiers": [{"name": "L1 device", "total": stats.total_pages, "free": stats.free_pages,
                   "owned": stats.owned_pages, "evictable": stats.evictable_pages,
                   "protected": stats.protected_pages}],
        "sources": {"L1": stats.cached_device, "L2": stats.cached_host, "L3": stats.cached_storage,
                    "computed": stats.computed_tokens},
        "generated": stats.generated_tokens, "steps": stats.steps,
        "evicted": stats.evicted_pages, "retractions": stats.retractions,
    }  # fmt: skip
    if stats.insight is not None:
        found |= _inner(stats.insight)
        if stats.insight.l2 is not None:
            l2 = stats.insight.l2
            found["tiers"].append({"name": "L2 host", "total": l2.total, "free": l2.free, "owned": l2.owned,
                                   "evictable": l2.evictable, "protected": l2.protected})  # fmt: skip
    return found


def _inner(insight: Insight) -> dict[str, Any]:
    count, store = insight.kernel, insight.store
    return {
        "parked": insight.parked,
        "queue": _queue(insight.queue),
        "time": {"refresh_s": insight.refresh_s, "prefill_busy_s": insight.prefill_busy_s},
        "goodput": _goodput(insight.fared),
        "predictions": _predictions(insight.predictions),
        "rates": [
            {"window_s": r.window_s, "cached": r.cached_tps, "uncached": r.uncached_tps}
            for r in insight.throughput
        ],
        "loss": {
            "lost while waiting": count.lost_waiting_tokens, "recomputed": count.recomputed_tokens,
            "duplicate pages": count.duplicate_pages, "stalls": count.stalls,
            "failed steps": count.failed_steps,
        },
        "flights": {
            "waiting for a leader": insight.parked, "fetches in flight": insight.fetches,
            "fetches begun": insight.prefetch.started, "joined another's fetch": insight.prefetch.shared,
            "prefixes refreshed": count.refresh_touches,
        },
        "l3": None if store is None else {
            "read": store.read.breaker.value, "write": store.write.breaker.value,
            "pages read": store.read.pages, "pages written": store.write.pages,
            "failures": sum(store.read.failures.values()) + sum(store.write.failures.values()),
            "queued": store.queued_puts,
        },
        "hottest": [
            {"name": h.name, "parent": h.parent, "start": h.start, "stop": h.stop, "requests": h.requests}
            for h in insight.hottest
        ],
        "observation": insight.observed.failed or insight.observed.sink_failed,
    }  # fmt: skip


def _queue(queue: Queue) -> dict[str, Any]:
    """Seconds and pages; None while nothing waits."""
    head = queue.head
    if head is None:
        return {"oldest_s": queue.oldest, "head": None}
    pages = {
        name: getattr(head, name) for name in ("need", "shared", "owed", "free", "evictable", "protected")
    }
    return {
        "oldest_s": queue.oldest,
        "head": {"why": WHY[head.hindrance], "hindrance": head.hindrance, "waited_s": head.waited, **pages},
    }


def _goodput(fared: Fared | None) -> dict[str, Any] | None:
    """None if there are no objectives. Without an objective for it, the time-out is left out."""
    if fared is None:
        return None
    return {
        heat: {k: v for k, v in dataclasses.asdict(found).items() if v is not None}
        for heat, found in fared.groups.items()
    }


def _predictions(seen: Predictions | None) -> dict[str, Any] | None:
    """Seconds. A quantity that was never both predicted and observed is left out."""
    if seen is None:
        return None
    found = {of: getattr(seen, of) for of in ("restore", "prefill", "fetch")}
    return {
        of: {"times": p.times, "predicted_s": p.predicted_s, "observed_s": p.observed_s}
        for of, p in found.items()
        if p.times
    }
