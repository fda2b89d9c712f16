"""What goes into the fleet core and comes out of it. Owns: the frozen records of its edge.

Rules:
1. A record never changes. Two drivers that send equal records get equal decisions.
2. What is not known is None, never 0.

What a worker is stands in profile.py; a driver gets it from here, too. Units: tokens, pages, seconds, bytes.
A page key is the wire's 64-bit number of a page; it covers everything before the page, so equal keys at one
position mean equal prompts up to there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

from hotprefix.errors import ConfigError
from hotprefix.fleet.profile import LinkSpeed as LinkSpeed
from hotprefix.fleet.profile import Profile as Profile
from hotprefix.fleet.profile import Role as Role

Keys = tuple[int, ...]


class Shelf(IntEnum):
    """Where a worker keeps a page: device memory, host memory, external store (tiers, docs/terms.md)."""

    L1 = 0
    L2 = 1
    L3 = 2


class Stage(StrEnum):
    """How far a request has come on its worker. The last three end it.

    SENT: the worker has got it.
    FIRST_TOKEN: its prefill is done.
    ENDED, FAILED, CANCELLED: it is over.
    """

    SENT = "sent"
    FIRST_TOKEN = "first_token"
    ENDED = "ended"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Copying(StrEnum):
    """Why pages are computed although another worker has them, or computes them.

    NOT_ALLOWED: that worker may not be chosen (it drains, is full, or has another role).
    EARLIER_HERE: the first token was predicted to come earlier here.
    COSTS_OTHERS_LESS: it would come earlier there, but at the cost of other requests.
    BY_RULE: the policy's rule chose without a prediction.
    """

    NOT_ALLOWED = "not_allowed"
    EARLIER_HERE = "earlier_here"
    COSTS_OTHERS_LESS = "costs_others_less"
    BY_RULE = "by_rule"


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker said of itself.

    made: when, on the driver's clock.
    waiting: requests that have no row yet.
    prefill_tokens: prompt tokens that are still to be computed, of waiting and of running requests.
    decodes: requests that generate.
    free, evictable, owned, protected: L1's pages by state.
    incarnation: numbers this life of the worker; it grows when the worker begins again (its start time, for
    instance). None = not told.
    """

    made: float
    waiting: int
    prefill_tokens: int
    decodes: int
    free: int
    evictable: int
    owned: int
    protected: int
    incarnation: int | None = None


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request that needs a worker. Raises ConfigError if a value is out of range.

    keys: of the prompt's complete pages, in order.
    prompt: its tokens.
    outputs: expected output tokens.
    session, tenant, priority: as the client said.
    avoid: workers that must not be chosen (they have just failed it).
    """

    id: str
    keys: Keys
    prompt: int
    outputs: int = 1
    session: str | None = None
    tenant: str = ""
    priority: int = 0
    avoid: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.prompt < 1:
            raise ConfigError(f"prompt={self.prompt}: give at least one token", param="prompt")
        if self.outputs < 1:
            raise ConfigError(f"outputs={self.outputs}: give at least one token", param="outputs")


class Found(NamedTuple):
    """Prompt tokens that need not be computed on a worker, each counted once, by where they come from.

    flight: other requests are computing them there. peer: pulled from another worker.
    """

    l1: int = 0
    l2: int = 0
    l3: int = 0
    flight: int = 0
    peer: int = 0

    @property
    def total(self) -> int:
        return self.l1 + self.l2 + self.l3 + self.flight + self.peer


class Parts(NamedTuple):
    """Predicted seconds.

    queue: until the work before it is done, or the pages that others compute for it are there.
    restore: its pages come from L2 and L3. pull: from a peer. These three overlap.
    compute: its own tokens. hand_off: the last pages go to the decode worker. decode_wait: until that has
    room.
    delay: what the choice costs those that decode there, summed over them. behind: what it costs those that
    will come behind it in the queue, likewise.
    displacement: computing again what must be evicted for it, times how likely that is wanted. None: not
    known.
    """

    queue: float
    restore: float
    pull: float
    compute: float
    hand_off: float
    decode_wait: float
    delay: float
    behind: float
    displacement: float | None

    @property
    def first(self) -> float:
        """Seconds until the first token: the critical path, not a sum."""
        return max(self.queue, self.restore, self.pull) + self.compute + self.hand_off + self.decode_wait


class Load(NamedTuple):
    """A worker's load by component; 1 = as much as it should have. None: not known.

    prefill: outstanding prefill work. decode: rows in use. pages: owned and protected pages. restore,
    hand_off: outstanding work of these links.
    """

    prefill: float
    decode: float
    pages: float | None
    restore: float
    hand_off: float

    @property
    def largest(self) -> float:
        """The load as one number: the largest component that is known."""
        return max(self.prefill, self.decode, self.pages or 0.0, self.restore, self.hand_off)


class RunnerUp(NamedTuple):
    """A worker that was not chosen."""

    worker: str
    found: Found
    parts: Parts
    load: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Which worker serves a request, and why (the `route` event of docs/terms.md).

    at: when it was made.
    worker, incarnation: where the prompt is computed.
    decode, decode_incarnation: where the answer is generated; the same unless roles are split.
    peer: the worker to pull pages from.
    prompt: the request's prompt tokens, the denominator of `found` and `available`.
    found: what the chosen worker need not compute.
    available: the most that any worker of the fleet need not compute.
    parts: what was predicted for the chosen worker.
    load: its load.
    runners_up: the next best by prediction, best first.
    rule: which rule of the policy decided.
    age_s: how old the worker's report was. None: there is none.
    unknown: what was not known of the chosen worker.
    copying: why pages are computed a further time; None if they are not. copied: how many tokens.
    """

    request: str
    at: float
    worker: str
    incarnation: int
    decode: str
    decode_incarnation: int
    peer: str | None
    prompt: int
    found: Found
    available: int
    parts: Parts
    load: Load
    runners_up: tuple[RunnerUp, ...]
    rule: str
    age_s: float | None
    unknown: tuple[str, ...]
    copying: Copying | None
    copied: int


@dataclass(frozen=True, slots=True)
class Wait:
    """No worker may be chosen now. Route the request again at `until`, or when `Fleet.wake_at` says so.

    expired: it has waited as long as it may, and there is no worker for it: refuse it.
    """

    request: str
    reason: str
    until: float
    expired: bool = False


class Seen(NamedTuple):
    """What was observed of a request by its first token. None: not known.

    queue_s: from its being sent to the begin of its prefill. compute_s: from there to its first token.
    cached: prompt tokens that the worker did not compute.
    whole: the answer came in one piece at its end, so when its first token came is not known.
    """

    queue_s: float | None = None
    compute_s: float | None = None
    cached: int | None = None
    whole: bool = False


class Change(NamedTuple):
    """What one event says of a worker's pages. cleared: all its pages of this shelf are gone, before `stored`
    came."""

    shelf: Shelf
    stored: Keys = ()
    removed: Keys = ()
    cleared: bool = False


class Batch(NamedTuple):
    """A worker's numbered batch of events. The first after its start is number 0.

    made: when the worker made it, on its own clock; tells a new life from a batch that came twice. None = not
    told.
    incarnation: as in `WorkerReport`.
    """

    number: int
    changes: tuple[Change, ...]
    made: float | None = None
    incarnation: int | None = None


class ReplayWanted(NamedTuple):
    """Events are missing: ask the worker for its batches from number `first` on, and hand them in with this
    record. incarnation, ticket: by these the fleet knows whether it still waits for them."""

    worker: str
    first: int
    incarnation: int
    ticket: int
