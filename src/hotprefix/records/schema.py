"""The event log's records. Owns: every kind of record that an engine writes, and its fields (those of a
router stand in route_schema.py).

Rules:
1. The schema is 2. Schema 1 is refused: it lacked the names of pages, answers and arrivals, and its figures
   were netted against each other.
2. A record has `k`, its kind (the names are those of the request timeline in docs/terms.md), and `t`, the
   engine's monotonic clock in seconds. The header tells the wall time at its own `t`.
3. Only lengths, numbers, reasons and keyed fingerprints appear; no token ids, no text.
4. A field that was not measured is left out, never 0.
5. A reader ignores fields that it does not know, so adding one keeps the version.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA: Literal[2] = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    t: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening(Record):
    """The first record of each part, by whom it may be written.

    run: names one process.
    part: the part's number, from 0.
    wall: Unix time at `t`, seconds.
    hotprefix: the version that wrote it.
    """

    schema: Literal[2] = SCHEMA
    run: str
    part: int
    wall: float
    hotprefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Header(Opening):
    """The opening of an engine's log.

    model: the model's name.
    fingerprint: of the model.
    key: a digest of the fingerprint key, which tells keys apart.
    page_size: tokens per page.
    config: the kernel's settings.
    """

    k: Literal["header"] = "header"
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
    """What was asked for. It stands before each enqueue, and before the reject of a request that the engine
    refused.

    arrived: when the client's request reached the server, by this run's clock; `t` or earlier.
    session: the session's fingerprint.
    hold_s: for how many seconds at most the request's pages are to stay for the session's next request.
    pages: fingerprints of the prompt's page prefixes, first page first.
    """

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
    """A request waits for a fetch that another request has begun."""

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
    """The step that begins copies these L1 pages from L2.

    first: index of the first of them in the request's pages.
    l1: L1 page ids.
    fetches: for each page the number of the fetch that brought it to L2; 0 if it was copied there from L1.
    """

    k: Literal["restore_start"] = "restore_start"
    request: str
    first: int
    l1: list[int]
    fetches: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreDone(Record):
    """All copies of a step have been made. seconds: how long they took."""

    k: Literal["restore_done"] = "restore_done"
    pages: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStart(Record):
    k: Literal["prefill_start"] = "prefill_start"
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill(Record):
    """A chunk of prefill ran.

    start, stop: it computed positions [start, stop).
    taken: what the request took from the cache since its last chunk, as (start, stop, source, whether these
    are the very pages that it matched on arrival).
    The other fields count each token once; see `kernel.sources.Use`.
    """

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
    """A request has finished or was aborted, with its totals.

    reason: stop, length, abort or error.
    device, host, storage: tokens reused, by final source; absent if no step of it ran.
    computed, recomputed: positions computed, and those of them computed again; absent if no step of it ran.
    outputs: sampled tokens.
    retractions: how often it was retracted.
    answer: fingerprints of its complete pages behind those of the prompt, in order. The first of them is the
    page in which the prompt ends, if it does not end with a page.
    """

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
    """L1 pages that the prefix tree holds from now on.

    first: index of the first of them in the request's pages.
    l1: L1 page ids.
    planned: they become real with the end of the step in flight, if it does not fail.
    """

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
    publish. freed: L1 pages dropped; an evict tells which. protected: L1 pages kept until those requests
    end."""

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
    """What passed over a physical link since the link's last such record. A link over which nothing passed
    has none.

    link: device_to_host, host_to_device, storage_to_host or host_to_storage.
    pages, bytes: what was moved.
    seconds: spent moving, summed over all threads.
    failures: pages that could not be moved, by reason; absent if there were none.
    """

    k: Literal["link"] = "link"
    link: str
    pages: int
    bytes: int
    seconds: float
    failures: dict[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(Record):
    """The log could not keep up: `count` records are missing here."""

    k: Literal["dropped"] = "dropped"
    count: int


KINDS: tuple[type[Record], ...] = (
    Header, Enqueue, RequestInfo, Admit, FetchStart, FetchJoin, FetchDone, RestoreStart, RestoreDone,
    PrefillStart, Prefill, PrefillDone, FirstToken, End, Reject, Retract, Publish, Evict, Flush, Stall, Step,
    Link, Dropped,
)  # fmt: skip


def values(record: Record) -> dict[str, Any]:
    """Field -> value, kind and time first. Fields without a value are left out."""
    names = [f.name for f in dataclasses.fields(record)]
    names.sort(key=lambda name: (name != "k", name != "t"))
    return {name: value for name in names if (value := getattr(record, name)) is not None}
