"""The fleet's configuration. Owns: the names of the policies and terms, and the limits of one fleet.

Rules: frozen, validated once when it is built, and never read from the environment. An error's message
carries the offending value and the fix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from hotprefix.errors import ConfigError


class RoutingPolicy(StrEnum):
    """How a worker is chosen (policies.py has one function for each)."""

    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    LEAST_REQUESTS = "least_requests"
    SESSION = "session"
    LEAST_LOAD = "least_load"
    AFFINITY = "affinity"
    BOUNDED = "bounded"
    PREDICTED = "predicted"
    PLAN = "plan"
    EQUAL_TPS = "equal_tps"


class Term(StrEnum):
    """A term of the prediction. If it is left out, it is as if its cost were 0.

    QUEUE: the work that stands before the request.
    RESTORE: bringing pages from L2 and L3.
    PULL: pulling pages from a peer.
    IN_FLIGHT: waiting for pages that other requests compute. Left out, such pages are not counted on.
    DELAY: what the request costs those that decode.
    BEHIND: what it costs those that come behind it.
    DISPLACEMENT: what it costs to compute again what it displaces.
    """

    QUEUE = "queue"
    RESTORE = "restore"
    PULL = "pull"
    IN_FLIGHT = "in_flight"
    DELAY = "delay"
    BEHIND = "behind"
    DISPLACEMENT = "displacement"


class Homes(StrEnum):
    """Which worker a new session gets.

    HASH: by a hash of session and worker, so that two routers agree without talking to each other.
    TURNS: the workers by turns, so that each gets as many.
    """

    HASH = "hash"
    TURNS = "turns"


def _whole(config: object, name: str, low: int, prefix: str = "") -> None:
    value = getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{prefix}{name}={value!r}: give a whole number >= {low}", param=name)


def _number(config: object, name: str, above: float | None = None, prefix: str = "") -> None:
    value = getattr(config, name)
    if not (0 <= value < math.inf) or (above is not None and value <= above):
        wanted = "a number >= 0" if above is None else f"a number > {above:g}"
        raise ConfigError(f"{prefix}{name}={value!r}: give {wanted}", param=name)


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """the policy `plan` (CacheRoute, arXiv 2608.19677). Raises ConfigError if a value is out of range.

    period_s: from one plan to the next.
    anchor_pages: requests that share this many leading pages have one key; of shorter prompts all pages
    count.
    slots: keys for which a worker has room.
    capacity: requests a second that a worker without a calibrated capacity is taken to serve.
    keep: share of the mean load by which a placement may be worse than the best and still stay.
    keys: of how many keys rates are remembered.
    """

    period_s: float = 30.0
    anchor_pages: int = 16
    slots: int = 64
    capacity: float = 1.0
    keep: float = 0.1
    keys: int = 65536

    def __post_init__(self) -> None:
        for name in ("anchor_pages", "slots", "keys"):
            _whole(self, name, 1, "plan.")
        for name in ("period_s", "capacity"):
            _number(self, name, above=0.0, prefix="plan.")
        _number(self, "keep", prefix="plan.")


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Everything one fleet needs to know. Raises ConfigError if a value is out of range.

    page_size: tokens of a page key. A worker with another page size is refused.
    policy: see `RoutingPolicy`. terms: the terms of the prediction that are on. homes: see `Homes`.
    plan: the policy `plan`'s settings.
    spread: c of `bounded`: a worker may have (1 + c) times the mean load.
    slack: share by which predictions may differ and still count as equal.
    floor: below this load no worker counts as overloaded.
    delay_weight: what a second of delay of one decoding request counts, in seconds of the first token.
    behind_weight: what a second of work counts for each request that stands in the worker's queue.
    displacement_weight: what a second of computing again counts.
    horizon_s: outstanding work of a link or of prefill that takes so long is a load of 1.
    bound: requests that a worker may have at a time; 0 = no bound. hold_s: the longest wait at the fleet.
    runners_up: how many of them a decision names.
    report_ttl_s: an older report is not known any more.
    confirm_s: how long pages count as there after the first token of the request that made them, if no event
    confirms it. presume_s: the same for workers that send no events.
    entries: page keys that the index holds at most.
    held: batches that are held back while a replay is awaited; with more, the worker's entries are dropped.
    sessions: homes of sessions that are remembered at most.
    window: observations from which a worker's predictions are corrected.
    """

    page_size: int = 16
    policy: RoutingPolicy = RoutingPolicy.PREDICTED
    terms: frozenset[Term] = frozenset(Term)
    homes: Homes = Homes.HASH
    plan: PlanConfig = PlanConfig()
    spread: float = 0.25
    floor: float = 0.1
    slack: float = 0.05
    delay_weight: float = 0.02
    behind_weight: float = 2.0
    displacement_weight: float = 1.0
    horizon_s: float = 1.0
    bound: int = 0
    hold_s: float = 10.0
    runners_up: int = 3
    report_ttl_s: float = 10.0
    confirm_s: float = 1.0
    presume_s: float = 300.0
    entries: int = 4_000_000
    held: int = 4096
    sessions: int = 65536
    window: int = 32

    def __post_init__(self) -> None:
        for name, low in (
            ("page_size", 1), ("bound", 0), ("runners_up", 0), ("entries", 1), ("held", 1), ("sessions", 1),
            ("window", 1),
        ):  # fmt: skip
            _whole(self, name, low)
        for name in (
            "spread", "floor", "slack", "delay_weight", "behind_weight", "displacement_weight", "hold_s",
            "confirm_s", "presume_s",
        ):  # fmt: skip
            _number(self, name)
        for name in ("horizon_s", "report_ttl_s"):
            _number(self, name, above=0.0)
        if not isinstance(self.policy, RoutingPolicy):
            raise ConfigError(
                f"policy={self.policy!r}: give one of {', '.join(RoutingPolicy)}", param="policy"
            )
        if wrong := [term for term in self.terms if not isinstance(term, Term)]:
            raise ConfigError(f"terms={wrong!r}: give some of {', '.join(Term)}", param="terms")
