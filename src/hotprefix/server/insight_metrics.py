"""The engine's inner numbers as metrics. Owns: the names and descriptions of everything in `Insight`.

Rules: every field of the kernel's, the tiers' and the store's counters is a metric of its own name, so
nothing can be counted and shown nowhere (rule 59): a field that is added there appears here. Labels take
words of fixed lists only. A tier or link that does not exist has no metrics, rather than zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hotprefix.engine.link_totals import link_totals
from hotprefix.engine.messages import Fared, Insight
from hotprefix.engine.stores.breaker import BreakerState
from hotprefix.engine.stores.store_counters import LinkStats, StoreStats
from hotprefix.kernel.cache.tier import Occupancy
from hotprefix.kernel.plan import Hindrance, Queue
from hotprefix.kernel.sched.estimates import Predictions

STATES = ("free", "owned", "evictable", "protected", "total")
TEXTS = {
    "kernel": {
        "lookups": "Requests that looked the cache up, once each, at their first prefill step that ran.",
        "queried_tokens": "Prompt tokens looked up, once per request.",
        "hits": "Requests that reused something.",
        "prompt_tokens": "Prompt tokens of requests whose first prefill step ran.",
        "cached_tokens": "Prompt tokens reused, once per request (effective reuse).",
        "cached_host_tokens": "Prompt tokens reused, final source L2.",
        "cached_storage_tokens": "Prompt tokens reused, final source L3.",
        "computed_prompt_tokens": "Prompt positions computed, re-computation included.",
        "computed_output_tokens": "Positions of outputs computed, re-computation included.",
        "recomputed_tokens": "Positions computed that their request had had before a retraction.",
        "recomputed_prompt_tokens": "Prompt positions computed that their request had had before.",
        "indexed_pages": "Pages published in L1's tree.",
        "evicted_pages": "Pages L1's tree gave up.",
        "flushed_pages": "Pages L1's tree gave up to a flush.",
        "duplicate_pages": "Pages computed though another request's copy was kept.",
        "submitted": "Requests taken.",
        "rejected": "Requests refused.",
        "finished": "Requests that ended well.",
        "aborted": "Requests aborted.",
        "failed": "Requests that ended with an error.",
        "retractions": "Running requests put back to wait.",
        "steps": "Steps.",
        "failed_steps": "Steps that failed.",
        "stalls": "Planning passes in which nothing could run though requests waited.",
        "refresh_passes": "Passes of waiting-prefix refresh.",
        "refresh_touches": "Prefixes touched by refresh passes.",
        "retained_tokens": "Tokens in L1 on arrival whose very pages were still there at their use.",
        "lost_waiting_tokens": "Tokens in L1 on arrival whose pages L1 gave up before their use.",
        "lost_regained_tokens": "Lost tokens: in L1 again, computed or restored for another request.",
        "lost_host_tokens": "Lost tokens: restored from L2.",
        "lost_storage_tokens": "Lost tokens: restored from L3.",
        "lost_recomputed_tokens": "Lost tokens: computed by the request itself.",
    },
    "host": {
        "saved": "Pages copied from L1 to L2.",
        "restored": "Pages copied from L2 to L1.",
        "landed": "Fetched pages that got a place in L2.",
        "stored": "Pages handed over for L3.",
        "save_no_room": "Pages not saved: L2 had no room.",
        "land_no_room": "Fetched pages dropped: L2 had no room.",
    },
    "prefetch": {
        "started": "Fetches from L3 begun.",
        "shared": "Requests that joined another's fetch.",
        "cancelled": "Fetches given up because no request waited any more.",
        "late": "Fetches that ended when no request waited any more.",
        "not_worth": "Fetches not begun: computing is predicted to be quicker.",
        "pages": "Pages asked of L3.",
    },
    "store": {
        "shared_pages": "Pages that a fetch got from another's read.",
        "late_pages": "Pages that came when no request waited any more.",
        "known_pages": "Pages put that the store had already.",
        "active_fetches": "Fetches the store works on.",
        "reserved_bytes": "Host memory reserved for fetches in flight.",
        "queued_puts": "Pages on their way to the store.",
        "queued_put_bytes": "Bytes of pages on their way to the store.",
        "threads": "The store's threads.",
    },
}  # fmt: skip
STORE_GAUGES = ("active_fetches", "reserved_bytes", "queued_puts", "queued_put_bytes", "threads")


def insight_metrics(insight: Insight) -> Iterator[Metric]:
    """Every number of an `Insight`."""
    yield from _gauges(insight)
    for group in ("kernel", "host", "prefetch"):
        yield from _counters(group, getattr(insight, group))
    yield from _queue(insight.queue)
    if insight.fared is not None:
        yield from _goodput(insight.fared)
    if insight.predictions is not None:
        yield from _predictions(insight.predictions)
    yield from _frames(insight)
    yield from _time(insight)
    yield from _links(insight)
    if insight.store is not None:
        yield from _store(insight.store)
    yield from _observation(insight)


def tier_pages(insight: Insight | None) -> Mapping[str, Occupancy]:
    """The tiers beside L1, by label."""
    return {} if insight is None or insight.l2 is None else {"host": insight.l2}


def _queue(queue: Queue) -> Iterator[Metric]:
    """Absent while nothing waits, because an age of 0 would look like a measured one."""
    if queue.oldest is not None:
        yield GaugeMetricFamily(
            "hotprefix_oldest_wait_seconds",
            "Age of the request that waits longest for its first admission.",
            value=queue.oldest,
        )
    head = queue.head
    if head is None:
        return
    why = GaugeMetricFamily(
        "hotprefix_queue_head_hindrance", "1 for why the head of the queue does not start.", labels=["reason"]
    )
    for reason in Hindrance:
        why.add_metric([reason.value], float(head.hindrance is reason))
    pages = GaugeMetricFamily(
        "hotprefix_queue_head_pages",
        "What the head of the queue needs, against L1's pages.",
        labels=["pages"],
    )
    for name in ("need", "shared", "owed", "free", "evictable", "protected", "owned", "capacity"):
        pages.add_metric([name], getattr(head, name))
    waited = GaugeMetricFamily(
        "hotprefix_queue_head_seconds", "Age of the head of the queue.", value=head.waited
    )
    yield from (why, pages, waited)


def _goodput(fared: Fared) -> Iterator[Metric]:
    """Only for objectives that were given."""
    objectives = GaugeMetricFamily(
        "hotprefix_slo_seconds", "The objectives that requests are held against.", labels=["objective"]
    )
    for field in dataclasses.fields(fared.slo):
        limit = getattr(fared.slo, field.name)
        if limit is not None:
            objectives.add_metric([field.name.removesuffix("_s")], limit)
    ended = CounterMetricFamily(
        "hotprefix_slo_requests", "Requests that ended or were refused, by heat; good: goodput.",
        labels=["heat", "outcome"],
    )  # fmt: skip
    late = CounterMetricFamily(
        "hotprefix_slo_timeouts",
        "Requests without a first token within the time-out, by heat.",
        labels=["heat"],
    )
    for heat, outcomes in fared.groups.items():
        for outcome in ("good", "missed", "failed", "aborted", "refused"):
            ended.add_metric([heat, outcome], getattr(outcomes, outcome))
        if outcomes.timeouts is not None:
            late.add_metric([heat], outcomes.timeouts)
    yield from (objectives, ended)
    if fared.slo.timeout_s is not None:
        yield late


def _predictions(seen: Predictions) -> Iterator[Metric]:
    families = [
        CounterMetricFamily(f"hotprefix_prediction{name}", text, labels=["of"])
        for name, text in (
            ("s", "Times that a duration was both predicted and observed."),
            ("_predicted_seconds", "Sum of what was predicted; less the observed: the bias."),
            ("_observed_seconds", "Sum of what was observed."),
            ("_error_seconds", "Sum of the differences, whatever their sign."),
        )
    ]
    for of in ("restore", "prefill", "fetch"):
        one = getattr(seen, of)
        values = (one.times, one.predicted_s, one.observed_s, one.error_s)
        for family, value in zip(families, values, strict=True):
            family.add_metric([of], value)
    yield from families
    for name, text, value in (
        ("restores_chosen", "Restores begun whose prefill had a prediction.", seen.restored),
        ("restores_refused", "Restores not chosen: computing is predicted to be quicker.", seen.refused),
        ("prefill_avoided_seconds", "Prefill that restores are predicted to have avoided.", seen.restored_s),
    ):
        yield CounterMetricFamily(f"hotprefix_{name}", text, value=value)


def _frames(insight: Insight) -> Iterator[Metric]:
    if not insight.groups:
        return
    now = GaugeMetricFamily("hotprefix_group_frames", "Frames of a layer group now; the states add up to the "
                            "total.", labels=["group", "state"])  # fmt: skip
    gone = CounterMetricFamily("hotprefix_group_evicted_frames", "Pages a layer group gave up.",
                               labels=["group"])  # fmt: skip
    for i, count in enumerate(insight.groups):
        for state in ("free", "held", "idle", "total"):
            now.add_metric([str(i), state], getattr(count, state))
        gone.add_metric([str(i)], count.evicted)
    yield now
    yield gone


def _gauges(insight: Insight) -> Iterator[Metric]:
    for name, text, value in (
        ("parked_requests", "Waiting requests that wait for a flight's leader.", insight.parked),
        ("tree_nodes", "Nodes of L1's prefix tree.", insight.tree_nodes),
        ("namespaces", "Namespaces with cached prefixes.", insight.namespaces),
        ("fetches", "Fetches from L3 that requests wait for.", insight.fetches),
    ):
        yield GaugeMetricFamily(f"hotprefix_{name}", text, value=value)
    for kind, text in (
        ("cached", "Effective reuse, tokens per second over a window."),
        ("uncached", "Prompt tokens computed, per second over a window."),
    ):
        family = GaugeMetricFamily(f"hotprefix_{kind}_tps", text, labels=["window_s"])
        for rate in insight.throughput:
            family.add_metric([str(rate.window_s)], getattr(rate, f"{kind}_tps"))
        yield family


def _counters(group: str, counters: Any) -> Iterator[Metric]:
    for field in dataclasses.fields(counters):
        text = TEXTS[group].get(field.name, f"{field.name.replace('_', ' ')}, by the {group}.")
        yield CounterMetricFamily(
            f"hotprefix_{group}_{field.name}", text, value=getattr(counters, field.name)
        )


def _time(insight: Insight) -> Iterator[Metric]:
    family = CounterMetricFamily(
        "hotprefix_engine_seconds", "What the engine's loop spent its time on.", labels=["phase"]
    )
    for phase in ("plan", "execute", "commit"):
        family.add_metric([phase], getattr(insight, f"{phase}_s"))
    yield family
    for name, text, value in (
        ("refresh", "Passes of waiting-prefix refresh; part of planning.", insight.refresh_s),
        ("prefill_busy", "Executing steps that had prefill tokens.", insight.prefill_busy_s),
    ):
        yield CounterMetricFamily(f"hotprefix_{name}_seconds", text, value=value)


def _links(insight: Insight) -> Iterator[Metric]:
    """The physical links, each counted by itself: a page from L3 to L1 counts on both."""
    moved = CounterMetricFamily("hotprefix_link_bytes", "Bytes moved, by link.", labels=["link"])
    spent = CounterMetricFamily("hotprefix_link_seconds", "Seconds spent moving, by link.", labels=["link"])
    pages = CounterMetricFamily("hotprefix_link_pages", "Pages moved, by link.", labels=["link"])
    for link, total in link_totals(insight.host, insight.links, insight.store).items():
        moved.add_metric([link], total.bytes)
        spent.add_metric([link], total.seconds)
        pages.add_metric([link], total.pages)
    yield from (moved, spent, pages)


def _store_links(store: StoreStats) -> tuple[tuple[str, LinkStats], ...]:
    return ("storage_to_host", store.read), ("host_to_storage", store.write)


def _store(store: StoreStats) -> Iterator[Metric]:
    calls = CounterMetricFamily("hotprefix_store_calls", "Requests made to the store.", labels=["link"])
    failures = CounterMetricFamily(
        "hotprefix_store_failures", "Pages that could not be read or written.", labels=["link", "reason"]
    )
    opened = CounterMetricFamily(
        "hotprefix_store_breaker_opened", "How often the circuit breaker opened.", labels=["link"]
    )
    breaker = GaugeMetricFamily(
        "hotprefix_store_breaker", "1 for the state the circuit breaker is in.", labels=["link", "state"]
    )
    for link, stats in _store_links(store):
        calls.add_metric([link], stats.calls)
        opened.add_metric([link], stats.opened)
        for state in BreakerState:
            breaker.add_metric([link, state.value], float(stats.breaker is state))
        for reason, count in sorted(stats.failures.items()):
            failures.add_metric([link, str(reason)], count)
    yield from (calls, failures, opened, breaker)
    for name, text, label, counts in (
        ("fetches_ended", "Fetches, by how they ended.", "ending", store.endings),
        ("chores_lost", "Touches and removals that were not done.", "reason", store.chores_lost),
        ("passed_over", "Pages that could not be deleted when their turn came.", "reason", store.passed_over),
    ):
        family = CounterMetricFamily(f"hotprefix_store_{name}", text, labels=[label])
        for word, count in sorted(counts.items()):
            family.add_metric([str(word)], count)
        yield family
    for name, text in TEXTS["store"].items():
        kind = GaugeMetricFamily if name in STORE_GAUGES else CounterMetricFamily
        yield kind(f"hotprefix_store_{name}", text, value=getattr(store, name))


def _observation(insight: Insight) -> Iterator[Metric]:
    observed = insight.observed
    for name, text, label, values in (
        ("event_records", "Records of the event log.", "outcome",
         {"written": observed.written_records, "dropped": observed.dropped_records}),
        ("kv_event_batches", "Batches of KV events.", "outcome",
         {"published": observed.kv_batches, "dropped": observed.kv_dropped_batches}),
        ("kv_event_pages", "Pages told by KV events.", "kind",
         {"stored": observed.kv_stored_pages, "removed": observed.kv_removed_pages}),
    ):  # fmt: skip
        family = CounterMetricFamily(f"hotprefix_{name}", text, labels=[label])
        for word, value in values.items():
            family.add_metric([word], value)
        yield family
    failed = observed.failed is not None or observed.sink_failed is not None
    yield GaugeMetricFamily("hotprefix_observation_failed", "1 where observation was switched off.",
                            value=float(failed))  # fmt: skip
