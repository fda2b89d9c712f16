"""The replay report. Owns: `render`, from an `ExperimentResult` to one self-contained HTML document.

Rules: the answer comes first, each claim next to its interval and verdict. Then follow what was held fixed,
what happened, which requests gained and at whose cost, how far the result can be believed, and how to repeat
it. There are no external assets and no script. The page can be read on a phone, and without any knowledge of
the experiment.
"""

from __future__ import annotations

from typing import Any

from hotprefix.lab.experiment.result import CostLabel, ExperimentResult, Provenance
from hotprefix.lab.interval import METHOD
from hotprefix.lab.stats import SECTIONS
from hotprefix.lab.table_math import PERCENTILE_METHOD
from hotprefix.report.html_page import render_page
from hotprefix.report.replay.capacity_sweep import bound_table, bucket_tables, capacity_charts
from hotprefix.report.replay.conditions import condition_section
from hotprefix.report.replay.lookup import Lookup
from hotprefix.report.replay.routing import routing_section
from hotprefix.report.replay.verdict_cards import cards, headline
from hotprefix.report.replay.words import value


def render(result: ExperimentResult) -> str:
    """The report as one HTML document."""
    lookup = Lookup(result)
    return render_page(
        "replay.html",
        title=f"{result.name}: hotprefix replay",
        name=result.name,
        question=result.question,
        headline=headline(result),
        scope=_scope(result),
        cards=cards(result),
        arms=result.arms,
        baseline=result.baseline,
        fixed=sorted(result.fixed.items()),
        slo=_objectives(result),
        conditions=[
            condition_section(result, lookup, one) | {"routing": routing_section(result, lookup, one.name)}
            for one in result.conditions
        ],
        sweep=capacity_charts(result, lookup),
        bounds=bound_table(result),
        buckets=bucket_tables(result),
        problems=result.problems,
        trust=[*_trace(result.trace), *_cost(result.cost)],
        cost_notes=result.cost.notes,
        trace_notes=result.trace.notes,
        method={
            "interval": METHOD,
            "sections": SECTIONS,
            "percentile": PERCENTILE_METHOD,
            "looks": _looks(result),
        },
        repeat=_repeat(result),
    )


def _scope(result: ExperimentResult) -> str:
    trace = result.trace
    seeds = "one seed" if len(result.seeds) == 1 else f"{len(result.seeds)} seeds"
    return (
        f"{len(result.arms)} arms in {_count(len(result.conditions), 'condition')}, {seeds}; "
        f"{trace.requests:,} requests with {value('input_tokens', trace.input_tokens)} prompt tokens from "
        f"{trace.name}, {trace.loop} loop. Same workload, same seeds in every arm."
    )


def _count(number: int, word: str) -> str:
    return f"one {word}" if number == 1 else f"{number} {word}s"


def _looks(result: ExperimentResult) -> str:
    """When claims were looked at, in words; empty if that was once."""
    if len(result.looks) < 2 and all(look.spend == 1 for look in result.looks):
        return ""
    spent = ", ".join(f"{look.seeds} ({look.spend * 100:.3g} %)" for look in result.looks)
    return (
        "Claims were looked at after so many seeds, and each look could use so much of the error rate: "
        f"{spent}. A claim that was decided at one look was not judged again."
    )


def _objectives(result: ExperimentResult) -> list[tuple[str, str]]:
    slo = result.slo
    named = (
        ("TTFT", slo.ttft_s), ("time per output token", slo.tpot_s), ("completion", slo.completion_s),
        ("timeout", slo.timeout_s),
    )  # fmt: skip
    return [(name, f"{limit:g} s") for name, limit in named if limit is not None]


def _trace(trace: Provenance) -> list[tuple[str, str]]:
    ideal = (
        "not known" if trace.ideal_reuse_share is None else f"{trace.ideal_reuse_share * 100:.2f} % of blocks"
    )
    return [
        ("trace", f"{trace.name}; {trace.source}"),
        ("requests", f"{trace.requests:,}, {trace.input_tokens:,} tokens in, {trace.output_tokens:,} out"),
        ("prefixes", f"blocks of {trace.block_size} tokens; an endless cache would reuse {ideal}"),
        ("arrivals", "as recorded (open loop)" if trace.loop == "open"
         else "a session's next request follows the completion of the one before (closed loop)"),
    ]  # fmt: skip


def _cost(cost: CostLabel) -> list[tuple[str, str]]:
    errors = "; ".join(
        f"{regime}: median {median * 100:.1f} %, p95 {p95 * 100:.1f} %"
        for regime, (median, p95) in cost.errors.items()
    )
    return [
        ("cost model", f"{cost.name}: {cost.model} on {cost.hardware}"),
        ("its source", cost.source),
        ("its error, step times", errors or "the source gives none: take times as an order of magnitude"),
    ]


def _repeat(result: ExperimentResult) -> list[tuple[str, Any]]:
    return [
        ("command", result.command),
        ("experiment", result.spec_hash),
        ("hotprefix", result.version),
        ("seeds", ", ".join(map(str, result.seeds))),
    ]
