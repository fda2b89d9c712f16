"""The requests of a log as a table. Owns: `RowFile`, a CSV or Parquet file with a row for each request.

Rules: a row is written when its request has ended, so memory does not grow with the log; a Parquet file is
made from the finished CSV. What was not measured is empty (null). A file that exists is replaced only by a
complete one. The columns are the fields of `RequestRow`, in seconds and tokens, and its sums.
"""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from hotprefix.errors import InputError
from hotprefix.records.request_row import RequestRow

SUMS: Final = ("cached", "reached", "lost")
COLUMNS: Final = (*(f.name for f in dataclasses.fields(RequestRow)), *SUMS)
SUFFIXES: Final = (".csv", ".parquet")


class RowFile:
    """Rows of one log. Raises InputError if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        if path.suffix not in SUFFIXES:
            raise InputError(
                f"--rows {path}: give a name that ends with {' or '.join(SUFFIXES)}", param="rows"
            )
        self._path = path
        self._partial = path.with_name(f".{path.name}.partial")

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("w", encoding="utf-8", newline="")
        except OSError as error:
            raise self._refused(error) from error
        self._writer = csv.writer(self._file)
        self._writer.writerow(COLUMNS)
        return self

    def write(self, row: RequestRow) -> None:
        self._writer.writerow([getattr(row, name) for name in COLUMNS])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        try:
            if error is None:
                if self._path.suffix == ".parquet":
                    _to_parquet(self._partial, self._path)
                else:
                    self._partial.replace(self._path)
        except OSError as refused:
            raise self._refused(refused) from refused
        finally:
            self._partial.unlink(missing_ok=True)

    def _refused(self, error: OSError) -> InputError:
        return InputError(
            f"--rows {self._path}: {error.strerror or error}; give a file that can be written", param="rows"
        )


def _to_parquet(source: Path, path: Path) -> None:
    import polars as pl

    types = {"str": pl.String, "int": pl.Int64, "float": pl.Float64, "bool": pl.Boolean}
    schema = {f.name: types[str(f.type).removesuffix(" | None")] for f in dataclasses.fields(RequestRow)}
    schema |= dict.fromkeys(SUMS, pl.Int64)
    whole = path.with_name(f".{path.name}.whole")
    try:
        pl.scan_csv(source, schema=schema).sink_parquet(whole)
        whole.replace(path)
    finally:
        whole.unlink(missing_ok=True)
