"""How the fleet bench's figures are written, in a terminal and on a page. Owns: the columns and their cells.

Rules: counts and times never share a table. A figure that was not measured is a dash. If all runs gave one
figure, it stands once; otherwise the figures of all runs. A ratio has a tone only if it is on one side of 1
in every run, and there is more than one run.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotprefix.bench.figure_cells import Cell, factor
from hotprefix.bench.fleet_summary import FleetArm, Timed
from hotprefix.report.figure_text import DASH, seconds, whole

COUNT_HEADS = (
    "policy", "computed", "required", "factor", "reused", "copied", "by worker", "retries", "migrations",
    "lost",
)  # fmt: skip
TIME_HEADS = (
    "policy", "mean TTFT", "ratio", "p95 TTFT", "ratio", "slowest", "ratio", "makespan",
)  # fmt: skip


def count_cells(arm: FleetArm) -> tuple[Cell, ...]:
    """Cells under COUNT_HEADS."""
    texts = (
        arm.policy, _runs([whole(v) for v in arm.computed_tokens]),
        _runs([whole(v) for v in arm.required_tokens]), _runs([factor(v) for v in arm.duplication]),
        _runs([whole(v) for v in arm.reused_tokens]), _runs([whole(v) for v in arm.copied_tokens]),
        _runs(["/".join(map(str, v)) for v in arm.by_worker]), _runs([str(v) for v in arm.retries]),
        DASH if arm.migrations is None else _runs([str(v) for v in arm.migrations]),
        _runs([str(v) for v in arm.lost]),
    )  # fmt: skip
    return tuple(map(Cell, texts))


def time_cells(arm: FleetArm) -> tuple[Cell, ...]:
    """Cells under TIME_HEADS."""
    told = (arm.mean_ttft_s, arm.p95_ttft_s, arm.slowest_s)
    pairs = (cell for each in told for cell in (Cell(took(each)), ratio(each)))
    return (Cell(arm.policy), *pairs, Cell(took(arm.makespan_s)))


def took(timed: Timed) -> str:
    """The mean of the runs."""
    return DASH if timed.mean is None else seconds(timed.mean)


def ratio(timed: Timed) -> Cell:
    """The median of the ratios, and how far they reach."""
    known = [each for each in timed.ratios if each is not None]
    if timed.ratio is None or all(each == 1 for each in known):
        return Cell(DASH)
    if len(known) == 1:
        return Cell(f"{timed.ratio:.2f}")
    low, high = min(known), max(known)
    return Cell(
        f"{timed.ratio:.2f} [{low:.2f}..{high:.2f}]", "good" if high < 1 else "bad" if low > 1 else ""
    )


def _runs(texts: Sequence[str]) -> str:
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)
