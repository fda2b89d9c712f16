"""Reading our own format. Owns: its importer.

Rules: a request's id must be new, its parent must come before it in the same session, and its lengths and
blocks must agree. The reader holds every request id, for this check, and the block lists that `base` may
name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hotprefix.lab.trace.canonical import HEADER, LINE, Header, Line, Recent, from_runs
from hotprefix.lab.trace.line_fields import check_blocks
from hotprefix.lab.trace.lines import lines
from hotprefix.lab.trace.problems import BadTrace, bad_beginning
from hotprefix.lab.trace.timestamps import UNIX_SECONDS
from hotprefix.lab.trace.trace_request import Blocks, TraceRequest


def read_header(path: Path) -> Header:
    """A file's first line. Raises BadTrace."""
    for number, raw in lines(path):
        try:
            return HEADER.validate_json(raw)
        except ValueError as error:
            raise bad_beginning(path, number, error) from None
    raise BadTrace(f"{path}: empty", param="trace")


class Canonical:
    """Importer for one reading. header: what `read_header` returned."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._begun = False
        self._ids: dict[str, str | None] = {}
        self._recent = Recent()

    def take(self, line: int, raw: bytes) -> Sequence[TraceRequest]:
        if not self._begun:
            self._begun = True
            return ()
        row = LINE.validate_json(raw)
        self._check(row)
        request = TraceRequest(
            id=row.id,
            input_length=row.input_length,
            output_length=row.output_length,
            blocks=self._prompt(row),
            arrival_s=row.arrival_s,
            session=row.session,
            parent=row.parent,
            think_s=row.think_s,
            output_blocks=self._answer(row),
            namespace=row.namespace,
            priority=row.priority,
            hold_s=row.hold_s,
            kind=row.kind,
            tools=row.tools,
        )
        self._ids[row.id] = row.session
        self._recent.add(request, self._header.block_size)
        return (request,)

    def _check(self, row: Line) -> None:
        if row.id in self._ids:
            raise ValueError(f"id: {row.id!r} stands twice")
        if row.parent is not None and (row.session is None or self._ids.get(row.parent) != row.session):
            raise ValueError(f"parent: {row.parent!r} is no earlier request of session {row.session!r}")
        if row.parent is None and row.arrival_s is None:
            raise ValueError("arrival_s: missing, and there is no parent to wait for")
        if (row.parent is None) != (row.think_s is None):
            raise ValueError("think_s: belongs to a request with a parent, and only there")
        if row.arrival_s is not None and row.arrival_s >= UNIX_SECONDS.start:
            raise ValueError(f"arrival_s: {row.arrival_s} looks like Unix time; count from the trace's start")
        if row.session is not None and not self._header.has_sessions:
            raise ValueError("session: given, but the header says has_sessions: false")

    def _prompt(self, row: Line) -> Blocks:
        if not self._header.has_prefixes:
            if row.blocks or row.base is not None or row.output_blocks is not None:
                raise ValueError("blocks: given, but the header says has_prefixes: false")
            return np.empty(0, np.int32)
        kept = self._kept(row)
        most = -(-row.input_length // self._header.block_size)
        fresh = from_runs(row.blocks, "blocks", most)
        check_blocks("blocks", len(kept) + len(fresh), row.input_length, self._header.block_size)
        return np.concatenate((kept, fresh))

    def _kept(self, row: Line) -> Blocks:
        if row.base is None:
            if row.keep:
                raise ValueError(f"keep: {row.keep} blocks, but there is no base")
            return np.empty(0, np.int32)
        held = self._recent.of(row.session).get(row.base)
        if held is None:
            raise ValueError(f"base: {row.base!r} is not among its session's latest requests")
        if row.keep > len(held):
            raise ValueError(f"keep: {row.keep} blocks of a context that has {len(held)}")
        return held[: row.keep]

    def _answer(self, row: Line) -> Blocks | None:
        if row.output_blocks is None:
            return None
        size = self._header.block_size
        most = -(-(row.input_length + row.output_length) // size) - row.input_length // size
        return from_runs(row.output_blocks, "output_blocks", most)
