"""The event log's records. Owns: every kind of record, its fields, and how a kernel event becomes one.

Rules: schema 2 (schema 1 lacked pages' names, answers and arrivals, and its figures were netted: it is
refused). A record has `k`, its kind (the names of docs/terms.md's request timeline), and `t`, the
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

SCHEMA: Literal[2] = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    t: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Header(Record):
    """First line of each part. run: one engine process. wall: Unix time at `t`. key: which fingerprint
    key was used (a digest of it). config: the kernel's settings."""

    k: Literal["header"] = "header"
    schema: Literal[2] = SCHEMA
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
    """Before each enqueue, and before the reject of a request that the engine would not take. arrived: when
    the client's request reached the server, by this run's clock, `t` or earlier. session: its fingerprint;
    hold_s: how long its pages are asked to stay for the session's next request. pages: fingerprints of the
    prompt's page prefixes, first page first."""

    k: Literal["request"] = "request"
    request: str
    arrived: float
    prompt_tokens: int
    max_tokens: int
    priority: int
    session: str | None = None
    hold_s: float | None = None
    pages: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit(Record):
    k: Literal["admit"] = "admit"
    request: str
    matched: int
    matched_at_enqueue: int
    restored_host: int
    restored_storage: int
    cached: int
    again: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchStart(Record):
    k: Literal["fetch_start"] = "fetch_start"
    request: str
    fetch: int
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchJoin(Record):
    """A request waits for a fetch that another began."""

    k: Literal["fetch_join"] = "fetch_join"
    request: str
    fetch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchDone(Record):
    k: Literal["fetch_done"] = "fetch_done"
    fetch: int
    pages: int
    landed: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreStart(Record):
    """The step that begins copies these L1 pages from L2, those of the request's tokens from page `first` on.
    fetches: for each the fetch that brought it to L2, 0 where it had been copied from L1."""

    k: Literal["restore_start"] = "restore_start"
    request: str
    first: int
    l1: list[int]
    fetches: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreDone(Record):
    """All copies of a step have been made. seconds: that they took."""

    k: Literal["restore_done"] = "restore_done"
    pages: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStart(Record):
    k: Literal["prefill_start"] = "prefill_start"
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill(Record):
    """A chunk of prefill ran. start, stop: positions computed. taken: what the request took from the cache
    since its last chunk, as (start, stop, source, whether these are the very pages that it matched on
    arrival). The other fields count each token once; see `kernel.sources.Use`."""

    k: Literal["prefill"] = "prefill"
    request: str
    start: int
    stop: int
    taken: list[tuple[int, int, Literal["device", "host", "storage"], bool]]
    device: int
    host: int
    storage: int
    prompt: int
    outputs: int
    again_prompt: int
    again_outputs: int
    retained: int
    regained: int
    restored_host: int
    restored_storage: int
    recomputed: int


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
    """finish or abort, with the request's totals; reason: stop, length, abort or error. device, host,
    storage: final sources of what it reused; absent, like computed and recomputed, where no step of it ran.
    answer: fingerprints of the complete pages after the prompt's, the one in which the prompt ends first."""

    k: Literal["finish", "abort"] = "finish"
    request: str
    reason: Literal["stop", "length", "abort", "error"]
    device: int | None = None
    host: int | None = None
    storage: int | None = None
    computed: int | None = None
    recomputed: int | None = None
    outputs: int
    retractions: int
    answer: list[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject(Record):
    """error: the kind of refusal, by the name of its class (`hotprefix.errors`)."""

    k: Literal["reject"] = "reject"
    request: str
    error: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Retract(Record):
    k: Literal["retract"] = "retract"
    request: str
    reason: str
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish(Record):
    """L1 pages that the prefix tree holds from now on, those of the request's tokens from page `first` on.
    planned: with the end of the step in flight, if it does not fail."""

    k: Literal["publish"] = "publish"
    request: str
    first: int
    l1: list[int]
    planned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict(Record):
    """L1 pages that the prefix tree gave up."""

    k: Literal["evict"] = "evict"
    l1: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush(Record):
    """No request that is admitted later finds what was published before, nor what requests that run now
    publish. freed, protected: L1 pages dropped (an evict tells which), and kept until those requests end."""

    k: Literal["flush"] = "flush"
    freed: int
    protected: int


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
class Link(Record):
    """What passed over a physical link since its last such record: device_to_host, host_to_device,
    storage_to_host or host_to_storage. seconds: spent moving, over all threads. failures: pages that could
    not be moved, by reason; absent where there were none. A link over which nothing passed has no record."""

    k: Literal["link"] = "link"
    link: str
    pages: int
    bytes: int
    seconds: float
    failures: dict[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(Record):
    """The log could not keep up here: so many records are missing."""

    k: Literal["dropped"] = "dropped"
    count: int


KINDS: tuple[type[Record], ...] = (
    Header, Enqueue, RequestInfo, Admit, FetchStart, FetchJoin, FetchDone, RestoreStart, RestoreDone,
    PrefillStart, Prefill, PrefillDone, FirstToken, End, Reject, Retract, Publish, Evict, Flush, Stall, Step,
    Link, Dropped,
)  # fmt: skip


def _same(kind: type[Record]) -> Callable[[Any], Record]:
    """A record whose fields are the event's, by name."""
    names = [f.name for f in dataclasses.fields(kind) if f.name not in ("k", "t")]
    return lambda event: kind(t=event.now, **{name: getattr(event, name) for name in names})


def end(event: ev.Finished, answer: list[str] | None = None) -> End:
    """answer: see `End`."""
    totals: dict[str, int] = {}
    if event.ran:
        totals = {
            "device": event.cached - event.host - event.storage, "host": event.host,
            "storage": event.storage, "computed": event.computed, "recomputed": event.recomputed,
        }  # fmt: skip
    return End(
        t=event.now, k="abort" if event.reason is Finish.ABORT else "finish", request=event.request,
        reason=event.reason.value, outputs=event.outputs, retractions=event.retractions, answer=answer,
        **totals,
    )  # fmt: skip


def _prefill(event: ev.Prefilled) -> Record:
    return Prefill(
        t=event.now, request=event.request, start=event.start, stop=event.stop,
        taken=[(part.start, part.stop, part.source.value, part.same) for part in event.taken],
        **event.use._asdict(),
    )  # fmt: skip


def _restore_start(event: ev.RestoreStarted) -> Record:
    return RestoreStart(
        t=event.now, request=event.request, first=event.first, l1=list(event.pages),
        fetches=list(event.fetches),
    )  # fmt: skip


def _publish(event: ev.Published) -> Record:
    return Publish(
        t=event.now, request=event.request, first=event.first, l1=list(event.pages), planned=event.planned
    )


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
    ev.FetchJoined: _same(FetchJoin),
    ev.FetchEnded: _same(FetchDone),
    ev.RestoreStarted: _restore_start,
    ev.RestoreDone: _same(RestoreDone),
    ev.PrefillStarted: _same(PrefillStart),
    ev.Prefilled: _prefill,
    ev.PrefillDone: _same(PrefillDone),
    ev.FirstToken: _same(FirstToken),
    ev.Finished: end,
    ev.Rejected: _same(Reject),
    ev.Retracted: _same(Retract),
    ev.Published: _publish,
    ev.Evicted: lambda event: Evict(t=event.now, l1=list(event.pages)),
    ev.Flushed: _same(Flush),
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
