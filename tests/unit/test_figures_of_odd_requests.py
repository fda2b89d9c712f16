"""Figures of requests that say nothing, look nothing up or leave something behind: what is counted of
them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hotprefix.engine.messages import Generate
from hotprefix.engine.params import SamplingParams
from hotprefix.kernel import events as ev
from hotprefix.kernel.config import LayerGroup
from hotprefix.kernel.plan import Finish
from hotprefix.server.metrics import Metrics
from tests.support.drive import Driver
from tests.support.engine import drain, fake_loop

OUTPUT_METRICS = (
    "hotprefix_generated_tokens_total", "vllm:generation_tokens_total", "hotprefix_output_tokens_sum",
    "vllm:request_generation_tokens_sum", "hotprefix_time_to_first_token_seconds_count",
)  # fmt: skip


def exposed(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.text().decode())
    return {s.name: s.value for f in families for s in f.samples if "le" not in s.labels}


def test_a_prompt_that_is_only_scored_adds_no_output_to_any_metric() -> None:
    """Completions with `echo` and `max_tokens` 0."""
    loop, _, _ = fake_loop()
    loop.submit(Generate("a", tuple(range(20)), SamplingParams(max_tokens=0, prompt_logprobs=0)))
    metrics = Metrics()
    watch = metrics.watch(0.0)
    deltas = drain(loop)["a"]
    for delta in deltas:
        watch.delta(delta, 1.0)
    metrics.engine.update("m", loop.stats(), up=True, restarts=0)
    assert [(d.tokens, d.finish, d.usage.completion_tokens) for d in deltas] == [((), Finish.LENGTH, 0)]
    got = exposed(metrics)
    assert {name: got[name] for name in OUTPUT_METRICS} == dict.fromkeys(OUTPUT_METRICS, 0)
    assert got["vllm:prompt_tokens_total"] == 20


def test_a_request_without_outputs_is_its_prompt_and_nothing_more() -> None:
    events: list[ev.Event] = []
    d = Driver(5, 4, sink=events.append)
    d.submit("a", list(range(20)), 0)
    d.run()
    finished = next(e for e in events if isinstance(e, ev.Finished))
    assert (finished.outputs, finished.computed, finished.reason) == (0, 20, Finish.LENGTH)
    assert not any(isinstance(e, ev.FirstToken) for e in events)
    d.submit("b", [*range(16), 1], 0)
    d.run()
    assert (d.cached["b"], d.computed["b"], d.outputs["b"]) == (16, 1, [])


def test_look_ups_that_were_none_are_no_queries() -> None:
    """All positions' logits are wanted, so nothing may come from the cache and nothing is asked of it."""
    loop, _, _ = fake_loop()
    for name, params in (("a", {}), ("b", {"prompt_logprobs": 0}), ("c", {})):
        loop.submit(Generate(name, tuple(range(20)), SamplingParams(max_tokens=1, **params)))  # type: ignore[arg-type]
        drain(loop)
    metrics = Metrics()
    metrics.engine.update("m", loop.stats(), up=True, restarts=0)
    got = exposed(metrics)
    assert got["vllm:prefix_cache_queries_total"] == got["hotprefix_queried_tokens_total"] == 40
    assert got["vllm:prompt_tokens_total"] == 60
    assert got["hotprefix_kernel_lookups_total"] == 2


def test_a_request_that_never_ran_has_no_figures() -> None:
    events: list[ev.Event] = []
    d = Driver(12, 4, sink=events.append, max_running=1)
    d.submit("a", list(range(8)), 30)
    d.step()
    d.submit("b", list(range(8)), 30)
    d.abort("b")
    d.run()
    ran = {e.request: e.ran for e in events if isinstance(e, ev.Finished)}
    assert ran == {"a": True, "b": False}


# -- holds that have run out ----------------------------------------------------------------------


def test_an_idle_kernel_protects_nothing_for_holds_that_have_run_out() -> None:
    """Two sessions with a common prefix, whose holds end one after the other while nothing is planned."""
    d = Driver(40, 4, session_pages=40)
    d.submit("s1", [*range(16), 50, 51, 52, 53], 1, session="s", hold_s=50.0)
    d.submit("t1", [*range(16), 60, 61, 62, 63], 1, session="t", hold_s=90.0)
    d.run()
    sums = set()
    seen = []
    for later in (0.0, 49.0, 55.0, 100.0):
        l1 = d.kernel.status(d.now + later).l1
        sums.add(l1.free + l1.owned + l1.evictable + l1.protected)
        seen.append(l1.protected)
    assert seen == [6, 6, 5, 0]
    assert sums == {40}
    assert d.kernel.status().l1.protected == 6, "asking has ended no hold"
    d.now += 100.0
    d.submit("x", [90], 1)
    d.run()
    assert d.kernel.status().l1 == d.kernel._s.l1.occupancy()


def test_the_frames_of_such_a_hold_are_idle() -> None:
    d = Driver(40, 4, session_pages=40, groups=(LayerGroup(12, 8),))
    d.submit("s1", list(range(20)), 1, session="s", hold_s=50.0)
    d.run()
    now, later = (d.kernel.status(d.now + wait).groups[0] for wait in (0.0, 60.0))
    assert now.held > 0
    assert (later.held, later.idle) == (0, now.idle + now.held)
    assert (later.total, later.free) == (now.total, now.free)


@pytest.mark.parametrize("later", [0.0, 60.0])
def test_the_loop_s_gauges_are_those_of_now(later: float) -> None:
    loop, _, clock = fake_loop(session_pages=64)
    loop.submit(Generate("a", tuple(range(40)), SamplingParams(max_tokens=1), session="s", hold_s=50.0))
    drain(loop)
    clock.now += later
    stats = loop.stats()
    assert (stats.protected_pages > 0) == (later == 0.0)
    assert stats.free_pages + stats.owned_pages + stats.evictable_pages + stats.protected_pages == (
        stats.total_pages
    )
