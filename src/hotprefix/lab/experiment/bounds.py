"""What a clairvoyant cache could have reused in a replay. Owns: the bound of one run, and shares of it.

Rules:
1. The bound is of the requests that this very run executed, in the order in which it admitted them, with the
   L1 of each instance. So each run is measured against its own possibilities, and an arm that admitted other
   requests, or in another order, is neither credited nor blamed for that.
2. Runs with tiers or a warm start are refused, because they could reuse what the bound does not know of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import polars as pl

from hotprefix.errors import InputError
from hotprefix.kernel.config import KernelConfig
from hotprefix.lab.bound.clairvoyant import clairvoyant
from hotprefix.lab.bound.paths import read_paths
from hotprefix.lab.trace.trace_request import TraceRequest

Facts = dict[str, int]


def check_bound(config: KernelConfig, block_size: int, warm_up: int) -> None:
    """Raises InputError if such a run could reuse what the bound does not know of."""
    if config.tiers is not None:
        raise InputError("bound=true: only L1 has a bound; leave out kernel.tiers or bound", param="bound")
    if warm_up:
        raise InputError(f"bound=true: load.warm_up={warm_up} would not be in it; give 0", param="bound")
    if block_size % config.page_size:
        raise InputError(
            f"bound=true: kernel.page_size={config.page_size}: give a divisor of the trace's block size "
            f"{block_size}",
            param="kernel.page_size",
        )


def bound_facts(
    trace: Iterable[TraceRequest], requests: pl.DataFrame, config: KernelConfig, block_size: int
) -> Facts:
    """Prompt tokens of the executed requests: in all, reused by the run, and the most that could be."""
    executed = requests.filter(pl.col("prefill_start_s").is_not_null()).sort("admit_s", "id")
    wanted = set(executed["trace_id"])
    known = {request.id: request for request in trace if request.id in wanted}
    most = 0
    for part in executed.partition_by("instance"):
        paths = read_paths((known[i] for i in part["trace_id"]), block_size, config.page_size)
        most += clairvoyant(paths, [config.total_pages])[0].reused_tokens
    return {
        "total_tokens": int(executed["input_tokens"].sum()),
        "reused_tokens": int(executed["cached_l1"].fill_null(0).sum()),
        "clairvoyant_tokens": most,
    }


def shares(facts: Mapping[str, Sequence[Facts]]) -> dict[str, float]:
    """For each arm the share of its own bound that it reused, as the mean over its runs. Arms without a bound
    are left out."""
    found: dict[str, float] = {}
    for arm, some in facts.items():
        own = [one["reused_tokens"] / one["clairvoyant_tokens"] for one in some if one["clairvoyant_tokens"]]
        if own:
            found[arm] = sum(own) / len(own)
    return found
