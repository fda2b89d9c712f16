"""Event records. Owns: the typed, frozen description of every decision.

Rules:
1. A sink receives records and can never change behaviour. If it raises, the error is kept (`Emitter.failed`)
   and the sink is switched off (rule 4).
2. No prompt text and no token ids appear here, only lengths.
3. `now` is the driver's clock, in seconds. Names follow the request timeline of docs/terms.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from hotprefix.kernel.plan import Finish, Stall
from hotprefix.kernel.request import RequestId
from hotprefix.kernel.sources import Taken, Use


@dataclass(frozen=True, slots=True)
class Event:
    now: float


@dataclass(frozen=True, slots=True)
class Enqueued(Event):
    """A request was submitted.

    matched: tokens that were reusable from L1 at that moment (an observation only).
    parked: it waits for a flight's leader, outside the queue.
    """

    request: RequestId
    prompt_tokens: int
    matched: int
    parked: bool


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """A request begins to run.

    matched: tokens reusable from L1 at this moment.
    matched_at_enqueue: the same at its arrival.
    cached: leading tokens that it need not compute, those of planned pages included.
    restored_host, restored_storage: the parts of `cached` whose final source is L2, and L3, copied for it or
    for another request (sources.py).
    waited: seconds since its arrival.
    again: it was admitted before, and retracted.
    """

    request: RequestId
    matched: int
    matched_at_enqueue: int
    restored_host: int
    restored_storage: int
    cached: int
    waited: float
    again: bool


@dataclass(frozen=True, slots=True)
class FetchStarted(Event):
    """Pages are being read from L3 (one fetch may serve several requests)."""

    fetch: int
    request: RequestId
    pages: int


@dataclass(frozen=True, slots=True)
class FetchJoined(Event):
    """A request waits for a fetch that another has begun."""

    fetch: int
    request: RequestId


@dataclass(frozen=True, slots=True)
class FetchEnded(Event):
    """A fetch has ended, after `seconds`. pages: how many came. landed: how many of them got a place in
    L2."""

    fetch: int
    pages: int
    landed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RestoreStarted(Event):
    """The step being planned copies these L1 pages from L2.

    first: index of the first of them in the request's pages.
    pages: L1 page ids.
    fetches: for each page the number of the fetch that brought it to L2; 0 if it was copied there from L1.
    """

    request: RequestId
    first: int
    pages: tuple[int, ...]
    fetches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RestoreDone(Event):
    """A step's copies from L2 have been made. pages: those of all its requests. seconds: how long they took;
    0 if that was not measured."""

    pages: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillStarted(Event):
    """The request's first chunk was planned."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Prefilled(Event):
    """A chunk of prefill ran.

    start, stop: it computed positions [start, stop).
    taken: what the request took from the cache since its last chunk.
    use: what both came to. All figures of reuse are sums of these.
    """

    request: RequestId
    start: int
    stop: int
    taken: tuple[Taken, ...]
    use: Use


@dataclass(frozen=True, slots=True)
class PrefillDone(Event):
    """All known tokens have KV. cached: tokens reused so far, each once (effective reuse). computed:
    positions computed so far."""

    request: RequestId
    cached: int
    computed: int


@dataclass(frozen=True, slots=True)
class FirstToken(Event):
    request: RequestId


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """A request has ended. If it ran to its end, cached + computed - recomputed = prompt + outputs - 1.

    cached: tokens reused.
    host, storage: the parts of `cached` that came from L2, and from L3.
    computed: positions computed.
    recomputed: the part of `computed` that was computed a second time, after a retraction.
    ran: whether any prefill step of it ran. If not, its counts of tokens were not measured, which is not 0.
    """

    request: RequestId
    reason: Finish
    cached: int
    host: int
    storage: int
    computed: int
    recomputed: int
    outputs: int
    retractions: int
    ran: bool


@dataclass(frozen=True, slots=True)
class Rejected(Event):
    """A request was refused at submission. error: the kind of refusal, by the name of its class. reason: its
    message."""

    request: RequestId
    error: str
    reason: str


@dataclass(frozen=True, slots=True)
class Retracted(Event):
    request: RequestId
    reason: str
    lost: int


@dataclass(frozen=True, slots=True)
class Published(Event):
    """Pages were added to the tree.

    first: index of the first of them in the request's pages.
    pages: L1 page ids.
    planned: the step being planned computes them, or copies them from L2; they are not real before it ran.
    """

    request: RequestId
    first: int
    pages: tuple[int, ...]
    planned: bool


@dataclass(frozen=True, slots=True)
class Evicted(Event):
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Flushed(Event):
    """From now on no request that is admitted finds what was published before, nor what the requests that run
    now publish. freed: L1 pages dropped. protected: L1 pages kept until the requests that read them end."""

    freed: int
    protected: int


@dataclass(frozen=True, slots=True)
class Stalled(Event):
    stall: Stall


@dataclass(frozen=True, slots=True)
class Stepped(Event):
    """One committed step, and the state after it.

    prefill_tokens, decode_tokens: positions computed, in all repeats of the step.
    running, waiting: requests; those that are parked count as waiting.
    free, evictable, protected: pages of L1.
    """

    step: int
    ok: bool
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    free: int
    evictable: int
    protected: int


Sink = Callable[[Event], None]


class Emitter:
    """Hands records to a sink, so that no error of the sink comes back.

    kinds: the kinds of events that the sink wants; None = all.
    failed: why the sink was switched off; None if it was not.
    """

    def __init__(self, sink: Sink | None, kinds: Collection[type[Event]] | None = None) -> None:
        self._sink = sink
        self._kinds = None if kinds is None else frozenset(kinds)
        self.failed: str | None = None

    def wants(self, kind: type[Event]) -> bool:
        """Whether the sink takes events of this kind. If not, callers need not build a record."""
        return self._sink is not None and (self._kinds is None or kind in self._kinds)

    def __call__(self, event: Event) -> None:
        if self._sink is None or not self.wants(type(event)):
            return
        try:
            self._sink(event)
        except Exception as error:  # an observer must never reach the scheduler
            self.failed = f"{type(error).__name__}: {error}"
            self._sink = None
