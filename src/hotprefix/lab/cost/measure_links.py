"""Times the copies between L1 and L2. Owns: `host_links`.

Rules: the copies are the engine's own (`HostPool`). Pages are in random order, as after hours of use. Copies
of one page and of many pages are timed, so that latency and bandwidth can be told apart.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hotprefix.cost.model import Link, Links
from hotprefix.kernel.plan import Copy, StepPlan
from hotprefix.lab.cost.fit_prices import solve

if TYPE_CHECKING:
    from hotprefix.engine.hostpool import HostPool
    from hotprefix.engine.kvpool import KVPool

PAGES = 256
REPEATS = 5
FASTEST = 1e12  # bytes per second: no link between two tiers is faster; a fit that gives more saw noise


def host_links(pool: KVPool) -> Links:
    """The links save and restore, timed between `pool`, which is overwritten, and a host pool made for it."""
    from hotprefix.engine.hostpool import HostPool

    host = HostPool(pool, min(PAGES, pool.pages))
    sizes = [n for n in (1, 4, 16, 64, 256) if n <= host.pages]
    saves: list[tuple[int, float]] = []
    restores: list[tuple[int, float]] = []
    for plan in _plans(sizes, pool.pages, host.pages):
        size = max(len(plan.saves), len(plan.restores)) * host.page_bytes
        begun = time.perf_counter()
        _synchronised(host, plan)
        (saves if plan.saves else restores).append((size, time.perf_counter() - begun))
    return Links(save=_link(saves), restore=_link(restores))


def _plans(sizes: Sequence[int], pages: int, host_pages: int) -> list[StepPlan]:
    """Plans that save and restore each size in turn, several times."""
    draw = random.Random(0)
    plans = []
    for _ in range(REPEATS):
        for n in sizes:
            copies = tuple(
                Copy(a, b)
                for a, b in zip(draw.sample(range(pages), n), draw.sample(range(host_pages), n), strict=True)
            )
            plans.append(StepPlan(0, saves=copies))
            plans.append(StepPlan(0, restores=tuple(Copy(c.target, c.source) for c in copies)))
    return plans


def _synchronised(host: HostPool, plan: StepPlan) -> None:
    """Carry a plan out, and wait until a device that works asynchronously has finished it."""
    import torch

    host.carry(plan)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _link(timed: Sequence[tuple[int, float]]) -> Link:
    rows = np.array([(1.0, float(size)) for size, _ in timed])
    seconds = np.array([max(took, 1e-9) for _, took in timed])
    latency, per_byte = solve(rows, seconds, np.ones(len(rows)))
    return Link(latency_s=float(latency), bytes_per_s=float(1 / max(per_byte, 1 / FASTEST)))
