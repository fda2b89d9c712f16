"""The published run's counters from lengths alone.

What gives exactly these numbers:
- one cache of 341 pages of 16 tokens for all four workloads, in this order, publication `finish`,
  flight `none`, LRU; waves as in `bench.workloads`, each after the last has ended;
- a lookup is one request's first use of the cache; restored counts tokens; indexed and evicted are
  pages entering and leaving the tree, times 16;
- overlap: a document of 880 tokens; probes hold its first 0, 220, 440, 660, 880 (13, 27, 41, 55 whole
  pages); fan-out: 56 common pages, one warm request, then 1, 2, 4, 8 different questions; burst: four
  identical cold requests, then the same four warm (59 pages each); churn: 8 prompts, two cycles, one by
  one, of 61 pages each, of which the LRU cache of 341 has always lost what comes next;
- generated tokens are indexed too, except the last one, which has no KV: (prompt + outputs - 1) // 16;
- eviction takes exactly what an allocation lacks, so the end state is 341 pages less the last request's
  one partial page: evicted = indexed - 340.

Outputs "16/128/16" leave one thing open: who of the fan-out's warm request and the burst generates 16
and who 128. Both ways give the same totals, and no other pair of {16, 128} does.
"""

from __future__ import annotations

from itertools import product

import pytest
from kernel_loop import FakeExecutor, KernelLoop

from hotprefix.bench.arms import INDEPENDENT
from hotprefix.bench.drive import CountingExecutor, run_workload
from hotprefix.bench.runner import PAGE, kernel_config
from hotprefix.bench.workloads import CHURN_PAGES, Workload, burst, churn, fan_out, overlap
from tests.support.material import SyntheticMaterial

MATERIAL = SyntheticMaterial()


def published_run(warm_outputs: int, burst_outputs: int) -> tuple[Workload, ...]:
    return (
        overlap(MATERIAL, 16),
        fan_out(MATERIAL, (1, 2, 4, 8), 128, warm_outputs),
        burst(MATERIAL, (4,), burst_outputs, prompt=950, rounds=2),
        churn(MATERIAL, 8, 16, CHURN_PAGES),
    )


def run(warm_outputs: int, burst_outputs: int) -> tuple[KernelLoop, dict[str, tuple[int, int]]]:
    executor = CountingExecutor(FakeExecutor())
    loop = KernelLoop(executor, kernel_config(INDEPENDENT, CHURN_PAGES))
    per: dict[str, tuple[int, int]] = {}
    c = loop.kernel.counters
    for workload in published_run(warm_outputs, burst_outputs):
        lookups, hits = c.lookups, c.hits
        run_workload(loop, executor, workload)
        per[workload.name] = (c.lookups - lookups, c.hits - hits)
    return loop, per


@pytest.mark.parametrize(("warm_outputs", "burst_outputs"), [(16, 128), (128, 16)])
def test_published_counters(warm_outputs: int, burst_outputs: int) -> None:
    loop, per = run(warm_outputs, burst_outputs)
    c = loop.kernel.counters
    assert (c.lookups, c.hits) == (46, 23)
    assert per == {"overlap": (6, 4), "fan-out": (16, 15), "burst": (8, 4), "churn": (16, 0)}
    assert c.cached_tokens == 19_392
    assert c.indexed_pages * PAGE == 20_944
    assert c.evicted_pages * PAGE == 15_504
    assert c.retractions == 0
    assert loop.kernel.status().l1.evictable == 340


def test_no_other_outputs_give_the_published_indexed_tokens() -> None:
    indexed = {
        pair: run(*pair)[0].kernel.counters.indexed_pages * PAGE for pair in product((16, 128), repeat=2)
    }
    assert [pair for pair, tokens in indexed.items() if tokens == 20_944] == [(16, 128), (128, 16)]
