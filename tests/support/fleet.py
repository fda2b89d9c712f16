"""What tests of the fleet share: profiles whose prices are easy to reckon with, requests, and workers that
compute one prompt after the other."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from hotprefix.cost.prices import Prices
from hotprefix.fleet.fleet import Fleet
from hotprefix.fleet.records import (
    Decision,
    Keys,
    Profile,
    RouteRequest,
    Seen,
    Shelf,
    Stage,
    WorkerReport,
)


def token_prices(token_s: float = 0.001, decode_s: float = 0.0, step: float = 0.0) -> Prices:
    """A token of prefill costs 1 ms unless told otherwise, a decode beside it 0, a step 0."""
    return Prices(step, ((0, token_s),), 0.0, ((0, decode_s),), 0.0, 0.0, 0.0, 0.0)


def profile(token_s: float = 0.001, page_size: int = 16, pages: int = 10_000, **more: object) -> Profile:
    """A worker's profile."""
    values: dict[str, object] = {"max_batched_tokens": 1 << 20, "max_running": 1000, **more}
    return Profile(token_prices(token_s), pages, page_size, **values)  # type: ignore[arg-type]


def prompt(name: str, count: int) -> Keys:
    """The keys of a prompt of its own, `count` pages long."""
    start = int.from_bytes(name.encode()[-4:], "big") << 24
    return tuple(range(start + 1, start + 1 + count))


def request(id: str, keys: Keys, tail: int = 1, page_size: int = 16, **more: object) -> RouteRequest:
    """A request with these pages and `tail` tokens more."""
    return RouteRequest(id, keys, len(keys) * page_size + tail, **more)  # type: ignore[arg-type]


def report(made: float, tokens: int = 0, free: int = 10_000, **more: int) -> WorkerReport:
    """What a worker says: so many prefill tokens, so many free pages, and nothing else unless told."""
    values = {"waiting": 0, "decodes": 0, "evictable": 0, "owned": 0, "protected": 0, **more}
    return WorkerReport(made, prefill_tokens=tokens, free=free, **values)  # type: ignore[arg-type]


def routed(fleet: Fleet, request: RouteRequest, now: float) -> Decision:
    """The decision for a request that need not wait."""
    decision = fleet.route(request, now)
    assert isinstance(decision, Decision), decision
    return decision


def finish(fleet: Fleet, id: str, now: float, seen: Seen | None = None) -> None:
    """The request's first token, and its end."""
    fleet.progress(id, Stage.FIRST_TOKEN, now, seen)
    fleet.progress(id, Stage.ENDED, now)


@dataclass
class Done:
    """One request that was answered. computed: tokens."""

    worker: str
    ttft: float
    computed: int


@dataclass
class OneByOne:
    """Workers that compute one prompt after the other, keep every page, and tell of it as soon as it is
    there. Their tokens cost `token_s`, whatever their profiles say."""

    fleet: Fleet
    names: list[str]
    token_s: float = 0.001
    done: dict[str, Done] = field(default_factory=dict)

    def run(self, arrivals: Iterable[tuple[float, RouteRequest]]) -> None:
        free = dict.fromkeys(self.names, 0.0)
        pages: dict[str, set[int]] = {name: set() for name in self.names}
        moments = [(at, 1, n, request, "") for n, (at, request) in enumerate(arrivals)]
        heapq.heapify(moments)
        while moments:
            now, kind, n, request, name = heapq.heappop(moments)
            if kind == 0:
                self.fleet.cached(name, Shelf.L1, now, stored=request.keys)
                finish(
                    self.fleet, request.id, now, Seen(cached=request.prompt - self.done[request.id].computed)
                )
                continue
            name = routed(self.fleet, request, now).worker
            held = 0
            while held < len(request.keys) and request.keys[held] in pages[name]:
                held += 1
            pages[name] |= set(request.keys)
            tokens = request.prompt - min(held * 16, request.prompt - 1)
            free[name] = max(free[name], now) + tokens * self.token_s
            self.done[request.id] = Done(name, free[name] - now, tokens)
            heapq.heappush(moments, (free[name], 0, n, request, name))
