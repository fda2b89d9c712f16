"""Rows on their way to a table. Owns: `TableRows`.

Rules: rows come as dicts and are kept as columns as soon as CHUNK of them are there, so that a long replay's
tables take a tenth of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import polars as pl

CHUNK: Final = 4096


class TableRows:
    """The rows of one table. columns: their names and types."""

    def __init__(self, columns: Mapping[str, pl.DataType | type[pl.DataType]]) -> None:
        self._columns = dict(columns)
        self._rows: list[dict[str, Any]] = []
        self._frames = [pl.DataFrame(schema=self._columns)]

    def add(self, row: dict[str, Any]) -> None:
        """Add a row that will not change any more."""
        self._rows.append(row)
        if len(self._rows) >= CHUNK:
            self._keep()

    def frame(self) -> pl.DataFrame:
        """The table, in the order in which rows were added."""
        self._keep()
        return pl.concat(self._frames)

    def _keep(self) -> None:
        self._frames.append(pl.DataFrame(self._rows, schema=self._columns))
        self._rows = []
