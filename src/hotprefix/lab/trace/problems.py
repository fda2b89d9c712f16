"""What can be wrong with a trace. Owns: the errors of this folder, and the two demands an experiment makes.

Rule: a message has the file, the line, the field and the reason, then what to do about it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from hotprefix.errors import InputError
from hotprefix.lab.trace.record import Trace

_VALUE: Final = re.compile(r"'[^']*'|-?\d+(\.\d+)?(e[+-]?\d+)?")  # what differs within a kind of fault


class BadTrace(InputError):
    """A trace file cannot be read, or a line of it is no request."""


class NoPrefixes(InputError):
    """A prefix experiment was asked for on a trace that records no prefixes."""


class NoSessions(InputError):
    """Closed-loop replay was asked for on a trace that records no sessions."""


@dataclass(slots=True)
class Report:
    """What one reading met. skip_bad: leave bad lines out instead of raising. skipped: lines left out;
    first_bad: what the first of them was; kinds: how many of each kind, and the first of that. reordered:
    requests that stood before an earlier one."""

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
    """Raises NoPrefixes where the trace has lengths only; `what` names the experiment."""
    if not trace.has_prefixes:
        raise NoPrefixes(
            f"{what} needs prefixes, but trace {trace.name!r} records arrivals and lengths only: any reuse "
            "would be invented; take a trace with block ids (docs/traces.md)",
            param="trace",
        )


def require_sessions(trace: Trace, what: str) -> None:
    """Raises NoSessions where nothing says which request waits for which; `what` names the wish."""
    if not trace.has_sessions:
        raise NoSessions(
            f"{what} needs sessions, but trace {trace.name!r} records arrivals only: replay it open loop",
            param="trace",
        )


def bad_beginning(path: Path, line: int, error: Exception) -> BadTrace:
    """The line that says how to read all others is wrong: nothing can be left out."""
    return BadTrace(f"{path}, line {line}: {_reason(error)}", param="trace")


def _reason(error: Exception, *, valued: bool = True) -> str:
    """valued: with the offending value, where the line has one."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if not where:
        return f"the line: {first['msg']}"
    value = "" if first["type"] == "missing" or not valued else f" ({_short(first['input'])} was given)"
    return f"{where}: {first['msg']}{value}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
