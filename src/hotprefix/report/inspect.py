"""`hotprefix inspect`. Owns: a log's `Summary` as JSON, and the way from a log to its report.

Rules: what was not measured is left out or null. Units: seconds, tokens, tokens per second.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from hotprefix.errors import InputError
from hotprefix.records.log_summary import QUANTILES, Group, Summary, summarize
from hotprefix.records.parts import parts_of
from hotprefix.records.percentiles import Sketch
from hotprefix.records.route_summary import is_route_log, summarize_routes
from hotprefix.report.inspect_page import render
from hotprefix.report.inspect_routes import render_routes, route_figures
from hotprefix.report.inspect_rows import RowFile


def inspect_log(
    log: Path, out: Path | None, *, rows: Path | None = None, skip_bad: bool = False
) -> dict[str, Any]:
    """Read a log of an engine or a router, write its report and rows, and return its figures. Raises
    InputError, also for rows of a router's log.

    out: the report's file; None = no report.
    rows: .csv or .parquet file for a row for each request; None = no rows.
    skip_bad: leave out lines that are no records; they are counted.
    """
    for name, place in (("out", out), ("rows", rows)):
        if place is not None and place.resolve() in {part.resolve() for part in parts_of(log)}:
            raise InputError(f"--{name} {place}: this is the log itself; give another file", param=name)
    if is_route_log(log, skip_bad=skip_bad):
        return _routes(log, out, rows, skip_bad)
    if rows is None:
        summary = summarize(log, skip_bad=skip_bad)
    else:
        with RowFile(rows) as file:
            summary = summarize(log, skip_bad=skip_bad, on_row=file.write)
    if out is not None:
        _write(out, render(summary))
    return figures(summary)


def _routes(log: Path, out: Path | None, rows: Path | None, skip_bad: bool) -> dict[str, Any]:
    """The same of a router's log."""
    if rows is not None:
        raise InputError(
            f"--rows {rows}: {log} is a router's log, whose lines are rows already; give the log of an "
            "engine, or --out or --json",
            param="rows",
        )
    found = summarize_routes(log, skip_bad=skip_bad)
    if out is not None:
        _write(out, render_routes(found))
    return route_figures(found)


def _write(out: Path, page: str) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"--out {out}: {error.strerror}; give a file that can be written", param="out"
        ) from error


def figures(s: Summary) -> dict[str, Any]:
    """The figures as JSON can hold them. Seconds, tokens, tokens per second."""
    header = s.header
    return {
        "model": header.model if header else None,
        "hotprefix": header.hotprefix if header else None,
        "page_size": header.page_size if header else None,
        "span_s": s.span_s,
        "read": dataclasses.asdict(s.read),
        "totals": dataclasses.asdict(s.totals),
        "links": {name: dataclasses.asdict(link) for name, link in s.links.items()},
        "outcomes": dict(s.outcomes),
        "groups": {name: _group(group) for name, group in s.groups.items()},
        "buckets": {
            by: {name: _group(group) for name, group in found.items() if group.requests}
            for by, found in s.buckets.items()
        },
        "throughput": [
            {"at": at, "cached_tps_30": a, "uncached_tps_30": b, "cached_tps_300": c, "uncached_tps_300": d}
            for at, a, b, c, d in s.throughput()
        ],
        "hottest": [{"prefix": name, **dataclasses.asdict(p)} for name, p in s.hottest()],
        "slowest": [dataclasses.asdict(row) for row in s.slowest],
    }


def to_json(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1)


def _group(group: Group) -> dict[str, Any]:
    return {
        "requests": group.requests,
        "tokens": {name: group.tokens[name] for name in group.measured},
        "measured": dict(group.measured),
        **{name: _times(sketch) for name, sketch in group.times.items()},
    }


def _times(sketch: Sketch) -> dict[str, float | int] | None:
    if not sketch.count:
        return None
    found: dict[str, float | int] = {"count": sketch.count, "mean": sketch.total / sketch.count,
                                     "max": sketch.most}  # fmt: skip
    for share in QUANTILES:
        value = sketch.quantile(share)
        assert value is not None
        found[f"p{share * 100:.0f}"] = value
    return found
