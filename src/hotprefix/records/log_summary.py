"""One log in figures. Owns: `Summary` and the pass over a log that fills it.

Rules:
1. One pass in bounded memory. Sums are exact, percentiles within 1 % (`Sketch`). The slowest requests are
   kept in a heap. Hot prefixes are counted in a bounded table, exact if a log has at most PREFIXES first
   pages.
2. Requests are hot or cold by `definitions.is_hot`. A request for which the log lost what was asked for is in
   neither group.
3. The buckets are those of replays (`definitions.EDGES`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hotprefix.definitions import EDGES, GROUPS, bucket, buckets_of
from hotprefix.records.derive import Derivation, LinkSum, Totals
from hotprefix.records.percentiles import Sketch
from hotprefix.records.read_log import ReadReport, read_log
from hotprefix.records.request_row import RequestRow
from hotprefix.records.schema import Header, Prefill, Step

WINDOW_S = 30
LONG_WINDOW_S = 300
QUANTILES = (0.5, 0.9, 0.99)
SLOWEST = 20
PREFIXES = 4096
TOKEN_FIELDS = (
    "prompt_tokens", "ran_tokens", "reached", "cached", "device", "host", "storage", "computed",
    "again_prompt", "positions", "recomputed_positions", "outputs", "matched_at_enqueue", "retained", "lost",
    "regained",
    "restored_host", "restored_storage", "recomputed", "hit_loss",
)  # fmt: skip
TIME_FIELDS = ("queue_s", "requeue_s", "ttft_s", "total_s")


@dataclass(slots=True)
class Group:
    """Sums over requests.

    requests: how many.
    tokens: field of RequestRow -> its sum over the requests that have it.
    measured: field of RequestRow -> how many requests have it.
    times: field of RequestRow -> its values in a sketch.
    """

    requests: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    measured: Counter[str] = field(default_factory=Counter)
    times: dict[str, Sketch] = field(default_factory=lambda: {name: Sketch() for name in TIME_FIELDS})

    def add(self, row: RequestRow) -> None:
        self.requests += 1
        for name in TOKEN_FIELDS:
            value = getattr(row, name)
            if value is not None:
                self.tokens[name] += value
                self.measured[name] += 1
        for name, sketch in self.times.items():
            seconds = getattr(row, name)
            if seconds is not None:
                sketch.add(seconds)


@dataclass(slots=True)
class Window:
    """What fell into one window of time, by the end of the step.

    cached: tokens reused, at their first use (effective reuse).
    uncached: prompt tokens computed, those computed again included.
    waiting, running: the highest number of requests that a step told.
    """

    cached: int = 0
    uncached: int = 0
    waiting: int = 0
    running: int = 0


@dataclass(slots=True)
class Prefix:
    """What began with one first page: how many requests, their prompt tokens and their reused tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    cached: int = 0


def _no_buckets() -> dict[str, dict[str, Group]]:
    return {by: {name: Group() for _, name, _, _ in buckets_of(by)} for by in EDGES}


@dataclass(slots=True)
class Summary:
    """One log in figures.

    header: of the last run.
    read: what was read.
    totals, links: sums over the log.
    outcomes: why requests ended -> how many.
    groups: "all", and hot and cold.
    buckets: for each kind of bucket its groups by name, in order.
    windows: by number since Unix time 0, each WINDOW_S long.
    prefixes: by the fingerprint of the first page.
    slowest: the requests with the longest time to first token, longest first.
    started, ended: Unix time of the first and last record, seconds; None if there is none.
    """

    header: Header | None = None
    read: ReadReport = field(default_factory=ReadReport)
    totals: Totals = field(default_factory=Totals)
    links: dict[str, LinkSum] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    groups: dict[str, Group] = field(default_factory=lambda: {name: Group() for name in ("all", *GROUPS)})
    buckets: dict[str, dict[str, Group]] = field(default_factory=_no_buckets)
    windows: dict[int, Window] = field(default_factory=dict)
    prefixes: dict[str, Prefix] = field(default_factory=dict)
    slowest: list[RequestRow] = field(default_factory=list)
    started: float | None = None
    ended: float | None = None

    @property
    def span_s(self) -> float | None:
        return None if self.started is None or self.ended is None else self.ended - self.started

    def window(self, at: float) -> Window:
        return self.windows.setdefault(int(at // WINDOW_S), Window())

    def throughput(self) -> list[tuple[int, float, float, float, float]]:
        """For each window (Unix time at which it begins, cached tokens/s in it, uncached tokens/s in it, and
        the same two over the LONG_WINDOW_S that end with it). A window without steps between others has
        zeros."""
        if not self.windows:
            return []
        many = LONG_WINDOW_S // WINDOW_S
        first, last = min(self.windows), max(self.windows)
        none = Window()
        found = []
        for number in range(first, last + 1):
            now = self.windows.get(number, none)
            before = [self.windows.get(n, none) for n in range(number - many + 1, number + 1)]
            found.append((
                number * WINDOW_S, now.cached / WINDOW_S, now.uncached / WINDOW_S,
                sum(w.cached for w in before) / LONG_WINDOW_S,
                sum(w.uncached for w in before) / LONG_WINDOW_S,
            ))  # fmt: skip
        return found

    def hottest(self, most: int = 12) -> list[tuple[str, Prefix]]:
        return heapq.nlargest(most, self.prefixes.items(), key=lambda item: item[1].requests)


def summarize(
    path: Path, *, skip_bad: bool = False, on_row: Callable[[RequestRow], None] = lambda row: None
) -> Summary:
    """Read a log and sum it up. on_row: called with each request that has ended, and at last with the others.
    Raises InputError and BadLine, as `read_log` does."""
    found = Summary()
    heap: list[tuple[float, int, RequestRow]] = []
    derivation = Derivation()

    def step(record: Step) -> None:
        window = found.window(record.t + derivation.offset)
        window.waiting = max(window.waiting, record.waiting)
        window.running = max(window.running, record.running)

    def ended(row: RequestRow) -> None:
        _add(found, row)
        on_row(row)
        if row.ttft_s is not None:
            heapq.heappush(heap, (row.ttft_s, found.groups["all"].requests, row))
            if len(heap) > SLOWEST:
                heapq.heappop(heap)

    def prefill(record: Prefill) -> None:
        window = found.window(record.t + derivation.offset)
        window.cached += record.device + record.host + record.storage
        window.uncached += record.prompt

    derivation.on_step, derivation.on_prefill = step, prefill
    for record in read_log(path, found.read, skip_bad=skip_bad):
        for row in derivation.feed(record):
            ended(row)
        at = record.t + derivation.offset
        if not isinstance(record, Header) or found.started is None:
            found.started = at if found.started is None else found.started
            found.ended = at
    for row in derivation.finish():
        ended(row)
    found.header, found.totals, found.links = derivation.header, derivation.totals, derivation.links
    found.slowest = [row for _, _, row in sorted(heap, reverse=True)]
    return found


def _add(found: Summary, row: RequestRow) -> None:
    found.outcomes[row.outcome] += 1
    found.groups["all"].add(row)
    if row.hot is not None:
        found.groups["hot" if row.hot else "cold"].add(row)
    for by, value in (
        ("heat", row.heat),
        ("queue depth", row.queue_depth),
        ("prompt tokens", row.prompt_tokens),
    ):
        if value is not None:
            found.buckets[by][bucket(by, value)].add(row)
    if row.prefix is not None:
        _count_prefix(found.prefixes, row)


def _count_prefix(prefixes: dict[str, Prefix], row: RequestRow) -> None:
    assert row.prefix is not None
    if row.prefix not in prefixes and len(prefixes) >= 2 * PREFIXES:
        ranked = sorted(prefixes, key=lambda name: prefixes[name].requests)
        for rare in ranked[:PREFIXES]:
            del prefixes[rare]
    one = prefixes.setdefault(row.prefix, Prefix())
    one.requests += 1
    one.prompt_tokens += row.prompt_tokens
    one.cached += row.cached or 0
