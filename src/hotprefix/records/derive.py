"""From records to requests. Owns: `Derivation`, which follows each request through a log, and `RequestRow`.

Rules (terms.md, *Formulas*): streaming; only open requests and the recent prefixes are remembered. Times are
differences of one run's clock, in the order of events, so none is negative; what was not measured is
None. Retention is of the enqueue-time hit's own interval [0, matched at enqueue): retained is what L1 still
held at the first admission; of the rest, restored is what the admission that was really executed copied
back of that very interval (for itself or for another that shares it), and recomputed is what is left.
Effective
reuse counts once, in the window of the first executed step after the admission.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hotprefix.records import schema as sc

HOT_WINDOW_S = 300.0


@dataclass(slots=True)
class RequestRow:
    """One request. Times in seconds from its enqueue, arrival by its run's clock; tokens. queue: to the first
    admission; requeue: waits after retractions, summed. hit_loss: net L1 hit loss, may be negative.
    retained + restored + recomputed = matched_at_enqueue. device/host/storage: final sources of reuse.
    hot: its first page was asked for in the 300 s before; None where the prompt has no whole page."""

    run: str
    request: str
    arrival: float
    prompt_tokens: int
    matched_at_enqueue: int
    outcome: str = "open"
    hot: bool | None = None
    prefix: str | None = None
    queue_s: float | None = None
    requeue_s: float | None = None
    ttft_s: float | None = None
    total_s: float | None = None
    matched_at_admission: int | None = None
    hit_loss: int | None = None
    retained: int | None = None
    restored_host: int | None = None
    restored_storage: int | None = None
    recomputed: int | None = None
    cached: int | None = None
    device: int | None = None
    host: int | None = None
    storage: int | None = None
    computed: int | None = None
    outputs: int | None = None
    retractions: int = 0
    first_use: float | None = None

    @property
    def ran_tokens(self) -> int | None:
        """Prompt tokens, where the request ran at all."""
        return None if self.first_use is None else self.prompt_tokens


@dataclass(slots=True)
class _Open:
    """A request that has not ended. waiting_since: None while it runs. restore: tokens
    [first, end) copied back, those from L3 from the one in the middle on, of the admission whose first
    step has not run yet, or of the one that was executed."""

    row: RequestRow
    waiting_since: float | None
    executed: bool = False
    admitted: sc.Admit | None = None
    restore: tuple[int, int, int] | None = None
    ended_at: float = 0.0


@dataclass(slots=True)
class Totals:
    """Sums over a log, exact."""

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
class Derivation:
    """Feed it records; it gives rows of requests that have ended. on_step: told of each step."""

    on_step: Callable[[sc.Step], None] = lambda step: None
    totals: Totals = field(default_factory=Totals)
    header: sc.Header | None = None
    _open: dict[str, _Open] = field(default_factory=dict)
    _seen: dict[str, float] = field(default_factory=dict)
    _fresh: dict[str, _Open] = field(default_factory=dict)
    _ended: dict[str, _Open] = field(default_factory=dict)
    _done: list[RequestRow] = field(default_factory=list)

    @property
    def offset(self) -> float:
        """What to add to the present run's clock for Unix time."""
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
        for one in [*self._ended.values(), *self._open.values()]:
            yield one.row
        self._open, self._ended, self._fresh = {}, {}, {}

    def _new_run(self, header: sc.Header) -> Iterator[RequestRow]:
        """Another engine process: nothing of the one before goes on."""
        yield from self.finish()
        self.header = header
        self._seen = {}
        self.totals.runs += 1

    # -- one record -------------------------------------------------------------------------------

    def _enqueue(self, r: sc.Enqueue) -> None:
        assert self.header is not None
        row = RequestRow(self.header.run, r.request, r.t, r.prompt_tokens, r.matched)
        self._open[r.request] = _Open(row, r.t)
        self.totals.enqueued += 1

    def _info(self, r: sc.RequestInfo) -> None:
        one = self._open.get(r.request)
        if one is None or not r.pages:
            return
        first = one.row.prefix = r.pages[0]
        last = self._seen.pop(first, None)
        one.row.hot = last is not None and r.t - last <= HOT_WINDOW_S
        self._seen[first] = r.t
        for name in list(self._seen):  # oldest first
            if self._seen[name] >= r.t - HOT_WINDOW_S:
                break
            del self._seen[name]

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
        one.waiting_since, one.admitted = None, r
        if row.matched_at_admission is None:
            row.matched_at_admission = r.matched
            row.hit_loss = row.matched_at_enqueue - r.matched
            row.retained = min(row.matched_at_enqueue, r.matched)
            self.totals.lost_waiting_tokens += max(0, row.hit_loss)
        if not one.executed:
            self._fresh[r.request] = one

    def _start(self, r: sc.Start) -> None:
        """Where the restored tokens of an admission lie: its own end where it starts to compute, and those
        from L3 are its last."""
        one = self._open.get(r.request)
        if one is None or one.executed or one.admitted is None:
            return
        one.restore = None
        if r.restored_from is not None and r.restored_to is not None:
            storage = one.admitted.restored_storage
            one.restore = (r.restored_from, max(r.restored_from, r.restored_to - storage), r.restored_to)

    def _step(self, r: sc.Step) -> None:
        totals = self.totals
        totals.steps += 1
        totals.failed_steps += not r.ok
        if r.ok:
            totals.prefill_tokens += r.prefill_tokens
            totals.decode_tokens += r.decode_tokens
            for one in self._fresh.values():
                if one.waiting_since is None:
                    _use(one, r.t)
        self._fresh = {}
        self.on_step(r)
        for name in [n for n, one in self._ended.items() if one.ended_at < r.t]:
            self._done.append(self._ended.pop(name).row)  # the record of its sources is missing

    def _prefill_done(self, r: sc.PrefillDone) -> None:
        one = self._open.get(r.request)
        if one is not None:
            _use(one, r.t)

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
        one = self._open.pop(r.request, None)
        if one is None:
            return
        row = one.row
        one.ended_at = r.t
        self._fresh.pop(r.request, None)
        self._ended[r.request] = one
        if r.computed:
            _use(one, r.t)
        row.outcome, row.total_s = r.reason, r.t - row.arrival
        row.computed, row.outputs = r.computed, r.outputs
        row.cached = r.cached
        self._retention(one)

    def _retention(self, one: _Open) -> None:
        row = one.row
        if row.retained is None or not one.executed or one.restore is None:
            return
        start, storage, stop = one.restore
        low, high = row.retained, row.matched_at_enqueue
        row.restored_host = _overlap(low, high, start, storage)
        row.restored_storage = _overlap(low, high, storage, stop)
        row.recomputed = high - low - row.restored_host - row.restored_storage

    def _sources(self, r: sc.Sources) -> None:
        one = self._ended.pop(r.request, None)
        if one is not None:
            one.row.device, one.row.host, one.row.storage = r.device, r.host, r.storage
            self._done.append(one.row)

    def _reject(self, r: sc.Reject) -> None:
        self.totals.rejected += 1

    def _evict(self, r: sc.Evict) -> None:
        self.totals.evicted_pages += r.pages

    def _publish(self, r: sc.Publish) -> None:
        self.totals.published_pages += r.pages

    def _stall(self, r: sc.Stall) -> None:
        self.totals.stalls += 1

    def _dropped(self, r: sc.Dropped) -> None:
        self.totals.dropped_records += r.count

    def _fetch_start(self, r: sc.FetchStart) -> None:
        self.totals.fetches += 1

    def _fetch_done(self, r: sc.FetchDone) -> None:
        self.totals.fetched_pages += r.pages
        self.totals.landed_pages += r.landed
        self.totals.fetch_s += r.seconds


_HANDLERS: dict[type[sc.Record], Callable[[Derivation, Any], None]] = {
    sc.Enqueue: Derivation._enqueue,
    sc.RequestInfo: Derivation._info,
    sc.Admit: Derivation._admit,
    sc.Start: Derivation._start,
    sc.Step: Derivation._step,
    sc.Retract: Derivation._retract,
    sc.PrefillDone: Derivation._prefill_done,
    sc.FirstToken: Derivation._first_token,
    sc.End: Derivation._end,
    sc.Sources: Derivation._sources,
    sc.Reject: Derivation._reject,
    sc.Evict: Derivation._evict,
    sc.Publish: Derivation._publish,
    sc.Stall: Derivation._stall,
    sc.Dropped: Derivation._dropped,
    sc.FetchStart: Derivation._fetch_start,
    sc.FetchDone: Derivation._fetch_done,
}  # fmt: skip


def _use(one: _Open, now: float) -> None:
    """Its first step has run: what its admission restored is used now."""
    if not one.executed:
        one.executed, one.row.first_use = True, now


def _overlap(low: int, high: int, start: int, stop: int) -> int:
    return max(0, min(high, stop) - max(low, start))
