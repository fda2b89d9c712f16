"""What can be wrong with a trace. Owns: the errors of this folder, and the two demands an experiment makes.

Rules: a message gives the file, the line, the field and the reason, and then what to do about it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from hotprefix.errors import InputError, shortened
from hotprefix.lab.trace.trace_request import Trace

_VALUE: Final = re.compile(r"'[^']*'|-?\d+(\.\d+)?(e[+-]?\d+)?")  # what differs between faults of one kind


class BadTrace(InputError):
    """A trace file cannot be read, or a line of it is no request."""


class NoPrefixes(InputError):
    """A prefix experiment was asked for on a trace that records no prefixes."""


class NoSessions(InputError):
    """Closed-loop replay was asked for on a trace that records no sessions."""


@dataclass(slots=True)
class Report:
    """What one reading found.

    skip_bad: leave bad lines out instead of raising.
    skipped: how many lines were left out.
    first_bad: the message about the first of them.
    kinds: for each kind of fault, how many lines have it, and the message about the first.
    reordered: how many requests had to be moved to be in order of arrival.
    """

    skip_bad: bool = False
    skipped: int = 0
    first_bad: str | None = None
    kinds: dict[str, tuple[int, str]] = field(default_factory=dict)
    reordered: int = 0

    def bad(self, path: Path, line: int, error: Exception) -> None:
        """Note a bad line. Raises BadTrace unless such lines are skipped."""
        what = f"{path}, line {line}: {_reason(error)}"
        if not self.skip_bad:
            raise BadTrace(
                f"{what}; --skip-bad (of hotprefix trace) leaves such lines out", param="trace"
            ) from None
        self.skipped += 1
        self.first_bad = self.first_bad or what
        kind = _VALUE.sub("N", _reason(error, valued=False))
        count, first = self.kinds.get(kind, (0, what))
        self.kinds[kind] = (count + 1, first)


def require_prefixes(trace: Trace, what: str) -> None:
    """Raises NoPrefixes if the trace has lengths only. what: the experiment's name."""
    if not trace.has_prefixes:
        raise NoPrefixes(
            f"{what} needs prefixes, but trace {trace.name!r} records arrivals and lengths only: any reuse "
            "would be invented; take a trace with block ids (docs/traces.md)",
            param="trace",
        )


def require_sessions(trace: Trace, what: str) -> None:
    """Raises NoSessions if the trace does not say which request waits for which. what: what was asked for."""
    if not trace.has_sessions:
        raise NoSessions(
            f"{what} needs sessions, but trace {trace.name!r} records arrivals only: replay it open loop",
            param="trace",
        )


def bad_beginning(path: Path, line: int, error: Exception) -> BadTrace:
    """The error for a bad line that says how to read all others; it cannot be left out."""
    return BadTrace(f"{path}, line {line}: {_reason(error)}", param="trace")


def _reason(error: Exception, *, valued: bool = True) -> str:
    """The reason in an error's message. valued: with the offending value, if the line has one."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if not where:
        return f"the line: {first['msg']}"
    value = "" if first["type"] == "missing" or not valued else f" ({shortened(first['input'])} was given)"
    return f"{where}: {first['msg']}{value}"
