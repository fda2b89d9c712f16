"""`inspect --rows` and its buckets, against what a replay's functions make of the same requests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import polars as pl
import pytest

from hotprefix.definitions import EDGES, Slo
from hotprefix.errors import InputError
from hotprefix.lab.buckets import buckets
from hotprefix.lab.paired_sections import Run
from hotprefix.lab.sim.rows import LINK_COLUMNS, REQUEST_COLUMNS, WINDOW_COLUMNS
from hotprefix.records.log_summary import summarize
from hotprefix.records.recorder import Recorder, RecordOptions
from hotprefix.records.request_row import RequestRow
from hotprefix.report.inspect import inspect_log
from tests.support.observed import program, run

KEY = b"0123456789abcdef0123456789abcdef"


def log(path: Path, seed: int = 3) -> list[RequestRow]:
    recorder = Recorder(RecordOptions(KEY, path))
    run(program(seed, 250), recorder)
    recorder.close()
    rows: list[RequestRow] = []
    summarize(path, on_row=rows.append)
    return rows


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_row_for_each_request(tmp_path: Path, suffix: str) -> None:
    rows = log(tmp_path / "log.jsonl")
    out = tmp_path / "deep" / f"rows{suffix}"
    inspect_log(tmp_path / "log.jsonl", None, rows=out)
    table = pl.read_csv(out, infer_schema_length=None) if suffix == ".csv" else pl.read_parquet(out)
    assert len(table) == len(rows) > 50
    for found, row in zip(table.iter_rows(named=True), rows, strict=True):
        for name, value in dataclasses.asdict(row).items():
            assert found[name] == value, name
        assert (found["cached"], found["lost"], found["reached"]) == (row.cached, row.lost, row.reached)
    assert {p.name for p in out.parent.iterdir()} == {out.name}, "nothing else is left behind"
    if suffix == ".parquet":
        assert table.schema["hot"] == pl.Boolean
        assert table.schema["ttft_s"] == pl.Float64
        assert table.schema["request"] == pl.String


def test_buckets_are_those_of_a_replay(tmp_path: Path) -> None:
    """The lab's own function sorts the same requests, given as a replay's table."""
    rows = log(tmp_path / "log.jsonl", seed=5)
    empty = dict.fromkeys(REQUEST_COLUMNS)
    table = pl.DataFrame(
        [
            empty
            | {"id": r.request, "instance": 0, "outcome": "finished", "input_tokens": r.prompt_tokens,
               "output_tokens": r.outputs, "ideal_tokens": 0, "heat": r.heat, "queue_depth": r.queue_depth,
               "arrival_s": 0.0, "matched_at_enqueue": r.matched_at_enqueue,
               "matched_at_admission": r.matched_at_admission}
            for r in rows
        ],
        schema=REQUEST_COLUMNS,
    )  # fmt: skip
    windows, links = pl.DataFrame(schema=WINDOW_COLUMNS), pl.DataFrame(schema=LINK_COLUMNS)
    wanted = buckets(Run(0, table, windows, links, page_tokens=4, end_s=1.0), Slo())
    found = inspect_log(tmp_path / "log.jsonl", None)["buckets"]
    for by in EDGES:
        part = wanted.filter(pl.col("by") == by).sort("order")
        assert {name: g["requests"] for name, g in found[by].items()} == dict(
            zip(part["bucket"], part["requests"], strict=True)
        )
        assert list(found[by]) == list(part["bucket"])
    assert len(found["heat"]) > 2
    assert len(found["queue depth"]) > 2


def test_a_place_where_no_rows_can_be_is_refused_and_an_old_file_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log(path)
    for rows, words in (
        (tmp_path / "rows.txt", "ends with .csv or .parquet"),
        (path / "rows.csv", "File exists|Not a"),
    ):
        with pytest.raises(InputError, match=words):
            inspect_log(path, None, rows=rows)
    old = tmp_path / "rows.csv"
    old.write_text("old")
    with path.open("ab") as file:
        file.write(b"no record\n" * 2)
    with pytest.raises(InputError, match=r"log\.jsonl"):
        inspect_log(path, None, rows=old)
    assert old.read_text() == "old"
    assert {p.name for p in tmp_path.iterdir()} == {"log.jsonl", "rows.csv"}
