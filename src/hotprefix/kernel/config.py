"""Kernel configuration. Owns: the names of the policies and the limits of one kernel.

Rules: frozen, validated once when built, never read from the environment; messages carry the
offending value and the fix. Units: tokens, pages, seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from hotprefix.errors import ConfigError


class Publication(StrEnum):
    """When computed pages become visible to other requests (publication, docs/terms.md)."""

    FINISH = "finish"
    PREFILL = "prefill"
    STEP = "step"
    SCHEDULE = "schedule"


class Flight(StrEnum):
    """Who computes a prompt several requests need (flight, docs/terms.md)."""

    NONE = "none"
    EXACT_FINISH = "exact-finish"
    EXACT_PREFILL = "exact-prefill"
    COALESCED = "coalesced"


class Order(StrEnum):
    """In which order waiting requests are tried (rules 21 to 23)."""

    FCFS = "fcfs"
    LPM = "lpm"
    SPF = "spf"
    DFS = "dfs"
    PRIORITY = "priority"


class Eviction(StrEnum):
    """Which unpinned leaf loses its tail first (rule 15)."""

    LRU = "lru"
    LFU = "lfu"
    SLRU = "slru"
    FIFO = "fifo"
    PRIORITY = "priority"
    SIEVE = "sieve"
    REUSE = "reuse"


class Refresh(StrEnum):
    """What the waiting queue tells the cache (refresh, docs/terms.md)."""

    OFF = "off"
    WINDOW = "window"
    QUEUE_INFORMED = "queue_informed"


class Write(StrEnum):
    """When pages get a copy in L2: as soon as they are published, when somebody reuses them, or when L1
    evicts them."""

    THROUGH = "through"
    SELECTIVE = "selective"
    BACK = "back"


class Prefetch(StrEnum):
    """How long a request waits for its pages from L3: not at all, to the end, or up to a time."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class TierConfig:
    """The tiers below L1. pages: of L2. storage: whether there is an L3. prefetch_timeout_s counts from
    enqueue. min_restore_pages/min_fetch_pages: below that pages are computed. compute_s_per_token,
    restore_s_per_page, fetch_s_per_page: what predictions start from, None = not known. Raises
    ConfigError."""

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


class Role(StrEnum):
    """What this instance is for. It decides one thing: a decode-only one refreshes no waiting prefixes."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class GroupKind(StrEnum):
    """What layers that do not attend to the whole prefix keep of it: the KV of the last tokens, or one
    state that stands for all of them."""

    WINDOW = "window"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind with a pool of their own (kernel/cache/frames.py). frames: of the pool, each one
    page's KV in these layers, or one checkpoint of their state. window: tokens a position sees, itself
    included (WINDOW only). Raises ConfigError."""

    kind: GroupKind
    frames: int
    window: int | None = None

    def __post_init__(self) -> None:
        _require_kinds(self, (("kind", GroupKind),), "groups.")
        sizes = ("frames", "window") if self.kind is GroupKind.WINDOW else ("frames",)
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"groups.{name}={value!r}: give a whole number >= 1", param=name)
        if self.kind is GroupKind.RECURRENT and self.window is not None:
            raise ConfigError(f"groups.window={self.window}: a recurrent state has none", param="window")

    @property
    def lookback(self) -> int:
        """Tokens before a position that must be there to compute it; a state stands for its last one."""
        return 1 if self.window is None else self.window - 1

    def reach(self, page_size: int) -> int:
        """Pages at a prefix's end that must be there to go on after it."""
        return -(-self.lookback // page_size)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the executor can do. `same_step_reads`: all KV of a layer is written before attention of
    that layer reads it, so a request may read pages another computes in the same step."""

    same_step_reads: bool = True


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Everything one kernel needs to know. Raises ConfigError where a value is out of range.

    total_pages: pages of L1. page_size: tokens per page. max_batched_tokens: tokens one step may
    compute. max_running: requests that hold pages at a time. max_waiting: queue limit, 0 = none; who
    will find a free slot is not in the queue yet.
    max_overtakes: how often later arrivals may be admitted ahead of one request before nobody may
    overtake it any more (ageing of every cache-aware order, and the bound on look-ahead past a head
    that does not fit). lookahead: how many requests behind a head that does not fit are tried.
    output_reserve: share of a running request's remaining outputs that admission keeps free
    (over-commit); goes to 1 at a retraction and decays back. refresh_window: waiting requests that
    refresh looks at; refresh_every: passes between refreshes. session_pages: pages that ended requests
    of sessions may keep protected, 0 = none. tiers: None = L1 only. groups: the layer groups that need
    less than a whole prefix; `total_pages` is then the full-attention layers' alone, or, where there are
    none, the number of page names.
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
    role: Role = Role.BOTH
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
            ("refresh", Refresh), ("role", Role),
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
            if group.kind is GroupKind.WINDOW and group.frames < least:
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
