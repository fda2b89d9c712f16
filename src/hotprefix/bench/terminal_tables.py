"""The bench in a terminal. Owns: two tables for each workload, counts and times, worded as in the report.

Rules: 80 columns are enough. A group's name stands on a line of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotprefix.bench.bench_summary import ArmResult, WorkloadResult
from hotprefix.bench.figure_cells import Cell, change, factor, spread
from hotprefix.report.figure_text import seconds, whole

STYLES = {"good": "green", "bad": "red", "": ""}
_COUNT_HEADS = ("per follower", "restored", "computed", "required", "factor")
_TIME_HEADS = ("mean TTFT", "change", "max TTFT", "slowest", "change")


def print_workload(console: Console, result: WorkloadResult) -> None:
    """Token counts (duplication factor last), then times."""
    console.print(Text(f"\n{result.title}", style="bold"))
    console.print(f"{result.about} Baseline: {result.baseline}.", highlight=False)
    console.print(_table("tokens", _COUNT_HEADS, result, _counts))
    console.print(_table("times", _TIME_HEADS, result, _times))


def _table(
    title: str,
    heads: Sequence[str],
    result: WorkloadResult,
    cells: Callable[[ArmResult, ArmResult], tuple[Cell, ...]],
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(title, no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right")
    for group in result.groups:
        base = next(a for a in group.arms if a.arm == result.baseline)
        table.add_row(Text(group.group, style="bold"))
        for arm in group.arms:
            row = [Text(c.text, style=STYLES[c.tone]) for c in cells(arm, base)]
            table.add_row(f" {arm.arm}", *row)
    return table


def _counts(arm: ArmResult, _base: ArmResult) -> tuple[Cell, ...]:
    c = arm.counts
    texts = (
        whole(c.restored_per_follower), whole(c.restored_tokens[0]), whole(c.computed_tokens[0]),
        whole(c.required_tokens), factor(c.duplication_factor),
    )  # fmt: skip
    return tuple(Cell(t) for t in texts)


def _times(arm: ArmResult, base: ArmResult) -> tuple[Cell, ...]:
    t, b = arm.timings, base.timings
    return (
        Cell(spread(t.mean_ttft_s)), change(t.mean_ttft_s, b.mean_ttft_s), Cell(seconds(t.max_ttft_s.mean)),
        Cell(spread(t.slowest_completion_s)), change(t.slowest_completion_s, b.slowest_completion_s),
    )  # fmt: skip
