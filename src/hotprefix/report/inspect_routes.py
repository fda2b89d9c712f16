"""`hotprefix inspect` of a router's log. Owns: its figures as JSON, and their page.

Rules: what was not measured is null. Units: seconds, tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hotprefix.records.percentiles import Sketch
from hotprefix.records.route_summary import RouteSummary
from hotprefix.report.html_page import render_page

QUANTILES = (0.5, 0.95, 0.99)
TIMES = ("first_s", "held_s", "total_s")
COUNTS = {
    "totals": "Totals", "tokens": "Tokens of prompts", "rules": "Choices by rule",
    "copied_tokens": "Tokens computed a further time, by why", "refused": "Refused, by why",
    "models": "Choices by model", "endings": "Endings",
}  # fmt: skip
ENDINGS = ("decisions", "ended", "failed", "cancelled", "open")


def route_figures(s: RouteSummary) -> dict[str, Any]:
    """The figures as JSON can hold them."""
    header = s.header
    return {
        "log": "router",
        "hotprefix": header.hotprefix if header else None,
        "config": header.config if header else None,
        "read": dataclasses.asdict(s.read),
        "span_s": s.span_s,
        "totals": {"runs": s.runs, "requests": s.requests, "retries": s.retries,
                   "refused": s.refused.total(), "dropped_records": s.dropped_records},
        "models": dict(s.models),
        "rules": dict(s.rules),
        "endings": dict(s.endings),
        "refused": dict(s.refused),
        "tokens": dict(s.tokens),
        "copied_tokens": dict(s.copied),
        "workers": {worker: {name: s.workers[worker, name] for name in ENDINGS} for worker in _workers(s)},
        "first_s": _times(s.first),
        "held_s": _times(s.held),
        "total_s": _times(s.total),
        "error_s": {"bias": s.bias_s, **_times(s.errors)},
    }  # fmt: skip


def render_routes(s: RouteSummary) -> str:
    """The report as one HTML document."""
    found = route_figures(s)
    notes = []
    if s.read.skipped:
        notes.append(f"{s.read.skipped} bad lines were left out; the first: {s.read.first_bad}")
    if s.dropped_records:
        notes.append(f"{s.dropped_records:,} records were dropped because the log could not keep up.")
    lead = f"{s.requests:,} requests in {s.span_s:,.1f} s; {s.read.records:,} records."
    tables = [
        ("Workers", ("worker", *ENDINGS), _rows(found["workers"])),
        ("Seconds", ("", *found["first_s"]), _rows({name: found[name] for name in TIMES})),
        ("First token, predicted less observed, seconds", ("", *found["error_s"]),
         _rows({"error": found["error_s"]})),
        *((title, ("", "count"), _rows({k: {"": v} for k, v in found[name].items()}))
          for name, title in COUNTS.items()),
    ]  # fmt: skip
    return render_page(
        "inspect_routes.html", title="hotprefix inspect: a router", lead=lead, notes=notes, tables=tables
    )


def _rows(values: dict[str, dict[str, Any]]) -> list[list[str]]:
    return [[name, *map(_text, row.values())] for name, row in values.items()]


def _workers(s: RouteSummary) -> list[str]:
    return sorted({worker for worker, _ in s.workers})


def _times(sketch: Sketch) -> dict[str, float | int | None]:
    found: dict[str, float | int | None] = {"count": sketch.count, "mean": sketch.mean}
    return found | {f"p{share * 100:.0f}": sketch.quantile(share) for share in QUANTILES}


def _text(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
