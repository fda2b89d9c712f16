"""Kernel configuration. Owns: the names of the policies and the limits of one kernel.

Rules:
1. A configuration is frozen, validated once when it is built, and never read from the environment.
2. An error's message carries the offending value and the fix.

Units: tokens, pages, seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from hotprefix.errors import ConfigError


class Choice(StrEnum):
    """A policy's values. help: what a value does and when to use it, one line."""

    _value_: str
    help: str

    def __new__(cls, value: str, help: str) -> Self:
        one = str.__new__(cls, value)
        one._value_, one.help = value, help
        return one


class Publication(Choice):
    """When computed pages can be found by other requests (publication, docs/terms.md)."""

    FINISH = "finish", "when the request ends; only to compare with"
    PREFILL = "prefill", "when its prompt is done; only to compare with"
    STEP = "step", "after each forward pass; if the executor cannot read pages that the same step computes"
    SCHEDULE = "schedule", "when the step that computes them is planned, so its requests share them; the best"


class Flight(Choice):
    """Which request computes a prompt that several requests need (flight, docs/terms.md)."""

    NONE = "none", "each request computes what it cannot find; only to compare with"
    EXACT_FINISH = "exact-finish", "identical prompts wait until their leader has ended; only to compare with"
    EXACT_PREFILL = (
        "exact-prefill",
        "identical prompts wait until their leader's prompt is published; only to compare with",
    )
    COALESCED = "coalesced", "each page by the request that reaches it first, and no request waits; the best"


class Order(Choice):
    """In which order waiting requests are tried (rules 21 to 23)."""

    FCFS = "fcfs", "by arrival; fair, and the usual choice"
    LPM = "lpm", "the longest prefix in the cache first; for more reuse if the queue is long"
    SPF = "spf", "the fewest tokens to compute first; for a lower mean wait if prompts differ much in size"
    DFS = "dfs", "requests of one prefix together, the largest group first; for batches over shared texts"
    PRIORITY = "priority", "the smallest priority number first; if clients send `priority`"


class Eviction(Choice):
    """Which unpinned leaf loses its tail first (rule 15); the keys are in kernel/cache/evict.py."""

    LRU = "lru", "the least recently used; the usual choice"
    LFU = "lfu", "the least often used; for a few prefixes that stay popular"
    SLRU = "slru", "those never used again first, then lru; if many prompts come only once"
    FIFO = "fifo", "the oldest; only to compare with"
    PRIORITY = "priority", "those of the least important requests, then lru; if clients send `priority`"
    SIEVE = (
        "sieve",
        "the oldest not used since the last look (SIEVE, NSDI'24); like slru it protects what was used "
        "again, by a mark instead of a count",
    )
    REUSE = "reuse", "the one expected back last; for replays only, an engine does not predict that"


class Refresh(Choice):
    """What the waiting queue tells the cache (refresh, docs/terms.md)."""

    OFF = "off", "nothing; only to compare with"
    WINDOW = "window", "the prefixes of the first waiting requests become recent before the queue is ordered"
    QUEUE_INFORMED = "queue_informed", "recency stays; pages that these requests need are evicted last"


class Write(Choice):
    """When pages get a copy in L2."""

    THROUGH = "through", "as soon as they are published; nothing is lost by an eviction"
    SELECTIVE = "selective", "when they are used a second time; if many prompts come only once"
    BACK = "back", "when L1 evicts them; the fewest copies, but made while memory is short"


class Prefetch(Choice):
    """How long a request waits for its pages from L3."""

    BEST_EFFORT = "best_effort", "not at all; it uses what has come when it is its turn"
    WAIT_COMPLETE = "wait_complete", "until its fetch has ended; if computing costs much more than fetching"
    TIMEOUT = "timeout", "until its fetch has ended, at most the prefetch timeout after its arrival"


@dataclass(frozen=True, slots=True)
class TierConfig:
    """The tiers below L1. Raises ConfigError if a value is out of range.

    pages: of L2.
    storage: whether there is an L3.
    write: when pages get a copy in L2.
    prefetch: how long a request waits for its pages from L3.
    prefetch_timeout_s: the longest wait of `Prefetch.TIMEOUT`, from the request's arrival.
    min_restore_pages: fewer pages than these are computed rather than restored from L2.
    min_fetch_pages: fewer pages than these are computed rather than fetched from L3.
    fetch_window: how many waiting requests, from the head of the queue, may start a fetch.
    compute_s_per_token: what predictions of a prefill start from; None = not known.
    restore_s_per_page: what predictions of a restore start from; None = not known.
    fetch_s_per_page: what predictions of a fetch start from; None = not known.
    """

    pages: int
    storage: bool = False
    write: Write = Write.THROUGH
    prefetch: Prefetch = Prefetch.TIMEOUT
    prefetch_timeout_s: float = 1.0
    min_restore_pages: int = 2
    min_fetch_pages: int = 4
    fetch_window: int = 32
    compute_s_per_token: float | None = None
    restore_s_per_page: float | None = None
    fetch_s_per_page: float | None = None

    def __post_init__(self) -> None:
        for name in ("pages", "min_restore_pages", "min_fetch_pages", "fetch_window"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"tiers.{name}={value!r}: give a whole number >= 1", param=name)
        if not 0 <= self.prefetch_timeout_s < math.inf:
            raise ConfigError(
                f"tiers.prefetch_timeout_s={self.prefetch_timeout_s}: give seconds >= 0",
                param="prefetch_timeout_s",
            )
        _require_kinds(self, (("write", Write), ("prefetch", Prefetch)), "tiers.")


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that do not attend to the whole prefix, with a pool of their own (kernel/cache/frames.py).
    Raises ConfigError if a value is out of range.

    frames: size of the pool. A frame is one page's KV in these layers, or one checkpoint of their state.
    window: tokens that a position sees, itself included. None: the layers keep a recurrent state, one that
    stands for all tokens so far.
    """

    frames: int
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("frames",) if self.window is None else ("frames", "window"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"groups.{name}={value!r}: give a whole number >= 1", param=name)

    @property
    def lookback(self) -> int:
        """How many tokens before a position must have their KV, or state, to compute it. A recurrent state
        needs only the one before it."""
        return 1 if self.window is None else self.window - 1

    def reach(self, page_size: int) -> int:
        """How many pages at a prefix's end must have frames to go on after it."""
        return -(-self.lookback // page_size)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the executor can do.

    same_step_reads: all KV of a layer is written before that layer's attention reads it, so a request may
    read pages that another request computes in the same step.
    """

    same_step_reads: bool = True


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Everything one kernel needs to know. Raises ConfigError if a value is out of range.

    total_pages: pages of L1. With `groups` these are the full-attention layers' alone, or, if there are no
    such layers, the number of page names.
    page_size: tokens per page.
    max_batched_tokens: tokens that one step may compute.
    max_running: requests that may run at a time.
    max_waiting: how many requests may wait; 0 = no limit. A request for which a row is free does not count.
    prefix_cache: whether computed pages are reused at all.
    publication, flight, order, eviction: see `Publication`, `Flight`, `Order`, `Eviction`.
    preemption: with order `priority`, a waiting request may displace less important running ones.
    max_overtakes: how often later arrivals may be admitted ahead of one request. After that no request may
    overtake it. It ages every cache-aware order, and bounds the look-ahead past a head that does not fit.
    lookahead: how many requests behind a head that does not fit are tried.
    output_reserve: share of the running requests' remaining outputs for which an admission leaves room, 0 to
    1. It goes to 1 at a retraction and decays back.
    max_elections: how often in a row a flight may get a new leader; then its requests run on their own.
    max_step_failures: how many failed steps a request survives.
    refresh: see `Refresh`.
    refresh_window: how many waiting requests a refresh looks at.
    refresh_every: planning passes from one refresh to the next.
    session_pages: pages that holds of sessions may keep protected; 0 = none.
    tiers: what lies below L1; None = nothing.
    groups: the layer groups that need less than the whole prefix.
    """

    total_pages: int
    page_size: int = 16
    max_batched_tokens: int = 2048
    max_running: int = 64
    max_waiting: int = 0
    prefix_cache: bool = True
    publication: Publication = Publication.SCHEDULE
    flight: Flight = Flight.COALESCED
    order: Order = Order.FCFS
    eviction: Eviction = Eviction.LRU
    preemption: bool = False
    max_overtakes: int = 32
    lookahead: int = 8
    output_reserve: float = 0.25
    max_elections: int = 3
    max_step_failures: int = 2
    refresh: Refresh = Refresh.WINDOW
    refresh_window: int = 128
    refresh_every: int = 1
    session_pages: int = 0
    tiers: TierConfig | None = None
    groups: tuple[LayerGroup, ...] = ()

    def __post_init__(self) -> None:
        for name, low in (
            ("total_pages", 1), ("page_size", 1), ("max_batched_tokens", 1), ("max_running", 1),
            ("max_waiting", 0), ("max_overtakes", 0), ("lookahead", 0), ("max_elections", 0),
            ("max_step_failures", 0), ("refresh_window", 0), ("refresh_every", 1), ("session_pages", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{name}={value!r}: give a whole number >= {low}", param=name)
        if not 0.0 <= self.output_reserve <= 1.0:
            raise ConfigError(
                f"output_reserve={self.output_reserve!r}: give a share from 0 to 1", param="output_reserve"
            )
        if self.max_running > self.max_batched_tokens:
            raise ConfigError(
                f"max_running={self.max_running} exceeds max_batched_tokens={self.max_batched_tokens}: "
                "each running request needs one token a step; lower the first or raise the second",
                param="max_running",
            )
        kinds: tuple[tuple[str, type[StrEnum]], ...] = (
            ("publication", Publication), ("flight", Flight), ("order", Order), ("eviction", Eviction),
            ("refresh", Refresh),
        )  # fmt: skip
        _require_kinds(self, kinds)
        self._check_groups()

    def _check_groups(self) -> None:
        if self.groups and self.tiers is not None:
            raise ConfigError(
                "groups: L2 and L3 hold pages of all layers and know no windows; leave out one of both",
                param="tiers",
            )
        for group in self.groups:
            least = group.reach(self.page_size) + 1
            if group.window is not None and group.frames < least:
                raise ConfigError(
                    f"groups.frames={group.frames}: a window of {group.window} tokens needs {least} pages of "
                    f"{self.page_size} at least",
                    param="frames",
                )


def _require_kinds(config: object, kinds: Iterable[tuple[str, type[StrEnum]]], prefix: str = "") -> None:
    for name, kind in kinds:
        value = getattr(config, name)
        if not isinstance(value, kind):
            allowed = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
            raise ConfigError(
                f"{prefix}{name}={value!r} is a {type(value).__name__}: give one of {allowed}", param=name
            )
