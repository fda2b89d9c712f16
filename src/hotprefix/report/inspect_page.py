"""The inspect report as HTML. Owns: which charts and tables show a log's `Summary`, and their words.

Rules: the report is one self-contained file. A figure that was not measured is a dash. Percentiles are said
to be exact within 1 %. Shares are of tokens, and what they are a share of is written beside them.
"""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup

from hotprefix.records.log_summary import LONG_WINDOW_S, QUANTILES, WINDOW_S, Group, Summary
from hotprefix.records.request_row import RequestRow
from hotprefix.report.figure_text import DASH, seconds, whole
from hotprefix.report.html_page import render_page
from hotprefix.report.inspect_charts import chain, lines
from hotprefix.report.svg import Bar, bar_panel, extent

_TIMES = (("ttft_s", "Time to first token"), ("queue_s", "Queue wait"), ("total_s", "Enqueue to end"),
          ("requeue_s", "Waits after retractions"))  # fmt: skip
_SOURCES = (("device", "L1, device", "d"), ("host", "L2, host", "c"), ("storage", "L3, storage", "b"),
            ("computed_once", "computed", "a"))  # fmt: skip
_RETENTION = (("retained", "retained in L1", "d"), ("regained", "lost, in L1 again", "d"),
              ("restored_host", "restored from L2", "c"), ("restored_storage", "restored from L3", "b"),
              ("recomputed", "recomputed", "a"))  # fmt: skip
_GLOSSARY = (
    ("matched at enqueue", "prompt tokens that L1 could have given when the request arrived."),
    ("retention", "what became of exactly those tokens until they were used: retained (the very pages), or "
     "lost and then in L1 again by another request, restored, or recomputed."),
    ("net L1 hit loss", "matched at enqueue minus matched at admission; negative if the match has grown."),
    ("source", "where each prompt token that a request has reached finally came from; each counts once."),
    ("hot, cold", "at least half of the prompt lay in leading pages that earlier requests had, as prompt or "
     "as answer; the rest."),
    ("heat, queue depth", "earlier requests whose prompt began with the same page; requests that waited for "
     "their first admission on arrival."),
    ("cached tokens/s", "reuse counted once per request, where it is first used; observed, not capacity."),
    ("p50, p90, p99", "from a histogram, within 1 %; means, counts and sums are exact."),
    ("queue, prefill, decode", "enqueue to admission; to the first token; to the end."),
)  # fmt: skip


def render(s: Summary) -> str:
    """The report as one HTML document."""
    return render_page(
        "inspect.html",
        title="hotprefix inspect",
        lead=_lead(s),
        notes=_notes(s),
        cards=_cards(s),
        charts=_charts(s),
        tables=[
            _groups_table(s),
            _times_table(s),
            *(_bucket_table(s, by) for by in s.buckets),
            _tiers_table(s),
            _links_table(s),
            _prefix_table(s),
        ],
        chains=_chains(s),
        totals=[(k.replace("_", " "), _value(v)) for k, v in dataclasses.asdict(s.totals).items()],
        glossary=_GLOSSARY,
    )


def _lead(s: Summary) -> str:
    span = s.span_s
    if s.header is None or span is None:
        return "The log is empty."
    since = datetime.fromtimestamp(s.started or 0.0, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    runs = "" if s.totals.runs == 1 else f", {s.totals.runs} engine processes"
    return (
        f"{s.totals.enqueued:,} requests of {s.header.model} in {span:,.1f} s from {since}{runs}; "
        f"{s.read.records:,} records in {len(s.read.parts)} part(s), pages of {s.header.page_size} tokens."
    )


def _notes(s: Summary) -> list[str]:
    """What the reader must know before trusting the figures."""
    notes = []
    if s.read.skipped:
        notes.append(f"{s.read.skipped} bad lines were left out; the first: {s.read.first_bad}")
    if s.read.torn:
        notes.append(
            f"{s.read.torn} part(s) end in a cut line: the log ends with a crash or is still written."
        )
    if s.totals.dropped_records:
        notes.append(f"{s.totals.dropped_records:,} records were dropped because the log could not keep up.")
    if s.outcomes["open"]:
        notes.append(f"{s.outcomes['open']:,} requests have no end in this log.")
    return notes


def _cards(s: Summary) -> list[tuple[str, str, str]]:
    g = s.groups["all"]
    t = g.tokens
    used = t["cached"]
    ttft = g.times["ttft_s"].quantile(0.5)
    return [
        ("Reused", _share(used, t["reached"]), f"{whole(used)} of {whole(t['reached'])} prompt tokens"),
        ("Lost while waiting", whole(s.totals.lost_waiting_tokens),
         f"tokens; net L1 hit loss {whole(t['hit_loss'])} of {whole(t['matched_at_enqueue'])} matched"),
        ("Median TTFT", seconds(ttft) if ttft is not None else DASH, f"{g.times['ttft_s'].count:,} requests"),
        ("Evicted", whole(s.totals.evicted_pages), f"pages; {whole(s.totals.published_pages)} published"),
    ]  # fmt: skip


def _share(part: float, of: float) -> str:
    return f"{part / of * 100:.1f} %" if of else DASH


def _value(value: Any) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"


def _charts(s: Summary) -> list[dict[str, Any]]:
    windows = s.throughput()
    charts = [
        _bars(s, "Final source of prompt tokens, by group", _SOURCES),
        _bars(s, "The enqueue-time hit's own tokens, by group", _RETENTION),
    ]
    if windows:
        ends = tuple(
            datetime.fromtimestamp(w[0], UTC).strftime("%H:%M:%S") for w in (windows[0], windows[-1])
        )
        both = (ends[0], ends[1])
        panels = []
        for title, a, b in ((f"{WINDOW_S} s windows", 1, 2), (f"{LONG_WINDOW_S} s windows", 3, 4)):
            svg = lines(
                f"Cached and uncached prompt tokens per second, {title}",
                [("cached", "d", [w[a] for w in windows]), ("uncached", "a", [w[b] for w in windows])],
                both,
            )
            panels.append({"title": title, "svg": Markup(svg)})
        order = sorted(s.windows)
        gauges = [s.windows[n] for n in order]
        svg = lines(
            "Most requests waiting and running in each window",
            [("waiting", "b", [w.waiting for w in gauges]), ("running", "c", [w.running for w in gauges])],
            both,
        )
        panels.append({"title": "Requests, peak of each window", "svg": Markup(svg)})
        charts.append({"title": "Over time: prompt tokens per second", "panels": panels})
    return charts


def _bars(s: Summary, title: str, parts: tuple[tuple[str, str, str], ...]) -> dict[str, Any]:
    panels = []
    for name, group in s.groups.items():
        if not group.requests:
            continue
        amounts = [(label, tone, _amount(group, field)) for field, label, tone in parts]
        total = sum(amount for _, _, amount in amounts)
        bars = [Bar(label, amount, f"{whole(amount)} · {_share(amount, total)}", tone=tone)
                for label, tone, amount in amounts]  # fmt: skip
        svg = bar_panel(f"{title}: {name}", bars, top=extent(bars))
        panels.append({"title": f"{name}, {group.requests:,} requests", "svg": Markup(svg)})
    return {"title": title, "panels": panels}


def _amount(group: Group, field: str) -> float:
    t = group.tokens
    return t["computed"] - t["again_prompt"] if field == "computed_once" else t[field]


def _groups_table(s: Summary) -> dict[str, Any]:
    heads = (
        "group", "requests", "prompt tokens", "reused", "L1", "L2", "L3", "computed", "again",
        "matched at enqueue", "retained", "lost", "net L1 hit loss",
    )  # fmt: skip
    fields = (
        "device", "host", "storage", "computed", "again_prompt", "matched_at_enqueue", "retained", "lost",
        "hit_loss",
    )  # fmt: skip
    rows = []
    for name, g in s.groups.items():
        if g.requests:
            t = g.tokens
            share = _share(t["cached"], t["reached"])
            sums = (whole(t[field]) for field in fields)
            rows.append((name, f"{g.requests:,}", whole(t["prompt_tokens"]), share, *sums))
    return {"title": "Tokens by group", "heads": heads, "rows": rows}


def _times_table(s: Summary) -> dict[str, Any]:
    rows = []
    for field, title in _TIMES:
        for name, group in s.groups.items():
            sketch = group.times[field]
            if sketch.count:
                found = [seconds(q) for share in QUANTILES if (q := sketch.quantile(share)) is not None]
                rows.append((f"{title}, {name}", f"{sketch.count:,}", seconds(sketch.mean or 0.0), *found,
                             seconds(sketch.most)))  # fmt: skip
    return {"title": "Times", "heads": ("", "requests", "mean", "p50", "p90", "p99", "most"), "rows": rows}


def _bucket_table(s: Summary, by: str) -> dict[str, Any]:
    """Which requests the cache helps. The buckets are those of replays."""
    rows = []
    for name, g in s.buckets[by].items():
        if not g.requests:
            continue
        t, ttft, queue = g.tokens, g.times["ttft_s"], g.times["queue_s"]
        marks = [ttft.quantile(share) for share in QUANTILES]
        rows.append((
            name, f"{g.requests:,}", _maybe(queue.mean), whole(t["matched_at_enqueue"]),
            _share(t["hit_loss"], t["matched_at_enqueue"]), _share(t["retained"], t["retained"] + t["lost"]),
            _share(t["cached"], t["reached"]), _maybe(ttft.mean), *(_maybe(mark) for mark in marks),
        ))  # fmt: skip
    heads = (
        by, "requests", "queue, mean", "matched at enqueue", "net L1 hit loss", "retained", "reused",
        "TTFT, mean", "p50", "p90", "p99",
    )  # fmt: skip
    return {"title": f"By {by}", "heads": heads, "rows": rows}


def _tiers_table(s: Summary) -> dict[str, Any]:
    t = s.totals
    rate = f"{t.fetched_pages / t.fetch_s:,.0f}" if t.fetch_s else DASH
    rows = [("L3 → L2", f"{t.fetches:,}", f"{t.fetched_pages:,}", f"{t.landed_pages:,}",
             seconds(t.fetch_s) if t.fetch_s else DASH, rate)]  # fmt: skip
    heads = ("link", "fetches", "pages came", "pages landed", "time, summed", "pages/s")
    return {"title": "Fetches from L3", "heads": heads, "rows": rows}


def _links_table(s: Summary) -> dict[str, Any]:
    rows = [
        (name.replace("_", " "), f"{link.pages:,}", f"{link.bytes:,}", seconds(link.seconds),
         ", ".join(f"{reason} {count:,}" for reason, count in sorted(link.failures.items())) or "none")
        for name, link in sorted(s.links.items())
    ]  # fmt: skip
    heads = ("link", "pages", "bytes", "time, summed", "pages that failed, by reason")
    return {"title": "Links", "heads": heads, "rows": rows}


def _prefix_table(s: Summary) -> dict[str, Any]:
    rows = [
        (name, f"{p.requests:,}", whole(p.prompt_tokens), whole(p.cached), _share(p.cached, p.prompt_tokens))
        for name, p in s.hottest()
    ]
    return {"title": "Hottest first pages (keyed fingerprints)", "rows": rows,
            "heads": ("prefix", "requests", "prompt tokens", "reused", "share")}  # fmt: skip


def _chains(s: Summary) -> list[dict[str, Any]]:
    top = max((row.total_s or row.ttft_s or 0.0 for row in s.slowest), default=0.0)
    return [_chain(row, top) for row in s.slowest]


def _chain(row: RequestRow, top: float) -> dict[str, Any]:
    """The stretches of one request's time: queue, prefill, decode."""
    queue = row.queue_s or 0.0
    ttft = row.ttft_s or 0.0
    total = max(row.total_s or ttft, ttft)
    svg = chain(
        f"request {row.request}", [("b", queue), ("d", max(ttft - queue, 0.0)), ("a", total - ttft)], top
    )
    return {
        "svg": Markup(svg),
        "cells": (
            row.request, _maybe(row.queue_s), _maybe(row.ttft_s), _maybe(row.total_s), row.outcome,
            whole(row.prompt_tokens), f"{row.matched_at_enqueue:,} → {whole(row.matched_at_admission)}",
            whole(row.retained), whole(row.regained), whole(row.restored_host), whole(row.restored_storage),
            whole(row.recomputed),
            whole(row.cached), f"{row.retractions}",
        ),
    }  # fmt: skip


def _maybe(value: float | None) -> str:
    return DASH if value is None else seconds(value)
