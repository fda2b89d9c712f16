"""From records to requests. Owns: `Derivation`, which follows each request through a log.

Rules (terms: docs/records.md):
1. Records are read as a stream; only open requests and recent prefixes are remembered.
2. Times are differences of one run's clock, in the order of events, so none is negative. What was not
   measured is None.
3. What a request reused, computed, kept and lost is counted by the kernel alone (`kernel.sources.used`), in a
   record for each chunk of prefill that ran. Here these are only summed, so a request that has not ended has
   the figures of the chunks that ran.
4. Reuse falls into the window of the step that first used it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hotprefix.definitions import Known, KnownPrefixes, is_hot
from hotprefix.records import schema as sc
from hotprefix.records.request_row import RequestRow

SUMMED = {
    "device": "device", "host": "host", "storage": "storage", "prompt": "computed",
    "again_prompt": "again_prompt", "retained": "retained", "regained": "regained",
    "restored_host": "restored_host", "restored_storage": "restored_storage", "recomputed": "recomputed",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that is taken or refused next. info: what was asked for. known: what was known of its
    prompt."""

    info: sc.RequestInfo
    known: Known


@dataclass(slots=True)
class _Open:
    """A request that has not ended. waiting_since: when it began to wait; None while it runs."""

    row: RequestRow
    waiting_since: float | None


@dataclass(slots=True)
class Totals:
    """Exact sums over a log."""

    runs: int = 0
    enqueued: int = 0
    rejected: int = 0
    retractions: int = 0
    stalls: int = 0
    steps: int = 0
    failed_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    evicted_pages: int = 0
    published_pages: int = 0
    fetches: int = 0
    fetched_pages: int = 0
    landed_pages: int = 0
    fetch_s: float = 0.0
    dropped_records: int = 0
    lost_waiting_tokens: int = 0


@dataclass(slots=True)
class LinkSum:
    """What passed over one link. seconds: spent moving. failures: pages that could not be moved, by
    reason."""

    pages: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Derivation:
    """Takes records and gives the rows of requests that have ended.

    on_step: called with each step.
    on_prefill: called with each chunk of prefill that ran.
    totals, links: sums so far.
    header: the present run's.
    """

    on_step: Callable[[sc.Step], None] = lambda step: None
    on_prefill: Callable[[sc.Prefill], None] = lambda chunk: None
    totals: Totals = field(default_factory=Totals)
    links: dict[str, LinkSum] = field(default_factory=dict)
    header: sc.Header | None = None
    _open: dict[str, _Open] = field(default_factory=dict)
    _asked: dict[str, _Asked] = field(default_factory=dict)
    _known: KnownPrefixes = field(default_factory=KnownPrefixes)
    _planned: int = 0
    _waiting: int = 0
    _done: list[RequestRow] = field(default_factory=list)

    @property
    def offset(self) -> float:
        """What to add to the present run's clock to get Unix time."""
        return self.header.wall - self.header.t if self.header is not None else 0.0

    def feed(self, record: sc.Record) -> Iterator[RequestRow]:
        """Rows that this record completes."""
        if isinstance(record, sc.Header):
            if self.header is None or record.run != self.header.run:
                yield from self._new_run(record)
            return
        handler = _HANDLERS.get(type(record))
        if handler is not None:
            handler(self, record)
        if self._done:
            done, self._done = self._done, []
            yield from done

    def finish(self) -> Iterator[RequestRow]:
        """Rows of requests whose end the log does not hold."""
        for one in self._open.values():
            yield one.row
        self._open, self._asked, self._planned, self._waiting = {}, {}, 0, 0

    def _new_run(self, header: sc.Header) -> Iterator[RequestRow]:
        """Begin another engine process. No request of the one before goes on."""
        yield from self.finish()
        self.header = header
        self._known = KnownPrefixes()
        self.totals.runs += 1

    # -- one record -------------------------------------------------------------------------------

    def _info(self, r: sc.RequestInfo) -> None:
        """Note a request that is taken or refused next."""
        self._asked[r.request] = _Asked(r, self._known.ask(r.pages))

    def _enqueue(self, r: sc.Enqueue) -> None:
        assert self.header is not None
        asked = self._asked.pop(r.request, None)
        arrival = r.t if asked is None else asked.info.arrived
        row = RequestRow(self.header.run, r.request, arrival, r.prompt_tokens, r.matched)
        row.queue_depth = self._waiting
        self._open[r.request] = _Open(row, arrival)
        self._waiting += 1
        self.totals.enqueued += 1
        if asked is not None:
            row.prefix = asked.info.pages[0] if asked.info.pages else None
            row.heat = asked.known.heat
            row.hot = bool(is_hot(asked.known.pages * self.header.page_size, r.prompt_tokens))

    def _admit(self, r: sc.Admit) -> None:
        one = self._open.get(r.request)
        if one is None:
            return
        row = one.row
        if one.waiting_since is not None:
            waited = r.t - one.waiting_since
            if row.queue_s is None:
                row.queue_s = waited
            else:
                row.requeue_s = (row.requeue_s or 0.0) + waited
        one.waiting_since = None
        if row.matched_at_admission is None:
            self._waiting -= 1
            row.matched_at_admission = r.matched
            row.hit_loss = row.matched_at_enqueue - r.matched

    def _prefill(self, r: sc.Prefill) -> None:
        self.totals.lost_waiting_tokens += r.regained + r.restored_host + r.restored_storage + r.recomputed
        self.on_prefill(r)
        one = self._open.get(r.request)
        if one is None:
            return
        row = one.row
        if row.first_use is None:
            row.first_use = r.t
        for name, total in SUMMED.items():
            setattr(row, total, (getattr(row, total) or 0) + getattr(r, name))

    def _step(self, r: sc.Step) -> None:
        totals = self.totals
        totals.steps += 1
        totals.failed_steps += not r.ok
        if r.ok:
            totals.prefill_tokens += r.prefill_tokens
            totals.decode_tokens += r.decode_tokens
            totals.published_pages += self._planned
        self._planned = 0
        self.on_step(r)

    def _retract(self, r: sc.Retract) -> None:
        one = self._open.get(r.request)
        self.totals.retractions += 1
        if one is None:
            return
        one.waiting_since = r.t
        one.row.retractions += 1

    def _first_token(self, r: sc.FirstToken) -> None:
        one = self._open.get(r.request)
        if one is not None:
            one.row.ttft_s = r.t - one.row.arrival

    def _end(self, r: sc.End) -> None:
        self._known.answered(r.answer or ())
        one = self._open.pop(r.request, None)
        if one is None:
            return
        self._waiting -= one.row.matched_at_admission is None
        row = one.row
        row.outcome, row.total_s = r.reason, r.t - row.arrival
        row.outputs = r.outputs
        row.device, row.host, row.storage = r.device, r.host, r.storage
        row.positions, row.recomputed_positions = r.computed, r.recomputed
        self._done.append(row)

    def _reject(self, r: sc.Reject) -> None:
        self._asked.pop(r.request, None)
        self.totals.rejected += 1

    def _evict(self, r: sc.Evict) -> None:
        self.totals.evicted_pages += len(r.l1)

    def _publish(self, r: sc.Publish) -> None:
        if r.planned:
            self._planned += len(r.l1)
        else:
            self.totals.published_pages += len(r.l1)

    def _stall(self, r: sc.Stall) -> None:
        self.totals.stalls += 1

    def _dropped(self, r: sc.Dropped) -> None:
        self.totals.dropped_records += r.count

    def _link(self, r: sc.Link) -> None:
        link = self.links.setdefault(r.link, LinkSum())
        link.pages += r.pages
        link.bytes += r.bytes
        link.seconds += r.seconds
        for reason, count in (r.failures or {}).items():
            link.failures[reason] = link.failures.get(reason, 0) + count

    def _fetch_start(self, r: sc.FetchStart) -> None:
        self.totals.fetches += 1

    def _fetch_done(self, r: sc.FetchDone) -> None:
        self.totals.fetched_pages += r.pages
        self.totals.landed_pages += r.landed
        self.totals.fetch_s += r.seconds


_HANDLERS: dict[type[sc.Record], Callable[[Derivation, Any], None]] = {
    sc.RequestInfo: Derivation._info,
    sc.Enqueue: Derivation._enqueue,
    sc.Admit: Derivation._admit,
    sc.Prefill: Derivation._prefill,
    sc.Step: Derivation._step,
    sc.Retract: Derivation._retract,
    sc.FirstToken: Derivation._first_token,
    sc.End: Derivation._end,
    sc.Reject: Derivation._reject,
    sc.Evict: Derivation._evict,
    sc.Publish: Derivation._publish,
    sc.Stall: Derivation._stall,
    sc.Dropped: Derivation._dropped,
    sc.Link: Derivation._link,
    sc.FetchStart: Derivation._fetch_start,
    sc.FetchDone: Derivation._fetch_done,
}  # fmt: skip
