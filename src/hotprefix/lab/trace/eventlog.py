"""Our own event log as a trace. Owns: the importer over `hotprefix.records`.

Rules: a request's blocks are its page fingerprints, numbered, and the pages that its answer completed; its
arrival is when the client's request reached the server, in wall time where a log has several runs. What was
generated is known at the end only, so requests wait here for the oldest that still runs. A request follows
the one before it in its session if that had ended by then. Refused requests are part of the load. A complete
log is checked against itself: what its requests reused of L1 and L2 an endless cache would have, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from hotprefix.lab.trace.ideal import EndlessCache
from hotprefix.lab.trace.line_fields import Names, check_blocks
from hotprefix.lab.trace.problems import BadTrace, Report
from hotprefix.lab.trace.trace_request import TraceRequest
from hotprefix.records.read_log import ReadReport, read_log
from hotprefix.records.route_schema import RouterHeader
from hotprefix.records.schema import Dropped, End, Header, Prefill, Record, Reject, RequestInfo

NOTES: Final = (
    "blocks: fingerprints of complete pages of prompts and answers, numbered; the namespace is part of them",
    "arrivals: when the client's request reached the server",
    "sessions: as the client named them; a request follows the one before it, if that had ended by then",
    "refused requests: with the outputs asked for where they were too long for the engine, else with none",
    "requests that had not ended have output_length 0 and no answer",
)
LOOK: Final = 2000  # records in which a session is looked for


@dataclass(frozen=True, slots=True)
class Beginning:
    """page_size: tokens. has_sessions: one of the first requests names a session."""

    page_size: int
    has_sessions: bool


def read_beginning(path: Path) -> Beginning:
    """What is known of a log before it is read. Raises InputError."""
    page_size = None
    for number, record in enumerate(read_log(path, ReadReport())):
        if isinstance(record, RouterHeader):
            raise BadTrace(f"{path}: a router's log, which names no pages: give the log of an engine",
                           param="trace")  # fmt: skip
        if isinstance(record, Header) and page_size is None:
            page_size = record.page_size
        if page_size is not None and isinstance(record, RequestInfo) and record.session is not None:
            return Beginning(page_size, True)
        if number == LOOK:
            break
    if page_size is None:
        raise BadTrace(f"{path}: empty", param="trace")
    return Beginning(page_size, False)


def read_events(path: Path, report: Report, *, sessions: bool) -> Iterator[TraceRequest]:
    """Requests in order of their enqueue. sessions: give those without a session one of their own. Raises
    InputError (a bad log)."""
    read, log = ReadReport(), _Log(path, sessions)
    for record in read_log(path, read, skip_bad=report.skip_bad):
        report.skipped, report.first_bad = read.skipped, read.first_bad
        yield from log.take(record)
    yield from log.close(complete=not (read.skipped or read.torn))


@dataclass(slots=True)
class _OpenRequest:
    """A request that still runs, or that has ended behind one that does."""

    request: TraceRequest
    ended: bool = False


@dataclass(slots=True)
class _Turn:
    """A session's latest request. ended: in wall time; None while it runs."""

    id: str
    ended: float | None = None


class _Log:
    """One pass over a log."""

    def __init__(self, path: Path, sessions: bool) -> None:
        self._path, self._with_sessions = path, sessions
        self._names = Names()
        self._live: OrderedDict[str, _OpenRequest] = OrderedDict()
        self._turns: dict[str, _Turn] = {}
        self._header: Header | None = None
        self._runs = 0
        self._endless: EndlessCache | None = None
        self._ideal = self._reused = 0
        self._complete = True

    def take(self, record: Record) -> Iterator[TraceRequest]:
        """What is known for good with this record."""
        if isinstance(record, Header):
            yield from self._part(record)
        elif isinstance(record, RequestInfo):
            self._asked(record)
        elif isinstance(record, Prefill):
            self._reused += record.device + record.host
        elif isinstance(record, Reject):
            self._end(record.request, record.t, 0 if record.error == "QueueFull" else None, ())
        elif isinstance(record, End):
            self._end(record.request, record.t, record.outputs, record.answer or ())
        elif isinstance(record, Dropped):
            self._complete = False
        while self._live and next(iter(self._live.values())).ended:
            yield self._give()

    def close(self, *, complete: bool) -> Iterator[TraceRequest]:
        """The rest. Raises BadTrace where a log that lacks nothing contradicts itself."""
        complete = complete and self._complete and not self._live
        while self._live:
            yield self._give()
        if complete and self._endless is not None and self._reused > self._ideal + self._endless.late:
            raise BadTrace(
                f"{self._path}: its requests reused {self._reused} tokens of L1 and L2, of which an endless "
                f"cache would have had {self._ideal}: prompts or answers are missing in it",
                param="trace",
            )

    def _part(self, header: Header) -> Iterator[TraceRequest]:
        if self._header is None or header.run != self._header.run:
            self._complete &= not self._live
            while self._live:
                yield self._give()
            self._runs += 1
            for turn in self._turns.values():  # with its engine, whatever still ran has ended
                turn.ended = self._wall(header, header.t) if turn.ended is None else turn.ended
        self._header = header
        if self._endless is None:
            self._endless = EndlessCache(header.page_size)

    def _wall(self, header: Header, t: float) -> float:
        return t - header.t + header.wall

    def _asked(self, r: RequestInfo) -> None:
        header = self._header
        assert header is not None, "the log's reader demands a header first"
        try:
            check_blocks("pages", len(r.pages), r.prompt_tokens, header.page_size, partial=False)
        except ValueError as error:
            raise BadTrace(f"{self._path}, request {r.request}: {error}", param="trace") from None
        name = r.request if self._runs == 1 else f"{header.run[:8]}/{r.request}"
        request = TraceRequest(
            id=name,
            input_length=r.prompt_tokens,
            output_length=r.max_tokens,
            blocks=self._names.of(r.pages),
            arrival_s=self._wall(header, r.arrived),
            priority=r.priority,
            hold_s=r.hold_s or 0.0,
        )
        self._live[r.request] = _OpenRequest(self._in_session(request, r.session))

    def _in_session(self, request: TraceRequest, session: str | None) -> TraceRequest:
        if session is None:
            return replace(request, session=request.id) if self._with_sessions else request
        before, self._turns[session] = self._turns.get(session), _Turn(request.id)
        arrival = request.arrival_s
        assert arrival is not None
        if before is None or before.ended is None or before.ended > arrival:
            return replace(request, session=session)
        return replace(request, session=session, parent=before.id, think_s=arrival - before.ended)

    def _end(self, name: str, t: float, outputs: int | None, answer: tuple[str, ...] | list[str]) -> None:
        """It ended. outputs: None = what was asked for. A request from before the log is unknown."""
        live = self._live.get(name)
        if live is None:
            return
        assert self._header is not None
        request = live.request
        turn = self._turns.get(request.session or "")
        if turn is not None and turn.id == request.id:
            turn.ended = self._wall(self._header, t)
        if outputs is not None:
            request = replace(request, output_length=outputs)
        if answer:
            added = self._names.of(answer)
            if request.input_length % self._header.page_size:  # the prompt's last page grew into the first
                request = replace(request, blocks=np.append(request.blocks, added[:1]))
            request = replace(request, output_blocks=added)
        live.request, live.ended = request, True

    def _give(self) -> TraceRequest:
        live = self._live.popitem(last=False)[1]
        request = live.request if live.ended else replace(live.request, output_length=0)
        assert self._endless is not None
        self._ideal += self._endless.add(request).tokens
        return request
