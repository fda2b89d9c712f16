"""Event records. Owns: the typed, frozen, versioned description of every decision.

Rules: a sink receives records and can never change behaviour: what it
raises is swallowed, counted, and the sink is switched off. No prompt text and no token ids appear
here, only lengths. `now` is the driver's clock, seconds. Names follow docs/terms.md's request timeline.
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
    """matched: tokens that were reusable from L1 when the request arrived (an observation)."""

    request: RequestId
    prompt_tokens: int
    matched: int
    parked: bool


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """matched: tokens reusable from L1 at admission. restored_host/restored_storage: of those that it starts
    behind, tokens whose final source is to be L2 or L3, copied for it or for another (sources.py). cached:
    all that it starts behind, pages that are only planned included. again: a re-admission after a
    retraction."""

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
    """pages: how many came; landed: how many got a place in L2."""

    fetch: int
    pages: int
    landed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RestoreStarted(Event):
    """The step being planned copies these L1 pages from L2, those of the request from page `first` on.
    fetches: for each the fetch that brought it to L2, 0 where it had been copied from L1."""

    request: RequestId
    first: int
    pages: tuple[int, ...]
    fetches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RestoreDone(Event):
    """A step's copies from L2 have been made. pages: of all its requests. seconds: that they took; 0 where
    nobody measured."""

    pages: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillStarted(Event):
    """The request's first chunk was planned."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Prefilled(Event):
    """A chunk of prefill ran. start, stop: the positions it computed. taken: what the request took from the
    cache since its last chunk. use: what both came to; sums of these are all that is known of reuse."""

    request: RequestId
    start: int
    stop: int
    taken: tuple[Taken, ...]
    use: Use


@dataclass(frozen=True, slots=True)
class PrefillDone(Event):
    """cached: prompt tokens reused (effective reuse, counted once); computed: positions computed."""

    request: RequestId
    cached: int
    computed: int


@dataclass(frozen=True, slots=True)
class FirstToken(Event):
    request: RequestId


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """cached: prompt tokens reused, of which host and storage came from L2 and L3. computed: positions
    computed, of which recomputed a second time (after a retraction), so that
    cached + computed - recomputed = prompt + outputs - 1 where it ran to its end. ran: whether any step of it
    did; else the tokens were not measured, which is not 0."""

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
    """error: what kind of refusal, the name of its class."""

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
    """pages added to the tree, from page `first` of the request's tokens on; planned: the step in flight
    computes them, or copies them from L2."""

    request: RequestId
    first: int
    pages: tuple[int, ...]
    planned: bool


@dataclass(frozen=True, slots=True)
class Evicted(Event):
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Flushed(Event):
    """From now on no request that is admitted finds what was published before, nor what those that run
    publish. freed, protected: L1 pages dropped, and kept until the requests that read them end."""

    freed: int
    protected: int


@dataclass(frozen=True, slots=True)
class Stalled(Event):
    stall: Stall


@dataclass(frozen=True, slots=True)
class Stepped(Event):
    """One committed step and the state after it (pages)."""

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
    """Hands records to a sink, behind a wall. kinds: those that the sink wants, None = all."""

    def __init__(self, sink: Sink | None, kinds: Collection[type[Event]] | None = None) -> None:
        self._sink = sink
        self._kinds = None if kinds is None else frozenset(kinds)
        self.failed: str | None = None

    def wants(self, kind: type[Event]) -> bool:
        """Whether anybody listens to these: else callers need not build a record."""
        return self._sink is not None and (self._kinds is None or kind in self._kinds)

    def __call__(self, event: Event) -> None:
        if self._sink is None or not self.wants(type(event)):
            return
        try:
            self._sink(event)
        except Exception as error:  # an observer must never reach the scheduler
            self.failed = f"{type(error).__name__}: {error}"
            self._sink = None
