"""A trace that is read as it is used. Owns: `StreamedTrace`.

Rules: each iteration reads from the start, and holds only what it needs to know shared blocks. `report` says
what the latest iteration found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from hotprefix.lab.trace.problems import Report
from hotprefix.lab.trace.trace_request import Provenance, TraceRequest

TELL: Final = 1000


@dataclass(slots=True)
class StreamedTrace:
    """A `Trace` over a function that reads it.

    read: returns all requests, anew at each call.
    limit: only so many requests, from the first on; None: all.
    skip_bad: leave bad lines out instead of raising.
    told: called after every TELL requests with how many have been read.
    """

    name: str
    block_size: int
    has_prefixes: bool
    has_sessions: bool
    provenance: Provenance
    read: Callable[[Report], Iterator[TraceRequest]]
    limit: int | None = None
    skip_bad: bool = False
    report: Report = field(default_factory=Report)
    told: Callable[[int], None] | None = None

    def __iter__(self) -> Iterator[TraceRequest]:
        self.report = Report(skip_bad=self.skip_bad)
        requests = islice(self.read(self.report), self.limit)
        return requests if self.told is None else self._telling(requests, self.told)

    def _telling(
        self, requests: Iterator[TraceRequest], told: Callable[[int], None]
    ) -> Iterator[TraceRequest]:
        for count, request in enumerate(requests, 1):
            if not count % TELL:
                told(count)
            yield request
