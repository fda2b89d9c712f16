"""The fleet bench in a terminal. Owns: two tables for each workload, counts and times, worded as in the
report.

Rules: 80 columns are enough, so some columns are only on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotprefix.bench.figure_cells import Cell
from hotprefix.bench.fleet_cells import COUNT_HEADS, TIME_HEADS, count_cells, time_cells
from hotprefix.bench.fleet_summary import FleetArm, FleetWorkloadResult
from hotprefix.bench.terminal_tables import STYLES

ONLY_ON_THE_PAGE = ("required", "copied", "makespan")


def print_workload(console: Console, result: FleetWorkloadResult) -> None:
    """Token counts, then times."""
    console.print(Text(f"\n{result.title}", style="bold"))
    console.print(result.about, highlight=False)
    console.print(_table(COUNT_HEADS, result, count_cells))
    console.print(_table(TIME_HEADS, result, time_cells))


def _table(
    heads: Sequence[str], result: FleetWorkloadResult, cells: Callable[[FleetArm], Sequence[Cell]]
) -> Table:
    shown = [at for at, head in enumerate(heads) if head not in ONLY_ON_THE_PAGE]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for at in shown:
        table.add_column(heads[at], justify="right" if at else "left", no_wrap=at == 0)
    for arm in result.arms:
        told = cells(arm)
        table.add_row(*(Text(told[at].text, style=STYLES[told[at].tone]) for at in shown))
    return table
