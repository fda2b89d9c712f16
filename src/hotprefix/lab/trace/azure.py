"""Azure's LLM inference traces. Owns: the importer for `TIMESTAMP,ContextTokens,GeneratedTokens` files.

Rules: timestamps are dates with up to seven fraction digits (100 ns). A timestamp without an offset is read
as UTC, so no change of a local clock reorders requests (rule 62). There is no prefix information:
`has_prefixes` is False, and prefix experiments refuse the trace.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from pydantic import TypeAdapter

from hotprefix.lab.trace.line_fields import NO_BLOCKS, Outputs, Tokens
from hotprefix.lab.trace.timestamps import Clock
from hotprefix.lab.trace.trace_request import TraceRequest

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
NOTES: Final = (
    "arrivals and lengths only: no prefixes, so nothing can be said about reuse",
    "timestamps without an offset are read as UTC",
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TOKENS: Final = TypeAdapter(Tokens)
_OUTPUTS: Final = TypeAdapter(Outputs)


class Azure:
    """Importer for one reading."""

    def __init__(self) -> None:
        self._clock = Clock("ns", "ns")

    def take(self, line: int, raw: bytes) -> Sequence[TraceRequest]:
        cells = next(csv.reader([raw.decode().strip()]))
        if line == 1 and cells == list(COLUMNS):
            return ()
        if len(cells) != len(COLUMNS):
            raise ValueError(f"the line: {len(cells)} columns instead of {','.join(COLUMNS)}")
        stamp, prompt, answer = cells
        request = TraceRequest(
            id=str(line),
            input_length=_number("ContextTokens", _TOKENS, prompt),
            output_length=_number("GeneratedTokens", _OUTPUTS, answer),
            blocks=NO_BLOCKS,
            arrival_s=self._clock.seconds(_nanoseconds(stamp), "TIMESTAMP"),
        )
        return (request,)


def _number(column: str, kind: TypeAdapter[int], cell: str) -> int:
    try:
        return kind.validate_json(cell, strict=True)
    except ValueError:
        raise ValueError(f"{column}: {cell!r} is no number of tokens") from None


def _nanoseconds(stamp: str) -> int:
    """Nanoseconds since 1970, exact. Python's dates have six fraction digits, so the fraction is read
    apart."""
    whole, point, rest = stamp.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    try:
        moment = datetime.fromisoformat(whole + rest[len(digits) :])
    except ValueError:
        raise ValueError(f"TIMESTAMP: {stamp!r} is no date and time") from None
    if (point and not digits) or len(digits) > 9:
        raise ValueError(f"TIMESTAMP: {stamp!r} has no fraction of one to nine digits")
    since = moment.replace(tzinfo=moment.tzinfo or UTC) - _EPOCH
    return (since.days * 86400 + since.seconds) * 10**9 + int(digits.ljust(9, "0"))
