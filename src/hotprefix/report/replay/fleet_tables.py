"""What a report shows of a fleet's tables. Owns: the queries on the routes and loads of its runs.

Rules: the tables are scanned, never held whole. What comes back is one figure a reason, a sample of at most
POINTS decisions, or a row a window (times LINES instances at most).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import polars as pl

from hotprefix.lab.experiment.result import FleetRun

POINTS: Final = 500
LINES: Final = 8
Line = tuple[list[float], list[float | None]]


def copied_by_reason(runs: Sequence[FleetRun]) -> dict[str, float]:
    """Reason -> tokens computed a further time by a decision, mean over seeds. Every decision counts,
    also one on a request whose instance died."""
    found: dict[str, float] = {}
    for run in runs:
        copied = run.routes.group_by("copying").agg(pl.col("copied_tokens").sum())
        for reason, tokens in copied.filter(pl.col("copying").is_not_null()).collect().iter_rows():
            found[reason] = found.get(reason, 0.0) + tokens / len(runs)
    return dict(sorted(found.items()))


def predictions(run: FleetRun) -> list[tuple[float, float]]:
    """(predicted, actual) seconds from the choice to the first token, of every n-th decision for which both
    are known."""
    both = run.routes.filter(pl.col("first_s") > 0, pl.col("actual_first_s") > 0)
    known = both.select(pl.len()).collect().item()
    step = max(1, -(-known // POINTS))
    return both.select("first_s", "actual_first_s").gather_every(step).collect().rows()


def loads(run: FleetRun) -> tuple[dict[str, Line], bool]:
    """Lines of the largest component of the load by window: one for each instance, or 5th percentile, median
    and highest over instances if there are more than LINES (True)."""
    instances = run.loads.select(pl.col("instance").n_unique()).collect().item()
    if instances > LINES:
        load = pl.col("load")
        rows = (
            run.loads.group_by("start_s")
            .agg(
                load.quantile(0.05, "linear").alias("p5"),
                load.median().alias("median"),
                load.max().alias("highest"),
            )
            .sort("start_s")
            .collect()
        )
        starts = rows["start_s"].to_list()
        return {name: (starts, rows[name].to_list()) for name in ("p5", "median", "highest")}, True
    table = run.loads.select("instance", "start_s", "load").sort("instance", "start_s").collect()
    parts = table.partition_by("instance", maintain_order=True)
    return {
        f"instance {part['instance'][0]}": (part["start_s"].to_list(), part["load"].to_list())
        for part in parts
    }, False
