"""The fleet bench's HTML report. Owns: which parts of a `FleetSummary` are shown, in which charts and tables.

Rules: the report is one self-contained file. The first arm is the first row of each table and the mark across
each bar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

from markupsafe import Markup

from hotprefix.bench.figure_cells import Cell, factor
from hotprefix.bench.fleet_cells import COUNT_HEADS, TIME_HEADS, count_cells, ratio, time_cells, took
from hotprefix.bench.fleet_summary import FleetArm, FleetSummary, FleetWorkloadResult, Timed
from hotprefix.bench.page import busy_machine, setup_rows
from hotprefix.report.html_page import render_page
from hotprefix.report.svg import Bar, bar_panel, extent

_TONES = "abcd"
_GLOSSARY = (
    ("required", "what one cache without a limit would have to compute for these prompts."),
    ("factor", "fleet duplication factor: computed / required; 1.00 is perfect. Not measured where a worker "
     "is killed."),
    ("reused", "prompt tokens that the answering worker had."),
    ("copied", "tokens that the router chose to have computed a further time, because waiting was worse."),
    ("by worker", "requests that each worker was sent."),
    ("retries", "requests that went to another worker before their answer began."),
    ("migrations", "answers that went on at another worker after they had begun; a dash if this router does "
     "not count them."),
    ("lost", "requests without a whole answer."),
    ("TTFT", "time to first token, from the moment at which the request was to be sent."),
    ("ratio", "run by run to the first policy, median and range; coloured if it is on one side of 1 in every "
     "run."),
    ("dots, mark", "single runs; the first policy's mean."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Row:
    kind: str
    cells: tuple[Cell, ...]


def render(summary: FleetSummary) -> str:
    """The report as one HTML document."""
    s = summary.setup
    runs = "a single run" if s.runs == 1 else f"{s.runs} interleaved runs"
    quick = " Quick mode: small sizes, meant to see that everything works." if s.quick else ""
    return render_page(
        "bench.html",
        title="hotprefix bench fleet",
        lead=(
            f"Live experiments on {summary.workers} engines with {s.model} ({s.dtype}, {s.device}) and a "
            f"router for each policy, {runs} per policy.{quick}{busy_machine(s)}"
        ),
        cards=[_card(w) for w in summary.workloads],
        workloads=[_section(w) for w in summary.workloads],
        setup=setup_rows(s),
        glossary=_GLOSSARY,
    )


def _card(w: FleetWorkloadResult) -> dict[str, object]:
    base, ours = w.arms[0], w.arms[-1]
    before, after = ([factor(v) for v in arm.duplication] for arm in (base, ours))
    return {
        "anchor": w.workload,
        "title": w.workload,
        "before": took(base.mean_ttft_s),
        "after": took(ours.mean_ttft_s),
        "change": ratio(ours.mean_ttft_s),
        "about": (
            f"mean TTFT, {base.policy} → {ours.policy}; duplication factor {', '.join(before)} → "
            f"{', '.join(after)}"
        ),
    }


def _section(w: FleetWorkloadResult) -> dict[str, object]:
    figures: tuple[tuple[str, Callable[[FleetArm], Timed]], ...] = (
        ("Mean time to first token", lambda arm: arm.mean_ttft_s),
        ("95th percentile of it", lambda arm: arm.p95_ttft_s),
        ("Slowest completion", lambda arm: arm.slowest_s),
    )
    return {
        "anchor": w.workload,
        "title": w.title,
        "about": w.about,
        "note": "",
        "key": [],
        "charts": [{"title": "Times", "panels": [_panel(w, *each) for each in figures]}],
        "tables": [_table("Counts", COUNT_HEADS, w, count_cells), _table("Times", TIME_HEADS, w, time_cells)],
    }


def _panel(w: FleetWorkloadResult, title: str, pick: Callable[[FleetArm], Timed]) -> dict[str, object]:
    bars = [
        Bar(arm.policy, timed.mean or 0.0, took(timed), None, [v for v in timed.runs if v is not None], tone)
        for arm, tone in zip(w.arms, cycle(_TONES), strict=False)
        for timed in (pick(arm),)
    ]
    svg = bar_panel(
        f"{title}, {w.workload}, by policy", bars, top=extent(bars), reference=pick(w.arms[0]).mean
    )
    return {"title": title, "svg": Markup(svg)}


def _table(
    title: str, heads: Sequence[str], w: FleetWorkloadResult, cells: Callable[[FleetArm], tuple[Cell, ...]]
) -> dict[str, object]:
    rows = [_Row("" if at else "base", cells(arm)) for at, arm in enumerate(w.arms)]
    return {"title": title, "heads": heads, "rows": rows}
