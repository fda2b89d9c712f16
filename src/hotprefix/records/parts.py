"""The files a log consists of. Owns: their names, and writing one as JSON lines or as Parquet.

Rules:
1. Part 0 is the path itself; part 7 of `log.jsonl` is `log.00007.jsonl`.
2. JSON lines are flushed with every batch, so what a crash leaves is readable but for its last line.
3. A Parquet file is readable only when complete, so it is written under a name of its own and renamed when it
   is closed.
4. Both hold the same records. Parquet has a column for each field of any kind of record, empty if the
   record's kind lacks it. The header is in the file's metadata as well as in its first row. A prompt's
   `pages` stand in the column `prefixes`, because other kinds have numbers in `pages`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hotprefix.errors import ConfigError
from hotprefix.records.route_schema import KINDS
from hotprefix.records.schema import Opening, Record, values

SUFFIXES = (".jsonl", ".parquet")
GROUP = 16384
AS_TEXT = frozenset({"config", "taken", "failures", "runners_up"})  # nested: JSON in a column of its own


class Part(Protocol):
    """One file of a log. bytes: how many were written so far, exact enough to decide when to begin another
    part."""

    @property
    def bytes(self) -> int: ...
    def write(self, records: Sequence[Record]) -> None: ...
    def close(self) -> None: ...


def part_path(path: Path, number: int) -> Path:
    return path if number == 0 else path.with_name(f"{path.stem}.{number:05d}{path.suffix}")


def parts_of(path: Path) -> list[Path]:
    """The parts that exist, in order."""
    pattern = re.compile(rf"{re.escape(path.stem)}\.(\d{{5,}}){re.escape(path.suffix)}")
    later = [(int(m[1]), p) for p in path.parent.glob("*") if (m := pattern.fullmatch(p.name))]
    return ([path] if path.exists() else []) + [p for _, p in sorted(later)]


def next_number(path: Path) -> int:
    """The number of the first part that does not exist. Raises ConfigError if the name has another ending
    than SUFFIXES."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"events={str(path)!r}: give a name that ends with {' or '.join(SUFFIXES)}", param="events"
        )
    existing = parts_of(path)
    if not existing:
        return 0
    last = existing[-1]
    return 1 if last == path else int(last.stem.rpartition(".")[2]) + 1


def check_place(path: Path) -> None:
    """Make the log's folder. Raises ConfigError if no log can be written: the name ends otherwise, the folder
    cannot be written, or what Parquet needs is not installed."""
    try:
        next_number(path)
        if path.suffix == ".parquet":
            load_arrow()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"events={str(path)!r}: cannot write there: {error.strerror}; give a file in a folder that can "
            "be written",
            param="events",
        ) from error


def open_part(path: Path, header: Opening) -> Part:
    """Begin a part with its header. Raises ConfigError if the file cannot be made, or if what Parquet needs
    is not installed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _Parquet(path, header) if path.suffix == ".parquet" else _Lines(path, header)
    except OSError as error:
        raise ConfigError(f"events file {path}: {error}", param="events") from error


class _Lines:
    def __init__(self, path: Path, header: Opening) -> None:
        self._file = path.open("xb")
        self.bytes = 0
        self.write([header])

    def write(self, records: Sequence[Record]) -> None:
        lines = "".join(json.dumps(values(r), separators=(",", ":")) + "\n" for r in records)
        raw = lines.encode()
        self._file.write(raw)
        self._file.flush()
        self.bytes += len(raw)

    def close(self) -> None:
        self._file.close()


class _Parquet:
    def __init__(self, path: Path, header: Opening) -> None:
        self._path, self._arrow = path, load_arrow()
        self._temporary = path.with_name(f".{path.name}.partial")
        about = {"hotprefix.header": json.dumps(values(header))}
        self._schema = arrow_schema(self._arrow).with_metadata(about)
        self._writer = self._arrow.parquet.ParquetWriter(self._temporary, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self.bytes = 0
        self.write([header])

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            row = values(record)
            for name in AS_TEXT & row.keys():
                row[name] = json.dumps(row[name])
            if "pages" in row and isinstance(row["pages"], list):
                row["prefixes"] = row.pop("pages")
            self._rows.append(row)
        if len(self._rows) >= GROUP:
            self._group()

    def _group(self) -> None:
        table = self._arrow.Table.from_pylist(self._rows, schema=self._schema)
        self._rows = []
        self._writer.write_table(table)
        self.bytes = self._temporary.stat().st_size

    def close(self) -> None:
        if self._rows:
            self._group()
        self._writer.close()
        self._temporary.rename(self._path)


def load_arrow() -> Any:
    """pyarrow with its Parquet part. Raises ConfigError if it is not installed."""
    try:
        importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError("a Parquet log needs pyarrow: pip install 'hotprefix[records]'") from error
    return importlib.import_module("pyarrow")


def arrow_schema(pyarrow: Any) -> Any:
    """A column for each field of any kind of record."""
    types = {
        "bool": pyarrow.bool_(), "float": pyarrow.float64(), "int": pyarrow.int64(),
        "list[int]": pyarrow.list_(pyarrow.int64()), "list[str]": pyarrow.list_(pyarrow.string()),
    }  # fmt: skip
    columns: dict[str, Any] = {"k": pyarrow.string(), "t": pyarrow.float64()}
    for kind in KINDS:
        for name, annotation in ((f.name, str(f.type)) for f in dataclasses.fields(kind)):
            if name == "pages" and annotation == "list[str]":
                columns["prefixes"] = types[annotation]
            elif name == "schema":
                columns[name] = pyarrow.int64()
            else:
                columns.setdefault(name, types.get(annotation.removesuffix(" | None"), pyarrow.string()))
    return pyarrow.schema(list(columns.items()))
