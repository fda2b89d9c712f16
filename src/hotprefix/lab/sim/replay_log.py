"""The event log of a replay. Owns: `ReplayLog`: one JSON line an event, in the order in which they happened.

Rules:
1. The lines are the records of `hotprefix.records`, with the instance's number.
2. Nothing in them differs between two runs of one seed (no wall time, no process).
3. The file is written beside its place and moved there when the replay has ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from hotprefix.errors import InputError
from hotprefix.kernel.events import Event
from hotprefix.records.of_event import of_event


class ReplayLog:
    """A context manager; `put` takes events. Raises InputError if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._part.open("w", encoding="utf-8")
        except OSError as error:
            raise InputError(f"{path}: cannot write the log: {error.strerror}", param="log") from error

    def put(self, instance: int, event: Event) -> None:
        """Write one event of an instance."""
        record = {"i": instance} | dataclasses.asdict(of_event(event))
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if error is None:
            self._part.replace(self._path)
        else:
            self._part.unlink(missing_ok=True)
