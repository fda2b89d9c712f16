"""The event log's records. Owns: every kind of record, its fields, and how a kernel event becomes one.

Rules: schema 1. A record has `k`, its kind (the names of terms.md's request timeline), and `t`, the
engine's monotonic clock in seconds; the header tells what that clock's zero is in wall time. Only
lengths, numbers, reasons and keyed fingerprints appear: no token ids, no text. A field that was not
measured is left out, never 0. A reader ignores fields it does not know, so adding one keeps the version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from hotprefix.kernel import events as ev
from hotprefix.kernel.plan import Finish

SCHEMA: Literal[1] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    t: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Header(Record):
    """First line of each part. run: one engine process. wall: Unix time at `t`. key: which fingerprint
    key was used (a digest of it). config: the kernel's settings."""

    k: Literal["header"] = "header"
    schema: Literal[1] = SCHEMA
    run: str
    part: int
    wall: float
    hotprefix: str
    model: str
    fingerprint: str
    key: str
    page_size: int
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueue(Record):
    k: Literal["enqueue"] = "enqueue"
    request: str
    prompt_tokens: int
    matched: int
    parked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInfo(Record):
    """Beside each enqueue. pages: fingerprints of the prompt's page prefixes, first page first."""

    k: Literal["request"] = "request"
    request: str
    prompt_tokens: int
    max_tokens: int
    priority: int
    pages: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit(Record):
    k: Literal["admit"] = "admit"
    request: str
    matched: int
    matched_at_enqueue: int
    restored_host: int
    restored_storage: int
    again: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Record):
    """Beside each admit. cached: leading tokens it starts behind, pages planned in the same step included.
    restored_from, restored_to: the tokens among them that this step copies back from L2, for this request
    or for another that shares them; absent where the plan does not tell."""

    k: Literal["start"] = "start"
    request: str
    step: int
    cached: int
    restored_from: int | None = None
    restored_to: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchStart(Record):
    k: Literal["fetch_start"] = "fetch_start"
    request: str
    fetch: int
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchDone(Record):
    k: Literal["fetch_done"] = "fetch_done"
    fetch: int
    pages: int
    landed: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStart(Record):
    k: Literal["prefill_start"] = "prefill_start"
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDone(Record):
    k: Literal["prefill_done"] = "prefill_done"
    request: str
    cached: int
    computed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken(Record):
    k: Literal["first_token"] = "first_token"
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Record):
    """finish or abort, with the request's totals; reason: stop, length, abort or error."""

    k: Literal["finish", "abort"] = "finish"
    request: str
    reason: Literal["stop", "length", "abort", "error"]
    cached: int
    computed: int
    outputs: int
    retractions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources(Record):
    """Beside each end: where the reused tokens finally came from."""

    k: Literal["sources"] = "sources"
    request: str
    device: int
    host: int
    storage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject(Record):
    k: Literal["reject"] = "reject"
    request: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Retract(Record):
    k: Literal["retract"] = "retract"
    request: str
    reason: str
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish(Record):
    k: Literal["publish"] = "publish"
    request: str
    pages: int
    planned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict(Record):
    k: Literal["evict"] = "evict"
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall(Record):
    k: Literal["stall"] = "stall"
    request: str
    need: int
    free: int
    evictable: int
    protected: int
    owned: int
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Record):
    k: Literal["step"] = "step"
    step: int
    ok: bool
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    free: int
    evictable: int
    protected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(Record):
    """The log could not keep up here: so many records are missing."""

    k: Literal["dropped"] = "dropped"
    count: int


KINDS: tuple[type[Record], ...] = (
    Header, Enqueue, RequestInfo, Admit, Start, FetchStart, FetchDone, PrefillStart, PrefillDone, FirstToken,
    End, Sources, Reject, Retract, Publish, Evict, Stall, Step, Dropped,
)  # fmt: skip


def _same(kind: type[Record]) -> Callable[[Any], Record]:
    """A record whose fields are the event's, by name."""
    names = [f.name for f in dataclasses.fields(kind) if f.name not in ("k", "t")]
    return lambda event: kind(t=event.now, **{name: getattr(event, name) for name in names})


def _end(event: ev.Finished) -> Record:
    return End(
        t=event.now, k="abort" if event.reason is Finish.ABORT else "finish", request=event.request,
        reason=event.reason.value, cached=event.cached, computed=event.computed, outputs=event.outputs,
        retractions=event.retractions,
    )  # fmt: skip


def _stall(event: ev.Stalled) -> Record:
    s = event.stall
    return Stall(
        t=event.now, request=s.head, need=s.need, free=s.free, evictable=s.evictable,
        protected=s.protected, owned=s.owned, capacity=s.capacity,
    )  # fmt: skip


OF_EVENT: dict[type[ev.Event], Callable[[Any], Record]] = {
    ev.Enqueued: _same(Enqueue),
    ev.Admitted: _same(Admit),
    ev.FetchStarted: _same(FetchStart),
    ev.FetchEnded: _same(FetchDone),
    ev.PrefillStarted: _same(PrefillStart),
    ev.PrefillDone: _same(PrefillDone),
    ev.FirstToken: _same(FirstToken),
    ev.Finished: _end,
    ev.Rejected: _same(Reject),
    ev.Retracted: _same(Retract),
    ev.Published: _same(Publish),
    ev.Evicted: lambda event: Evict(t=event.now, pages=len(event.pages)),
    ev.Stalled: _stall,
    ev.Stepped: _same(Step),
}


def of_event(event: ev.Event) -> Record:
    """The record of a kernel event."""
    return OF_EVENT[type(event)](event)


def values(record: Record) -> dict[str, Any]:
    """Field -> value, kind and time first; absent ones left out."""
    names = [f.name for f in dataclasses.fields(record)]
    names.sort(key=lambda name: (name != "k", name != "t"))
    return {name: value for name in names if (value := getattr(record, name)) is not None}
