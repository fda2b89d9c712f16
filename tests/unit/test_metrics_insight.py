"""Every number of the engine is a metric, and every metric is the sum of its events."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hotprefix.definitions import Slo
from hotprefix.engine.link_totals import Copied
from hotprefix.engine.messages import (
    EngineStats,
    Fared,
    Generate,
    HotPrefix,
    Insight,
    Observed,
    Outcomes,
)
from hotprefix.engine.paced.pace import PaceTotals
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.rates import Rates, Throughput
from hotprefix.engine.stores.breaker import BreakerState
from hotprefix.engine.stores.errors import Reason
from hotprefix.engine.stores.store_counters import LinkStats, StoreStats
from hotprefix.kernel import events as ev
from hotprefix.kernel.cache.frames import FrameCount
from hotprefix.kernel.cache.host import HostCounters
from hotprefix.kernel.cache.tier import Occupancy
from hotprefix.kernel.counters import Counters
from hotprefix.kernel.plan import Finish, Head, Hindrance, Queue
from hotprefix.kernel.state.estimates import Prediction, Predictions
from hotprefix.kernel.state.prefetch import PrefetchCounters
from hotprefix.server.metrics import Metrics
from tests.support.engine import drain, fake_loop
from tests.support.observed import WatchedDriver, program, run
from tests.support.server import STATS
from tests.unit.test_server_admin import samples


def numbered(start: int = 10_001) -> tuple[Insight, Iterator[int]]:
    """An insight in which every number is another one."""
    n = itertools.count(start)

    def filled(kind: Any, **given: Any) -> Any:
        names = [f.name for f in dataclasses.fields(kind) if f.name not in given]
        return kind(**given, **{name: next(n) for name in names})

    def link() -> LinkStats:
        failures = {reason: next(n) for reason in Reason}
        return filled(LinkStats, failures=failures, last_error="down", breaker=BreakerState.OPEN)

    store = filled(StoreStats, store="file:///secret/path", read=link(), write=link(),
                   endings={"complete": next(n), **{reason: next(n) for reason in Reason}},
                   chores_lost={Reason.BUSY: next(n)}, passed_over={Reason.DENIED: next(n)})  # fmt: skip
    return filled(
        Insight, l2=filled(Occupancy), throughput=tuple(filled(Throughput, window_s=w) for w in (30, 300)),
        kernel=filled(Counters), host=filled(HostCounters), prefetch=filled(PrefetchCounters), store=store,
        links=filled(Copied), groups=(filled(FrameCount), filled(FrameCount)),
        observed=filled(Observed, failed=None, sink_failed="ValueError: x"),
        hottest=(HotPrefix("aa", -1, 0, 16, 2),),
        queue=filled(Queue, head=filled(Head, request="r1", hindrance=Hindrance.PAGES)),
        predictions=filled(Predictions, restore=filled(Prediction), prefill=filled(Prediction),
                           fetch=filled(Prediction)),
        pace=filled(PaceTotals),
        fared=Fared(filled(Slo), {heat: filled(Outcomes) for heat in ("hot", "cold")}),
    ), n  # fmt: skip


def numbers(value: Any) -> Iterator[float]:
    """Every number in a tree of records, hot prefixes (a picture's) left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, HotPrefix):
        for field in dataclasses.fields(value):
            if field.name != "window_s":
                yield from numbers(getattr(value, field.name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, tuple):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


def exposed(stats: EngineStats) -> dict[str, float]:
    metrics = Metrics()
    metrics.engine.update("m", stats, up=True, restarts=0)
    return samples(metrics.text().decode())


def test_case_174_every_inner_number_is_a_metric() -> None:
    insight, n = numbered()
    got = exposed(dataclasses.replace(STATS, insight=insight))
    wanted = list(numbers(insight))
    assert len(wanted) == next(n) - 10_001, "the walk has seen every number"
    assert set(wanted) <= set(got.values())
    for group, kind in (("kernel", Counters), ("host", HostCounters), ("prefetch", PrefetchCounters)):
        for field in dataclasses.fields(kind):
            value = getattr(getattr(insight, group), field.name)
            assert got[f"hotprefix_{group}_{field.name}_total"] == value
    assert got["hotprefix_observation_failed"] == 1
    assert got["hotprefix_store_breaker{link=storage_to_host,state=open}"] == 1
    assert got["hotprefix_store_breaker{link=storage_to_host,state=closed}"] == 0
    assert got["hotprefix_queue_head_hindrance{reason=pages}"] == 1
    assert got["hotprefix_queue_head_hindrance{reason=rows}"] == 0
    assert got["hotprefix_cached_tps{window_s=30}"] == insight.throughput[0].cached_tps
    assert got["hotprefix_link_bytes_total{link=host_to_device}"] == insight.links.restored_bytes  # type: ignore[union-attr]
    assert got["hotprefix_link_bytes_total{link=storage_to_host}"] == insight.store.read.bytes  # type: ignore[union-attr]


def test_the_fullest_pool_is_the_usage() -> None:
    """A model of window layers has pages in plenty; what it runs out of is frames."""
    insight, _ = numbered()
    for held, usage in ((1, 0.25), (9, 0.9)):
        groups = (FrameCount(total=10, free=10 - held, held=held, idle=0, evicted=0),)
        stats = dataclasses.replace(
            STATS, total_pages=8, owned_pages=1, protected_pages=1,
            insight=dataclasses.replace(insight, groups=groups),
        )  # fmt: skip
        got = exposed(stats)
        assert [value for name, value in got.items() if name.startswith("vllm:kv_cache_usage_perc")] == [
            usage
        ]
        assert got["hotprefix_group_frames{group=0,state=held}"] == held


def test_no_label_holds_free_text() -> None:
    insight, _ = numbered()
    metrics = Metrics()
    metrics.engine.update("m", dataclasses.replace(STATS, insight=insight), up=True, restarts=0)
    text = metrics.text().decode()
    for secret in ("secret", "ValueError", '"aa"'):
        assert secret not in text


def test_tiers_that_are_not_there_have_no_metrics() -> None:
    insight, _ = numbered()
    insight = dataclasses.replace(insight, l2=None, store=None, links=None)
    got = exposed(dataclasses.replace(STATS, insight=insight))
    absent = ("hotprefix_store_", "hotprefix_link_bytes_total{", "hotprefix_pages{state=free,tier=host}")
    assert not any(name.startswith(absent) for name in got)
    assert "hotprefix_pages{state=free,tier=device}" in got
    assert any(name.startswith("hotprefix_kernel_") for name in got)
    assert not any(name.startswith("hotprefix_kernel_") for name in exposed(STATS))


# -- metrics are sums of events -------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_counters_are_the_sum_of_events(seed: int) -> None:
    seen: list[Any] = []

    class Listener:
        wants_events = True
        event = seen.append

        def __getattr__(self, name: str) -> Any:
            return lambda *args: None

    d: WatchedDriver = run(program(seed, 80), Listener())  # type: ignore[arg-type]
    count = d.kernel.counters
    of = {kind: [e for e in seen if isinstance(e, kind)] for kind in ev_kinds()}
    finish = Counter(e.reason for e in of[ev.Finished])
    steps = of[ev.Stepped]
    assert count.submitted == len(of[ev.Enqueued])
    assert count.rejected == len(of[ev.Rejected])
    assert count.finished == finish[Finish.STOP] + finish[Finish.LENGTH]
    assert (count.aborted, count.failed) == (finish[Finish.ABORT], finish[Finish.ERROR])
    assert count.retractions == len(of[ev.Retracted])
    assert count.stalls == len(of[ev.Stalled])
    assert (count.steps, count.failed_steps) == (len(steps), sum(not e.ok for e in steps))
    used = [e.use for e in of[ev.Prefilled]]
    assert sum(u.prompt + u.outputs for u in used) == sum(e.prefill_tokens for e in steps if e.ok)
    assert count.computed_prompt_tokens == sum(u.prompt for u in used)
    assert count.computed_output_tokens == sum(u.outputs for u in used) + sum(
        e.decode_tokens for e in steps if e.ok
    )
    assert count.evicted_pages == sum(len(e.pages) for e in of[ev.Evicted])
    assert count.cached_tokens == sum(e.cached for e in of[ev.Finished])
    assert count.hits == sum(e.cached > 0 for e in of[ev.Finished])
    assert sum(e.computed for e in of[ev.Finished]) == (
        count.computed_prompt_tokens + count.computed_output_tokens
    )
    assert count.lost_waiting_tokens == sum(u.lost for u in used)
    assert count.retained_tokens == sum(u.retained for u in used)
    assert count.cached_host_tokens == sum(host for _, host, _ in d.sources.values())
    assert count.cached_storage_tokens == sum(storage for _, _, storage in d.sources.values())
    host, prefetch = d.kernel.tier_counters
    published = sum(len(e.pages) for e in of[ev.Published])
    assert published >= count.indexed_pages
    if not count.failed_steps:
        assert published == count.indexed_pages
    restored = sum(len(e.pages) for e in of[ev.RestoreStarted])
    assert restored >= host.restored == sum(e.pages for e in of[ev.RestoreDone])
    assert prefetch.started == len(of[ev.FetchStarted])
    assert host.landed == sum(e.landed for e in of[ev.FetchEnded])
    ran = {e.step for e in steps if e.ok}
    done = [plan for plan in d.plans if plan.step in ran and not plan.empty]
    assert len(done) == len(ran)
    assert host.restored == sum(len(plan.restores) for plan in done)
    assert host.saved == sum(len(plan.saves) for plan in done)
    assert host.stored == sum(len(plan.stores) for plan in done)


def ev_kinds() -> list[type[ev.Event]]:
    return [c for c in vars(ev).values() if isinstance(c, type) and issubclass(c, ev.Event)]


# -- the loop's snapshot --------------------------------------------------------------------------


def test_the_loop_tells_what_the_kernel_counts() -> None:
    loop, _, clock = fake_loop()
    for number in range(3):
        loop.submit(Generate(f"r{number}", tuple(range(20)), SamplingParams(max_tokens=3)))
    clock.now = 10.0
    drain(loop)
    insight = loop.stats().insight
    assert insight is not None
    assert insight.kernel == loop.kernel.counters
    assert insight.kernel is not loop.kernel.counters
    assert insight.kernel.cached_tokens == 32
    by_window = {rate.window_s: rate for rate in insight.throughput}
    assert by_window[30].cached_tps == 32 / 30
    assert by_window[300].uncached_tps == insight.kernel.computed_prompt_tokens / 300
    assert (insight.store, insight.links, insight.l2) == (None, None, None)
    clock.now = 45.0
    later = loop.stats().insight
    assert later is not None
    assert [rate.cached_tps for rate in later.throughput] == [0.0, 32 / 300]


def test_a_rate_s_window_moves() -> None:
    rates = Rates()
    for second in range(1000):
        rates.note(second + 0.5, second + 1, 10 * (second + 1))
    now = rates.throughput(999.9)
    assert [(r.window_s, r.cached_tps, r.uncached_tps) for r in now] == [(30, 1.0, 10.0), (300, 1.0, 10.0)]
    assert len(rates._slots) <= 300
    assert [r.cached_tps for r in rates.throughput(1014.0)] == [0.5, 285 / 300]
    assert [r.cached_tps for r in rates.throughput(5000.0)] == [0.0, 0.0]


def test_an_observer_that_raises_is_switched_off_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    from hotprefix.engine.observe import Wall

    calls: list[str] = []

    class Broken:
        wants_events = False

        def submitted(self, *args: Any) -> None:
            calls.append("submitted")
            raise ValueError("broken")

        def changed(self, *args: Any) -> None:
            calls.append("changed")

    wall = Wall(Broken())  # type: ignore[arg-type]
    wall.tell("changed", 0.0)
    wall.tell("submitted", None, 0.0)
    wall.tell("changed", 0.0)
    assert calls == ["changed", "submitted"]
    assert wall.stats() == Observed(failed="ValueError: broken")
    assert wall.hottest(0.0) == ()
    assert "switched off" in caplog.text


def test_the_docs_name_every_metric_and_no_other() -> None:
    metrics = Metrics()
    stats = dataclasses.replace(STATS, insight=numbered()[0])
    metrics.engine.update("m", stats, up=True, restarts=0)
    families = text_string_to_metric_families(metrics.text().decode())
    names = {f.name + ("_total" if f.type == "counter" else "") for f in families}
    names = {name for name in names if not name.endswith("_created")}
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert set(re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)) == names
