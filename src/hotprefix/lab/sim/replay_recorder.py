"""From kernel events to the tables of a replay. Owns: `Recorder`, one instance's observer, and
`WindowRows`.

Rules (terms: docs/records.md):
1. Everything comes from the kernel's own events and counters; the cache is not asked.
2. Reuse, computation and retention are the kernel's sums (`kernel.sources.used`), chunk by chunk.
3. A step's work counts for the window in which the step ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from operator import add
from typing import Any

from hotprefix.kernel import events as ev
from hotprefix.kernel.counters import Counters
from hotprefix.kernel.plan import Finish
from hotprefix.lab.sim.arrivals import Item
from hotprefix.lab.sim.rows import REQUEST_COLUMNS, USE_COLUMNS

Row = dict[str, Any]
_EMPTY: Row = dict.fromkeys(REQUEST_COLUMNS)
_NOTHING_USED: Row = dict.fromkeys(USE_COLUMNS, 0)
_OF_A_LIFE = (
    "instance", "queue_depth", "admit_s", "prefill_start_s", "prefill_done_s", "matched_at_enqueue",
    "matched_at_admission", *USE_COLUMNS,
)  # fmt: skip


def new_row(item: Item, name: str, now: float) -> Row:
    """The row of a request that has just arrived."""
    request = item.request
    row = _EMPTY.copy()
    row.update(
        id=name, trace_id=request.id, session=request.session, kind=request.kind, outcome="unfinished",
        input_tokens=request.input_length, output_tokens=0, asked_output_tokens=request.output_length,
        ideal_tokens=item.ideal_tokens, heat=item.heat, arrival_s=now, retractions=0, requeue_s=0.0,
        failovers=0,
    )  # fmt: skip
    return row


def begin_again(row: Row) -> None:
    """Its instance has died: the request begins again. What the client got stays (the first token's time),
    and what was computed counts as computed and as rework."""
    computed, outputs = row["computed_tokens"] or 0, row["rework_output_tokens"] or 0
    row.update(dict.fromkeys(_OF_A_LIFE))
    row["failovers"] += 1
    if computed:
        row.update(_NOTHING_USED)
        row.update(computed_tokens=computed, rework_tokens=computed, rework_output_tokens=outputs)


class Recorder:
    """A kernel's sink.

    first_token: if given, first_token(id, now) is called when a prefill has given its first token.
    rows: the rows of requests that have not ended, by id.
    waiting: the arrivals of requests that were never admitted, by id, in order.
    """

    def __init__(
        self, instance: int, log: Callable[[int, ev.Event], None] | None,
        first_token: Callable[[str, float], None] | None = None,
    ) -> None:  # fmt: skip
        self.rows: dict[str, Row] = {}
        self.waiting: dict[str, float] = {}
        self._instance = instance
        self._log, self._told = log, first_token
        self._retracted: dict[str, float] = {}
        self.stepped: ev.Stepped | None = None
        self._on: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.Enqueued: self._enqueued,
            ev.Admitted: self._admitted,
            ev.PrefillStarted: self._prefill_started,
            ev.Prefilled: self._prefilled,
            ev.PrefillDone: self._prefill_done,
            ev.FirstToken: self._first_token,
            ev.Retracted: self._was_retracted,
            ev.Finished: self._finished,
            ev.Stepped: self._note_step,
        }

    @property
    def kinds(self) -> Collection[type[ev.Event]] | None:
        """The kinds of events that it needs; None = all, because a log keeps them."""
        return self._on.keys() if self._log is None else None

    def sink(self, event: ev.Event) -> None:
        """Take an event."""
        if self._log is not None:
            self._log(self._instance, event)
        handler = self._on.get(type(event))
        if handler is not None:
            handler(event)

    def arrived(self, row: Row) -> None:
        """Keep the row of a request that has arrived here; later events fill it."""
        row["instance"], row["queue_depth"] = self._instance, len(self.waiting)
        self.rows[row["id"]] = row
        self.waiting[row["id"]] = row["arrival_s"]

    def rejected(self, name: str) -> None:
        """Close the row of a request that the kernel refused."""
        self.waiting.pop(name, None)
        self.rows.pop(name)["outcome"] = "rejected"

    def outstanding(self) -> tuple[int, int]:
        """(prompt tokens that are still to be computed, requests that generate)."""
        tokens = decodes = 0
        for row in self.rows.values():
            if row["prefill_done_s"] is not None:
                decodes += 1
                continue
            here = row["matched_at_enqueue"] or 0
            if row["computed_tokens"] is not None:
                cached = row["cached_l1"] + row["cached_l2"] + row["cached_l3"]
                here = cached + row["computed_tokens"] - row["rework_tokens"]
            tokens += max(0, row["input_tokens"] - here)
        return tokens, decodes

    def oldest_wait(self, now: float) -> float | None:
        """How long the first of the requests that were never admitted has waited, seconds."""
        arrival = next(iter(self.waiting.values()), None)
        return None if arrival is None else now - arrival

    # -- events -----------------------------------------------------------------------------------

    def _enqueued(self, event: ev.Enqueued) -> None:
        self.rows[event.request]["matched_at_enqueue"] = event.matched

    def _admitted(self, event: ev.Admitted) -> None:
        row = self.rows[event.request]
        if event.again:
            since = self._retracted.pop(event.request, None)
            if since is not None:
                row["requeue_s"] += event.now - since
            return
        self.waiting.pop(event.request, None)
        row["admit_s"] = event.now
        row["matched_at_admission"] = event.matched

    def _prefill_started(self, event: ev.PrefillStarted) -> None:
        row = self.rows[event.request]
        if row["prefill_start_s"] is None:
            row["prefill_start_s"] = event.now

    def _prefilled(self, event: ev.Prefilled) -> None:
        row, use = self.rows[event.request], event.use
        if row["computed_tokens"] is None:
            row.update(_NOTHING_USED)
        row["cached_l1"] += use.device
        row["cached_l2"] += use.host
        row["cached_l3"] += use.storage
        row["computed_tokens"] += use.prompt
        row["rework_tokens"] += use.again_prompt
        row["rework_output_tokens"] += use.again_outputs
        row["retained_tokens"] += use.retained
        row["regained_tokens"] += use.regained
        row["restored_l2_tokens"] += use.restored_host
        row["restored_l3_tokens"] += use.restored_storage
        row["recomputed_tokens"] += use.recomputed

    def _prefill_done(self, event: ev.PrefillDone) -> None:
        row = self.rows[event.request]
        if row["prefill_done_s"] is None:
            row["prefill_done_s"] = event.now

    def _first_token(self, event: ev.FirstToken) -> None:
        row = self.rows[event.request]
        if row["first_token_s"] is None:
            row["first_token_s"] = event.now
        if self._told is not None:
            self._told(event.request, event.now)

    def _was_retracted(self, event: ev.Retracted) -> None:
        self.rows[event.request]["retractions"] += 1
        self._retracted[event.request] = event.now

    def _finished(self, event: ev.Finished) -> None:
        row = self.rows[event.request]
        done = event.reason in (Finish.STOP, Finish.LENGTH)
        row["outcome"] = "finished" if done else "unfinished"
        row["output_tokens"] = event.outputs
        if done:
            row["finish_s"] = event.now
        self._retracted.pop(event.request, None)

    def _note_step(self, event: ev.Stepped) -> None:
        self.stepped = event


class WindowRows:
    """One instance's window table. A window has the steps that end in it."""

    def __init__(self, instance: int, seconds: float, total_pages: int) -> None:
        self._total = total_pages
        self.rows: list[Row] = []
        self._instance, self._seconds = instance, seconds
        self._index = -1
        self._row: Row = {}
        self._before = self._count = self._base = _counts(Counters())
        self._state: ev.Stepped | None = None

    def begin_again(self) -> None:
        """From now on steps are those of another kernel, whose counters begin at 0."""
        self._base = self._count

    def step(
        self, recorder: Recorder, counters: Counters, now: float, forward: float, scheduler: float,
        restore: float,
    ) -> None:  # fmt: skip
        """Count a step that has ended. forward, scheduler, restore: its seconds, all repeats together."""
        index = int(now / self._seconds)
        if index != self._index:
            self._fill()
            self._open(index)
        row, state = self._row, recorder.stepped
        if state is None:
            return
        row["prefill_s" if state.prefill_tokens else "decode_s"] += forward
        row["scheduler_s"] += scheduler
        row["restore_s"] += restore
        row["oldest_wait_s"] = recorder.oldest_wait(now)
        self._count = tuple(map(add, self._base, _counts(counters)))
        self._state = state

    def _open(self, index: int) -> None:
        self._index = index
        self._row = dict.fromkeys(_SUMS, 0) | {
            "instance": self._instance, "start_s": index * self._seconds, "seconds": self._seconds,
            "prefill_s": 0.0, "decode_s": 0.0, "scheduler_s": 0.0, "restore_s": 0.0,
        }  # fmt: skip
        self.rows.append(self._row)

    def _fill(self) -> None:
        """Fill the open window's row with what was counted in it, and the gauges after its last step."""
        row, state = self._row, self._state
        if state is None:
            return
        for column, grown, before in zip(_SUMS, self._count, self._before, strict=True):
            row[column] = grown - before
        self._before, self._state = self._count, None
        row["free_pages"], row["evictable_pages"] = state.free, state.evictable
        row["protected_pages"], row["running"], row["waiting"] = state.protected, state.running, state.waiting
        row["owned_pages"] = self._total - state.free - state.evictable - state.protected

    def close(self, now: float) -> list[Row]:
        """The window table. The last window ends with the replay. An instance that never had a step has that
        window too, so that idle instances count in shares of all instances' time."""
        self._fill()
        if not self.rows and now:
            self._open(math.ceil(now / self._seconds) - 1)
        if self.rows:
            last = self.rows[-1]
            last["seconds"] = min(self._seconds, max(0.0, now - last["start_s"])) or self._seconds
        return self.rows


_SUMS = (
    "steps", "cached_tokens", "computed_tokens", "output_tokens", "evicted_pages", "refresh_touches",
    "stalls",
)  # fmt: skip


def _counts(of: Counters) -> tuple[int, ...]:
    """What the columns of _SUMS have counted so far."""
    return (
        of.steps, of.cached_tokens, of.computed_prompt_tokens, of.computed_output_tokens, of.evicted_pages,
        of.refresh_touches, of.stalls,
    )  # fmt: skip
