"""The bench in a terminal. Owns: one table per workload; same wording as the report."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotprefix.bench.summary import ArmResult, GroupResult, WorkloadResult
from hotprefix.report.text import Cell, change, factor, spread, whole

_STYLES = {"good": "green", "bad": "red", "": ""}


def print_workload(console: Console, result: WorkloadResult) -> None:
    """Counts first (restored: per follower), then times; a rule between groups."""
    table = Table(
        title=result.title,
        caption="restored: prompt tokens per follower; dup.: duplication factor",
        caption_justify="left",
        title_justify="left",
        title_style="bold",
        padding=(0, 1),
    )
    table.add_column("group")
    table.add_column("arm", no_wrap=True)
    for head in (
        "restored", "computed", "dup.", "mean TTFT", "change", "max TTFT", "slowest",
        "change",
    ):  # fmt: skip
        table.add_column(head, justify="right")
    for group in result.groups:
        _add_group(table, group, result.baseline)
    console.print(table)


def _add_group(table: Table, group: GroupResult, baseline: str) -> None:
    base = next(a for a in group.arms if a.arm == baseline)
    for at, arm in enumerate(group.arms):
        last = at == len(group.arms) - 1
        table.add_row(group.group if at == 0 else "", *_cells(arm, base), end_section=last)


def _cells(arm: ArmResult, base: ArmResult) -> list[Text]:
    c, t, b = arm.counts, arm.timings, base.timings
    cells = (
        Cell(arm.arm), Cell(whole(c.restored_per_follower)), Cell(whole(c.computed_tokens[0])),
        Cell(factor(c.duplication_factor)), Cell(spread(t.mean_ttft_s)), change(t.mean_ttft_s, b.mean_ttft_s),
        Cell(spread(t.max_ttft_s)), Cell(spread(t.slowest_completion_s)),
        change(t.slowest_completion_s, b.slowest_completion_s),
    )  # fmt: skip
    return [Text(cell.text, style=_STYLES[cell.tone]) for cell in cells]
