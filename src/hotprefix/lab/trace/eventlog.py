"""Our own event log as a trace. Owns: the importer over `hotprefix.records`.

Rules: a request's blocks are its page fingerprints, numbered. Its arrival is the time of its enqueue; if a
log has several runs, in wall time. A request's outputs are known only at its end, so requests wait here until
all that arrived before them have ended. A rejected request has no fingerprints and is not in the trace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from hotprefix.lab.trace.fields import Names, check_blocks
from hotprefix.lab.trace.problems import BadTrace, Report
from hotprefix.lab.trace.record import TraceRequest
from hotprefix.records.reader import ReadReport, read_log
from hotprefix.records.schema import End, Header, RequestInfo

NOTES: Final = (
    "blocks: fingerprints of the prompt's complete pages, numbered; the namespace is part of them",
    "answers: their blocks are not recorded, so nothing of an answer is reused",
    "rejected requests are left out; those that had not ended have output_length 0",
    "no sessions: arrivals are fixed (open loop)",
)


def log_page_size(path: Path) -> int:
    """The page size in tokens, from the log's header. Raises InputError."""
    for record in read_log(path, ReadReport()):
        if isinstance(record, Header):
            return record.page_size
    raise BadTrace(f"{path}: empty", param="trace")


def read_events(path: Path, report: Report) -> Iterator[TraceRequest]:
    """The log's requests in the order of their enqueues. Raises InputError for a bad log."""
    read, live, names = ReadReport(), _Live(), Names()
    header: Header | None = None
    runs = 0
    for record in read_log(path, read, skip_bad=report.skip_bad):
        report.skipped, report.first_bad = read.skipped, read.first_bad
        if isinstance(record, Header):
            if header is None or record.run != header.run:
                yield from live.all()
                runs += 1
            header = record
        elif isinstance(record, RequestInfo):
            assert header is not None, "the log's reader demands a header first"
            try:
                count = len(record.pages)
                check_blocks("pages", count, record.prompt_tokens, header.page_size, partial=False)
            except ValueError as error:
                raise BadTrace(f"{path}, request {record.request}: {error}", param="trace") from None
            live.add(
                TraceRequest(
                    id=record.request if runs == 1 else f"{header.run[:8]}/{record.request}",
                    input_length=record.prompt_tokens,
                    output_length=0,
                    blocks=names.of(record.pages),
                    arrival_s=record.t - header.t + header.wall,
                    priority=record.priority,
                ),
                record.request,
            )
        elif isinstance(record, End):
            yield from live.end(record.request, record.outputs)
    yield from live.all()


class _Live:
    """Requests that have not ended, and those that ended while an earlier one had not."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[TraceRequest, bool]] = OrderedDict()

    def add(self, request: TraceRequest, name: str) -> None:
        self._held[name] = (request, False)

    def end(self, name: str, outputs: int) -> Iterator[TraceRequest]:
        """Request `name` ended; returns the requests that need to wait no longer. A name that is unknown, of
        a request from before the log, is ignored."""
        if name in self._held:
            self._held[name] = (replace(self._held[name][0], output_length=outputs), True)
        while self._held and next(iter(self._held.values()))[1]:
            yield self._held.popitem(last=False)[1][0]

    def all(self) -> Iterator[TraceRequest]:
        while self._held:
            yield self._held.popitem(last=False)[1][0]
