"""A router's log in figures. Owns: `RouteSummary`, and the pass over a log that fills it.

Rules: one pass; only decisions without an end are remembered. Sums are exact, percentiles within 1 %
(`Sketch`). Errors are predicted less observed seconds to the first token, of decisions that have both.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from hotprefix.records.percentiles import Sketch
from hotprefix.records.read_log import ReadReport, read_log
from hotprefix.records.route_schema import Route, RouteEnd, RouteRefused, RouterHeader
from hotprefix.records.schema import Dropped, Record

FOUND = ("found_l1", "found_l2", "found_l3", "found_flight", "found_peer")


@dataclass(slots=True)
class RouteSummary:
    """One log in figures.

    requests: that got a worker. retries: further decisions for them. refused: requests by reason.
    rules, endings: decisions by rule and by ending; "open" are those without an end.
    workers: (worker, "decisions" or an ending) -> how many.
    tokens: sums over decisions; delivered_tokens and delivered_of over those that told what was delivered,
    the latter being their prompt tokens. copied: copied tokens by reason.
    first, held, total: seconds to the first token, waited at the router, until the end.
    errors: of predictions, either way; bias_s: their mean with its sign.
    """

    header: RouterHeader | None = None
    read: ReadReport = field(default_factory=ReadReport)
    runs: int = 0
    dropped_records: int = 0
    requests: int = 0
    retries: int = 0
    span_s: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    workers: Counter[tuple[str, str]] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    copied: Counter[str] = field(default_factory=Counter)
    first: Sketch = field(default_factory=Sketch)
    held: Sketch = field(default_factory=Sketch)
    total: Sketch = field(default_factory=Sketch)
    errors: Sketch = field(default_factory=Sketch)
    _error_s: float = 0.0
    _open: dict[tuple[str, int], Route] = field(default_factory=dict)

    @property
    def bias_s(self) -> float | None:
        return self._error_s / self.errors.count if self.errors.count else None

    def feed(self, record: Record) -> None:
        if isinstance(record, RouterHeader):
            if self.header is None or record.run != self.header.run:
                self.runs += 1
                self.close()
            self.header = record
        elif isinstance(record, Route):
            self._decided(record)
        elif isinstance(record, RouteEnd):
            self._ended(record)
        elif isinstance(record, RouteRefused):
            self.refused[record.reason] += 1
            self.held.add(record.held_s)
        elif isinstance(record, Dropped):
            self.dropped_records += record.count

    def close(self) -> None:
        """Nothing more will come of the decisions so far."""
        for route in self._open.values():
            self._ends(route.worker, "open")
        self._open.clear()

    def _decided(self, route: Route) -> None:
        self._open[route.request, route.attempt] = route
        self.requests += route.attempt == 1
        self.retries += route.attempt > 1
        self.rules[route.rule] += 1
        self.models[route.model] += 1
        self.workers[route.worker, "decisions"] += 1
        self.held.add(route.held_s)
        for name in ("prompt_tokens", "available_tokens", "copied_tokens", *FOUND):
            self.tokens[name] += getattr(route, name)
        if route.copying is not None:
            self.copied[route.copying] += route.copied_tokens

    def _ended(self, end: RouteEnd) -> None:
        self._ends(end.worker, end.ending)
        self.total.add(end.total_s)
        route = self._open.pop((end.request, end.attempt), None)
        if end.actual_first_s is not None:
            self.first.add(end.actual_first_s)
        if route is None:
            return  # the log lost it
        if end.delivered_tokens is not None:
            self.tokens["delivered_tokens"] += end.delivered_tokens
            self.tokens["delivered_of"] += route.prompt_tokens
        if end.actual_first_s is not None:
            error = route.first_s - end.actual_first_s
            self.errors.add(abs(error))
            self._error_s += error

    def _ends(self, worker: str, ending: str) -> None:
        self.endings[ending] += 1
        self.workers[worker, ending] += 1


def is_route_log(path: Path, *, skip_bad: bool = False) -> bool:
    """Whether a router wrote the log. Raises what `read_log` raises."""
    return any(
        isinstance(r, RouterHeader) for r in islice(read_log(path, ReadReport(), skip_bad=skip_bad), 1)
    )


def summarize_routes(path: Path, *, skip_bad: bool = False) -> RouteSummary:
    """Read a router's log and sum it up. Raises InputError and BadLine, as `read_log` does."""
    found, began = RouteSummary(), 0.0
    for record in read_log(path, found.read, skip_bad=skip_bad):
        if isinstance(record, RouterHeader) and (found.header is None or record.run != found.header.run):
            began = record.t - found.span_s
        found.feed(record)
        found.span_s = record.t - began
    found.close()
    return found
