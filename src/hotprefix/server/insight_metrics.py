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
from hotprefix.engine.paced.pace import PaceTotals
from hotprefix.engine.stores.breaker import BreakerState
from hotprefix.engine.stores.store_counters import StoreStats
from hotprefix.kernel.cache.tier import Occupancy
from hotprefix.kernel.plan import Hindrance, Queue
from hotprefix.kernel.state.estimates import Predictions

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
HEAD_PAGES = ("need", "shared", "owed", "free", "evictable", "protected", "owned", "capacity")
OUTCOMES = ("good", "missed", "failed", "aborted", "refused")
STORE_GAUGES = ("active_fetches", "reserved_bytes", "queued_puts", "queued_put_bytes", "threads")


def counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"hotprefix_{name}", text, value=value)


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"hotprefix_{name}", text, value=value)


def counters(name: str, text: str, labels: str, values: Mapping[Any, float]) -> Metric:
    """A counter with labels. labels: their names, between spaces. values: by the label's value, or by a tuple
    of the labels' values."""
    return _filled(CounterMetricFamily(f"hotprefix_{name}", text, labels=labels.split()), values)


def gauges(name: str, text: str, labels: str, values: Mapping[Any, float]) -> Metric:
    """As `counters`."""
    return _filled(GaugeMetricFamily(f"hotprefix_{name}", text, labels=labels.split()), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[Any, float]) -> Metric:
    for words, value in values.items():
        family.add_metric(words if isinstance(words, tuple) else (words,), value)
    return family


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
    if insight.pace is not None:
        yield from _pace(insight.pace)
    yield from _observation(insight)


def tier_pages(insight: Insight | None) -> Mapping[str, Occupancy]:
    """The tiers beside L1, by label."""
    return {} if insight is None or insight.l2 is None else {"host": insight.l2}


def _queue(queue: Queue) -> Iterator[Metric]:
    """Absent while nothing waits, because an age of 0 would look like a measured one."""
    if queue.oldest is not None:
        yield gauge(
            "oldest_wait_seconds",
            "Age of the request that waits longest for its first admission.",
            queue.oldest,
        )
    head = queue.head
    if head is None:
        return
    yield gauges(
        "queue_head_hindrance", "1 for why the head of the queue does not start.", "reason",
        {reason.value: float(head.hindrance is reason) for reason in Hindrance},
    )  # fmt: skip
    yield gauges(
        "queue_head_pages", "What the head of the queue needs, against L1's pages.", "pages",
        {name: getattr(head, name) for name in HEAD_PAGES},
    )  # fmt: skip
    yield gauge("queue_head_seconds", "Age of the head of the queue.", head.waited)


def _goodput(fared: Fared) -> Iterator[Metric]:
    """Only for objectives that were given."""
    limits = {field.name.removesuffix("_s"): getattr(fared.slo, field.name)
              for field in dataclasses.fields(fared.slo)}  # fmt: skip
    yield gauges(
        "slo_seconds", "The objectives that requests are held against.", "objective",
        {name: limit for name, limit in limits.items() if limit is not None},
    )  # fmt: skip
    yield counters(
        "slo_requests", "Requests that ended or were refused, by heat; good: goodput.", "heat outcome",
        {(heat, name): getattr(found, name) for heat, found in fared.groups.items() for name in OUTCOMES},
    )  # fmt: skip
    if fared.slo.timeout_s is not None:
        late = {heat: found.timeouts for heat, found in fared.groups.items()}
        yield counters(
            "slo_timeouts", "Requests without a first token within the time-out, by heat.", "heat",
            {heat: count for heat, count in late.items() if count is not None},
        )  # fmt: skip


def _predictions(seen: Predictions) -> Iterator[Metric]:
    for name, text, field in (
        ("s", "Times that a duration was both predicted and observed.", "times"),
        ("_predicted_seconds", "Sum of what was predicted; less the observed: the bias.", "predicted_s"),
        ("_observed_seconds", "Sum of what was observed.", "observed_s"),
        ("_error_seconds", "Sum of the differences, whatever their sign.", "error_s"),
    ):
        values = {of: getattr(getattr(seen, of), field) for of in ("restore", "prefill", "fetch")}
        yield counters(f"prediction{name}", text, "of", values)
    yield counter("restores_chosen", "Restores begun whose prefill had a prediction.", seen.restored)
    yield counter(
        "restores_refused", "Restores not chosen: computing is predicted to be quicker.", seen.refused
    )
    yield counter(
        "prefill_avoided_seconds", "Prefill that restores are predicted to have avoided.", seen.restored_s
    )


def _frames(insight: Insight) -> Iterator[Metric]:
    if not insight.groups:
        return
    groups = {str(number): count for number, count in enumerate(insight.groups)}
    states = ("free", "held", "idle", "total")
    yield gauges(
        "group_frames", "Frames of a layer group now; the states add up to the total.", "group state",
        {(name, state): getattr(count, state) for name, count in groups.items() for state in states},
    )  # fmt: skip
    yield counters(
        "group_evicted_frames", "Pages a layer group gave up.", "group",
        {name: count.evicted for name, count in groups.items()},
    )  # fmt: skip


def _gauges(insight: Insight) -> Iterator[Metric]:
    yield gauge("parked_requests", "Waiting requests that wait for a flight's leader.", insight.parked)
    yield gauge("tree_nodes", "Nodes of L1's prefix tree.", insight.tree_nodes)
    yield gauge("namespaces", "Namespaces with cached prefixes.", insight.namespaces)
    yield gauge("fetches", "Fetches from L3 that requests wait for.", insight.fetches)
    for kind, text in (
        ("cached", "Effective reuse, tokens per second over a window."),
        ("uncached", "Prompt tokens computed, per second over a window."),
    ):
        rates = {str(rate.window_s): getattr(rate, f"{kind}_tps") for rate in insight.throughput}
        yield gauges(f"{kind}_tps", text, "window_s", rates)


def _counters(group: str, counts: Any) -> Iterator[Metric]:
    for field in dataclasses.fields(counts):
        text = TEXTS[group].get(field.name, f"{field.name.replace('_', ' ')}, by the {group}.")
        yield counter(f"{group}_{field.name}", text, getattr(counts, field.name))


def _time(insight: Insight) -> Iterator[Metric]:
    yield counters(
        "engine_seconds", "What the engine's loop spent its time on.", "phase",
        {phase: getattr(insight, f"{phase}_s") for phase in ("plan", "execute", "commit")},
    )  # fmt: skip
    yield counter("refresh_seconds", "Passes of waiting-prefix refresh; part of planning.", insight.refresh_s)
    yield counter("prefill_busy_seconds", "Executing steps that had prefill tokens.", insight.prefill_busy_s)


def _links(insight: Insight) -> Iterator[Metric]:
    """The physical links, each counted by itself: a page from L3 to L1 counts on both."""
    totals = link_totals(insight.host, insight.links, insight.store)
    for unit, text in (
        ("bytes", "Bytes moved"),
        ("seconds", "Seconds spent moving"),
        ("pages", "Pages moved"),
    ):
        values = {link: getattr(total, unit) for link, total in totals.items()}
        yield counters(f"link_{unit}", f"{text}, by link.", "link", values)


def _store(store: StoreStats) -> Iterator[Metric]:
    links = {"storage_to_host": store.read, "host_to_storage": store.write}
    yield counters(
        "store_calls",
        "Requests made to the store.",
        "link",
        {name: link.calls for name, link in links.items()},
    )
    yield counters(
        "store_failures", "Pages that could not be read or written.", "link reason",
        {(name, str(reason)): count for name, link in links.items()
         for reason, count in sorted(link.failures.items())},
    )  # fmt: skip
    yield counters(
        "store_breaker_opened", "How often the circuit breaker opened.", "link",
        {name: link.opened for name, link in links.items()},
    )  # fmt: skip
    yield gauges(
        "store_breaker", "1 for the state the circuit breaker is in.", "link state",
        {(name, state.value): float(link.breaker is state) for name, link in links.items()
         for state in BreakerState},
    )  # fmt: skip
    for name, text, label, counts in (
        ("fetches_ended", "Fetches, by how they ended.", "ending", store.endings),
        ("chores_lost", "Touches and removals that were not done.", "reason", store.chores_lost),
        ("passed_over", "Pages that could not be deleted when their turn came.", "reason", store.passed_over),
    ):
        yield counters(
            f"store_{name}", text, label, {str(word): count for word, count in sorted(counts.items())}
        )
    for name, text in TEXTS["store"].items():
        yield (gauge if name in STORE_GAUGES else counter)(f"store_{name}", text, getattr(store, name))


def _pace(pace: PaceTotals) -> Iterator[Metric]:
    yield counter("pace_seconds", "What the steps of a paced engine should have taken.", pace.priced_s)
    yield counter("pace_lost_seconds", "By how much they took longer, and it was given up.", pace.lost_s)
    yield gauge(
        "pace_behind_seconds", "By how much the last step ended too late, still to be made up.", pace.behind_s
    )


def _observation(insight: Insight) -> Iterator[Metric]:
    seen = insight.observed
    yield counters("event_records", "Records of the event log.", "outcome",
                   {"written": seen.written_records, "dropped": seen.dropped_records})  # fmt: skip
    yield counters("kv_event_batches", "Batches of KV events.", "outcome",
                   {"published": seen.kv_batches, "dropped": seen.kv_dropped_batches})  # fmt: skip
    yield counters("kv_event_pages", "Pages told by KV events.", "kind",
                   {"stored": seen.kv_stored_pages, "removed": seen.kv_removed_pages})  # fmt: skip
    failed = seen.failed is not None or seen.sink_failed is not None
    yield gauge("observation_failed", "1 where observation was switched off.", float(failed))
