"""All files of a replay, for people and programs. Owns: what lies in an output folder.

Rules: a file is complete or absent (it is written under another name and then renamed). report.html is
written last, so when it is there, the rest is there.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from hotprefix.lab.experiment.finished_runs import write_whole
from hotprefix.lab.experiment.result import ExperimentResult
from hotprefix.report.replay.page import render
from hotprefix.report.replay.replay_summary import summary, tables
from hotprefix.report.replay.terminal import show


def write(result: ExperimentResult, out: Path, console: Console) -> None:
    """Write OUT/summary.json, OUT/report.html, and OUT/NAME.csv and .parquet of each table; print a summary
    on the console."""
    out.mkdir(parents=True, exist_ok=True)
    for name, table in tables(result).items():
        write_whole(out / f"{name}.csv", table.write_csv().encode())
        held = io.BytesIO()
        table.write_parquet(held)
        write_whole(out / f"{name}.parquet", held.getvalue())
    text = json.dumps(summary(result), indent=1, allow_nan=False, ensure_ascii=False)
    write_whole(out / "summary.json", f"{text}\n".encode())
    write_whole(out / "report.html", render(result).encode())
    show(result, console)
    console.print(f"report: {out / 'report.html'}", markup=False, highlight=False)
