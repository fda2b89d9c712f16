"""Small traces and prices for the simulator's tests. Owns: `request`, `agents`, `price`, `replay`."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from hotprefix.cost.model import CostModel, Link, Links
from hotprefix.kernel.config import KernelConfig
from hotprefix.lab.sim.replay import Replay
from hotprefix.lab.sim.simulate import Tables, simulate
from hotprefix.lab.trace.trace_request import TraceRequest

BLOCK = 4


def price(**changes: object) -> CostModel:
    """A cost model in round figures."""
    fields: dict[str, object] = {
        "name": "test", "source": "made up", "model": "none", "dtype": "none", "hardware": "none",
        "date": datetime.date(2026, 1, 1), "base_s": 0.01, "prefill_token_s": 1e-3, "prefill_context_s": 1e-6,
        "decode_s": 1e-3, "decode_context_s": 1e-6, "scheduler_base_s": 1e-3, "scheduler_running_s": 1e-5,
        "scheduler_waiting_s": 1e-6, "kv_token_bytes": 100,
        "links": Links(save=Link(latency_s=0, bytes_per_s=1e6), restore=Link(latency_s=1e-4, bytes_per_s=1e7),
                       put=Link(latency_s=0, bytes_per_s=1e6), fetch=Link(latency_s=1e-3, bytes_per_s=1e6)),
    }  # fmt: skip
    return CostModel(**{**fields, **changes})  # type: ignore[arg-type]


def request(
    name: str, blocks: Iterable[int], outputs: int = 4, *, tail: int = 1, arrival: float | None = 0.0,
    **more: object,
) -> TraceRequest:  # fmt: skip
    """A prompt of whole blocks and `tail` tokens of its own."""
    ids = np.array(list(blocks), dtype=np.int32)
    return TraceRequest(name, len(ids) * BLOCK + tail, outputs, ids, arrival_s=arrival, **more)  # type: ignore[arg-type]


def agents(
    sessions: int, turns: int, *, shared: int = 5, grow: int = 3, think: float = 1.0
) -> list[TraceRequest]:
    """Sessions that share their first blocks and grow by every turn; answers are not recorded."""
    found, fresh = [], 1000
    for s in range(sessions):
        blocks = list(range(shared))
        for t in range(turns):
            blocks += range(fresh, fresh + grow)
            fresh += grow
            parent = f"s{s}t{t - 1}" if t else None
            found.append(
                request(
                    f"s{s}t{t}", blocks, arrival=0.1 * s if not t else None, session=f"s{s}", parent=parent,
                    think_s=think if t else None,
                )
            )  # fmt: skip
    return found


def replay(trace: list[TraceRequest], seed: int = 0, **config: object) -> Tables:
    """Runs a trace. Names of `Replay`'s fields go there, all others to the kernel's configuration."""
    outer = {k: config.pop(k) for k in list(config) if k in Replay.__dataclass_fields__}
    kernel = replace(
        KernelConfig(total_pages=200, page_size=BLOCK, max_running=16, max_batched_tokens=256),
        **config,  # type: ignore[arg-type]
    )
    return simulate(Replay(kernel, **{"cost": price(), **outer}), trace, block_size=BLOCK, seed=seed)  # type: ignore[arg-type]
