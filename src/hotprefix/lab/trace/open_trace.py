"""From a path or a name to a trace. Owns: `open_trace`, the list of formats, and recognising them.

Rules: only the beginning of a file is read before the trace is iterated. If the format is not recognised, the
error lists the known formats. A format's parser is imported only if a file has that format, because each run
of a sweep opens its trace again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from hotprefix.errors import ConfigError, InputError
from hotprefix.lab.trace.cc_sessions import Assumed, CodingAgents, SessionStarts, parse_session
from hotprefix.lab.trace.lines import files_of, first_bytes, lines, read_requests
from hotprefix.lab.trace.problems import BadTrace, Report, bad_beginning
from hotprefix.lab.trace.streamed import StreamedTrace
from hotprefix.lab.trace.timestamps import Clock, Unit, from_zero, in_order
from hotprefix.lab.trace.trace_request import Provenance, TraceRequest

SAMPLES: Final = {"sample:agents": "agents.jsonl.gz"}
OPEN_UNITS: Final = ("mooncake", "bailian")  # formats whose timestamps are numbers
_NO_PREFIXES: Final = 1  # block size of a trace without blocks


@dataclass(frozen=True, slots=True)
class _Options:
    block_size: int | None
    time_unit: Unit | None
    sessions: SessionStarts
    assumed: Assumed


@dataclass(frozen=True, slots=True)
class _Format:
    """One format. mark: bytes that its first line contains, and that the first lines of the formats listed
    before it do not. open: opens a file of it."""

    mark: bytes
    open: Callable[[Path, _Options], StreamedTrace]


def open_trace(
    source: str | Path,
    *,
    format: str = "auto",
    block_size: int | None = None,
    time_unit: Unit | None = None,
    skip_bad: bool = False,
    limit: int | None = None,
    sessions: SessionStarts | None = None,
    assumed: Assumed | None = None,
) -> StreamedTrace:
    """A trace by path, or one of SAMPLES by name.

    block_size: tokens. It is needed if the file does not give it (Mooncake's default is 512), and is a check
    if it does.
    time_unit: the unit of timestamps, if the format declares none.
    skip_bad: leave bad lines out instead of raising.
    limit: only so many requests, from the first on.
    sessions, assumed: what coding-agent files do not record.

    Raises InputError if there is no such file, if it is empty, cut off or of no known format, or if an option
    is out of range. Bad lines are found while the trace is iterated.
    """
    if format != "auto" and format not in FORMATS:
        raise InputError(f"format {format!r}: there are auto, {', '.join(FORMATS)}", param="format")
    for name, value in (("limit", limit), ("block_size", block_size)):
        if value is not None and value < 1:
            raise InputError(f"{name}={value}: give 1 or more", param=name)
    path = _path(source)
    options = _Options(block_size, time_unit, sessions or SessionStarts(), assumed or Assumed())
    chosen = _tell(path) if format == "auto" else format
    trace = FORMATS[chosen].open(path, options)
    trace.limit, trace.skip_bad = limit, skip_bad
    if str(source) in SAMPLES:
        trace.name = str(source)
    _check_options(trace, chosen, options)
    return trace


def _check_options(trace: StreamedTrace, format: str, options: _Options) -> None:
    """Raises ConfigError if an option contradicts the file, or has no effect on it."""
    if options.block_size not in (None, trace.block_size):
        held = f"was written with block size {trace.block_size}" if trace.has_prefixes else "holds no blocks"
        raise ConfigError(f"{trace.name} {held}, but {options.block_size} was asked for", param="block_size")
    if options.time_unit is not None and format not in OPEN_UNITS:
        raise ConfigError(
            f"time_unit={options.time_unit}: {trace.name} is of format {format}, which leaves no unit open: "
            "leave it out",
            param="time_unit",
        )

    if options.sessions.rate is not None and format != "agents":
        raise ConfigError(
            f"session_rate={options.sessions.rate:g}: {trace.name} is of format {format}, which says when "
            "requests arrive: leave it out",
            param="session_rate",
        )
    if options.assumed.answers and format != "agents":
        raise ConfigError(
            f"answers: {trace.name} is of format {format}, which leaves nothing to assume: leave it out",
            param="answers",
        )


def _path(source: str | Path) -> Path:
    if str(source) in SAMPLES:
        return Path(str(files("hotprefix.lab.trace") / "samples" / SAMPLES[str(source)]))
    if str(source).startswith("sample:"):
        raise InputError(f"{source}: the samples are {', '.join(SAMPLES)}", param="trace")
    return Path(source)


def _tell(path: Path) -> str:
    """The name of a file's format. Raises BadTrace if it is none of the known ones."""
    first = files_of(path)[0]
    if first_bytes(first, 4) == b"PAR1":
        return "events"
    for _, line in lines(first):
        found = [name for name, form in FORMATS.items() if form.mark in line]
        if not found:
            raise BadTrace(
                f"{path}: the first line is of no known format; say which with --format "
                f"({', '.join(FORMATS)})",
                param="trace",
            )
        return found[0]
    raise BadTrace(f"{path}: empty", param="trace")


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]


def _arrivals(
    path: Path, block_size: int, has_prefixes: bool, has_sessions: bool, provenance: Provenance,
    read: Callable[[Report], Iterator[TraceRequest]],
) -> StreamedTrace:  # fmt: skip
    """A trace of recorded arrivals: they are sorted, and counted from the first one."""

    def sorted_(report: Report) -> Iterator[TraceRequest]:
        return from_zero(in_order(read(report), report))

    return StreamedTrace(_stem(path), block_size, has_prefixes, has_sessions, provenance, sorted_)


def _open_canonical(path: Path, options: _Options) -> StreamedTrace:
    from hotprefix.lab.trace.read import Canonical, read_header

    header = read_header(path)

    def read(report: Report) -> Iterator[TraceRequest]:
        requests = read_requests(path, Canonical(header), report)
        return requests if header.has_sessions else in_order(requests, report)

    provenance = Provenance(header.source, "hotprefix", header.notes)
    return StreamedTrace(
        header.name, header.block_size, header.has_prefixes, header.has_sessions, provenance, read
    )


def _open_mooncake(path: Path, options: _Options) -> StreamedTrace:
    from hotprefix.lab.trace import mooncake

    size = options.block_size or mooncake.BLOCK_SIZE

    def read(report: Report) -> Iterator[TraceRequest]:
        return read_requests(path, mooncake.Mooncake(size, Clock(options.time_unit, "ms")), report)

    return _arrivals(path, size, True, False, Provenance(path.name, "mooncake", mooncake.NOTES), read)


def _open_bailian(path: Path, options: _Options) -> StreamedTrace:
    from hotprefix.lab.trace import bailian

    size = options.block_size or bailian.BLOCK_SIZE

    def read(report: Report) -> Iterator[TraceRequest]:
        return read_requests(path, bailian.Bailian(size, Clock(options.time_unit, "s")), report)

    return _arrivals(path, size, True, True, Provenance(path.name, "bailian", bailian.NOTES), read)


def _open_agents(path: Path, options: _Options) -> StreamedTrace:
    number, first = next(lines(files_of(path)[0]), (0, b""))
    if not number:
        raise BadTrace(f"{path}: empty", param="trace")
    try:
        size = parse_session(first).block_size
    except ValueError as error:
        if options.block_size is None:
            raise bad_beginning(files_of(path)[0], number, error) from None
        size = options.block_size

    def read(report: Report) -> Iterator[TraceRequest]:
        return read_requests(path, CodingAgents(size, options.sessions, options.assumed), report)

    notes = options.assumed.notes(options.sessions)
    return StreamedTrace(_stem(path), size, True, True, Provenance(path.name, "agents", notes), read)


def _open_azure(path: Path, options: _Options) -> StreamedTrace:
    from hotprefix.lab.trace import azure

    def read(report: Report) -> Iterator[TraceRequest]:
        return read_requests(path, azure.Azure(), report)

    return _arrivals(path, _NO_PREFIXES, False, False, Provenance(path.name, "azure", azure.NOTES), read)


def _open_events(path: Path, options: _Options) -> StreamedTrace:
    from hotprefix.lab.trace import eventlog

    known = eventlog.read_beginning(path)

    def read(report: Report) -> Iterator[TraceRequest]:
        return eventlog.read_events(path, report, sessions=known.has_sessions)

    provenance = Provenance(path.name, "events", eventlog.NOTES)
    return _arrivals(path, known.page_size, True, known.has_sessions, provenance, read)


FORMATS: Final[dict[str, _Format]] = {
    "hotprefix": _Format(b'"hotprefix_trace"', _open_canonical),
    "agents": _Format(b'"tool_tokens"', _open_agents),
    "bailian": _Format(b'"parent_chat_id"', _open_bailian),
    "mooncake": _Format(b'"hash_ids"', _open_mooncake),
    "azure": _Format(b"TIMESTAMP,", _open_azure),
    "events": _Format(b'"k":"header"', _open_events),
}
