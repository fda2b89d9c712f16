"""Reading a log. Owns: `read_log`, which gives checked records one by one, part after part.

Rules:
1. Memory is bounded, whatever the log's size.
2. A line that is not a record is an InputError with file, line, field and reason, or is skipped and counted
   if the caller wants that.
3. A part's last line may be torn. That is what a crash leaves, so it is counted and is no error.
4. Time goes backwards only if another run begins, and no request is recorded before it arrived, so no
   duration can be negative.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Union

from pydantic import Field, TypeAdapter, ValidationError

from hotprefix.errors import InputError
from hotprefix.records.parts import AS_TEXT, SUFFIXES, load_arrow, parts_of
from hotprefix.records.route_schema import KINDS
from hotprefix.records.schema import SCHEMA, Opening, Record, RequestInfo

_KIND: Any = Union[KINDS]  # noqa: UP007
_ANY: TypeAdapter[Record] = TypeAdapter(Annotated[_KIND, Field(discriminator="k")])


class BadLine(InputError):
    """A line that is no record."""


@dataclass(slots=True)
class ReadReport:
    """What was read.

    records: how many.
    parts: the names of the files.
    skipped: bad lines left out.
    first_bad: what was wrong with the first of these; None if there was none.
    torn: parts whose last line was cut off.
    """

    records: int = 0
    parts: list[str] = field(default_factory=list)
    skipped: int = 0
    first_bad: str | None = None
    torn: int = 0


def read_log(path: Path, report: ReadReport, *, skip_bad: bool = False) -> Iterator[Record]:
    """All records of all parts of a log, checked, in order. Raises InputError if there is no log or no record
    in it, and BadLine for a line that is no record unless `skip_bad`."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: give a log that ends with {' or '.join(SUFFIXES)}", param="log")
    parts = parts_of(path)
    if not parts:
        raise InputError(f"{path}: there is no such log", param="log")
    order = _Order()
    for part in parts:
        report.parts.append(part.name)
        rows = _parquet(part) if part.suffix == ".parquet" else _lines(part, report)
        for number, raw in rows:
            try:
                record = order.checked(_parse(raw))
            except (ValueError, RecursionError) as error:
                what = f"{part}, line {number}: {_reason(error)}"
                if not skip_bad:
                    raise BadLine(f"{what}; --skip-bad leaves such lines out", param="log") from None
                report.skipped += 1
                report.first_bad = report.first_bad or what
                continue
            report.records += 1
            yield record
    if not report.records:
        raise InputError(f"{path}: {_nothing(report)}", param="log")


def _nothing(report: ReadReport) -> str:
    """What is wrong with a log without any record. It is an error, because figures made of it would look like
    a quiet engine's."""
    if report.skipped:
        return f"no line is a record of an event log; the first: {report.first_bad}"
    return "holds no record" + (", only the beginning of one" if report.torn else "")


class _Order:
    """Checks that a header comes first and that time does not go back within a run."""

    def __init__(self) -> None:
        self._run: str | None = None
        self._t = 0.0

    def checked(self, record: Record) -> Record:
        if isinstance(record, Opening) and record.run != self._run:
            self._run, self._t = record.run, record.t
        if self._run is None:
            raise ValueError("k: the log's first record is no header")
        if isinstance(record, Opening):
            return record
        if record.t < self._t:
            raise ValueError(f"t: time goes back from {self._t} to {record.t}")
        if isinstance(record, RequestInfo) and record.arrived > record.t:
            raise ValueError(f"arrived: {record.arrived} is later than the record itself, {record.t}")
        self._t = record.t
        return record


def _parse(raw: bytes | dict[str, Any]) -> Record:
    if isinstance(raw, dict):
        return _ANY.validate_python(raw)
    return _ANY.validate_json(raw, strict=True)


def _reason(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"][1:]) or "the line"
    if first["type"] == "union_tag_not_found":
        return "k: missing, so this is no record of an event log"
    if where == "schema" and first["type"] == "literal_error":
        return (
            f"schema: the log has version {first['input']}; this hotprefix reads {SCHEMA}: read it with the "
            "version that wrote it (the header's `hotprefix`)"
        )
    return f"{where}: {first['msg']}"


def _lines(path: Path, report: ReadReport) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    report.torn += 1
                    return
                yield number, line
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}", param="log") from error


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row number and record, in row groups."""
    pyarrow = load_arrow()
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _row(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: {error}", param="log") from error


def _row(row: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in row.items() if value is not None}
    if "prefixes" in found:
        found["pages"] = found.pop("prefixes")
    for name in AS_TEXT & found.keys():
        found[name] = json.loads(found[name])
    return found
