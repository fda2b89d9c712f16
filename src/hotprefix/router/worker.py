"""One worker as the router knows it. Owns: `Worker`: what it said last, whether it may get requests, and what
went wrong with it.

Rules:
1. Two things keep a worker from getting requests for a while: it does not answer questions (`silent`), or
   requests failed there (its breaker). Neither touches its load or what it is known to have cached.
2. A success or a failure counts for the breaker; that it answers questions does not, and the other way round.
   A new life of the worker begins with a closed breaker.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hotprefix.engine.stores.breaker import Breaker, BreakerConfig, BreakerState
from hotprefix.router.calls import Call, Why
from hotprefix.router.heard import Heard
from hotprefix.router.upstream import Upstream
from hotprefix.router.worker_spec import Kind, WorkerSpec

Say = Callable[[str], None]


@dataclass(eq=False, slots=True)
class Worker:
    """See the module's rules.

    heard: what it said last; None = nothing yet. asked: when it was asked for that, on the router's clock.
    cards_at: when it was asked for its models. model: the pool that it
    belongs to. prices: whose it has. events: its KV events are read.
    silent: it does not answer. why: what was wrong last; "" = nothing. misses: questions in a row without an
    answer.
    draining: it gets no new requests. listed: it comes from the list that is re-read.
    calls: requests under way there. requests: that were sent there. failures: by kind. restarts: lives that
    were seen to begin.
    """

    spec: WorkerSpec
    upstream: Upstream
    breaker_config: BreakerConfig
    say: Say
    listed: bool = False
    heard: Heard | None = None
    asked: float = 0.0
    cards_at: float = -math.inf
    model: str | None = None
    prices: str | None = None
    events: bool = False
    silent: bool = True
    why: str = "not asked yet"
    misses: int = 0
    draining: bool = False
    calls: set[Call] = field(default_factory=set)
    requests: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    breaker: Breaker = field(init=False)

    def __post_init__(self) -> None:
        self.breaker = Breaker(self.breaker_config)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def trouble(self) -> bool:
        """It may have to be avoided; `refuses` says whether it has to."""
        return self.silent or self.breaker.state is not BreakerState.CLOSED

    @property
    def resumes(self) -> bool:
        """It is an own engine that takes answers up which another one began."""
        return self.heard is not None and self.heard.kind is Kind.HOTPREFIX and self.heard.resume

    def refuses(self, now: float) -> bool:
        """It must get no request now."""
        return self.silent or self.breaker.refuses(now)

    def chosen(self, now: float) -> bool:
        """A request was given to it. Returns whether it is the breaker's probe."""
        self.requests += 1
        self.breaker.enter(now)
        return self.breaker.state is BreakerState.HALF_OPEN

    def failed(self, kind: str, why: str, now: float) -> None:
        """A request failed, by the worker's fault."""
        self.failures[kind] += 1
        self.why = why
        opened = self.breaker.opened
        self.breaker.failure(now)
        if self.breaker.opened > opened:
            self.say(f"worker {self.name}: requests fail ({why}), so it gets none for a while")

    def succeeded(self) -> None:
        """A request was answered well."""
        if self.breaker.state is BreakerState.HALF_OPEN:
            self.say(f"worker {self.name}: answers again")
        self.breaker.success()

    def missed(self, why: str, most: int) -> bool:
        """It did not answer a question. Returns whether it has fallen silent by that: then what waits for it
        is interrupted."""
        self.misses += 1
        if self.heard is None or self.misses < most:
            if self.heard is None and why != self.why:
                self.say(f"worker {self.name}: {why}; it is asked again and again")
            self.why = why
            return False
        fell = not self.silent
        self.silent, self.why = True, why
        if fell:
            self.say(
                f"worker {self.name}: {why}, {self.misses} times in a row: it gets none until it answers"
            )
            self.interrupt()
        return fell

    def interrupt(self) -> None:
        """What waits for the worker waits no more. What gives its client a part of the answer finishes that,
        and then sees that the worker is silent."""
        for call in list(self.calls):
            if not call.giving:
                call.interrupt(Why.WORKER_SILENT)

    def answered(self, heard: Heard) -> bool:
        """It answered a question. Returns whether it has begun again since the last one."""
        before = self.heard
        began = before is not None and before.incarnation != heard.incarnation
        if began:
            self.restarts += 1
            self.breaker = Breaker(self.breaker_config)
            self.say(f"worker {self.name}: has begun again; what it had cached is gone")
        if self.silent and before is not None:
            self.say(f"worker {self.name}: answers questions again")
        self.upstream.kind = heard.kind  # from now on it is asked as what it is
        self.heard = heard
        self.silent, self.misses = False, 0
        if self.breaker.state is BreakerState.CLOSED:
            self.why = ""
        return began

    @property
    def state(self) -> str:
        """In a word."""
        if self.draining:
            return "draining"
        if self.heard is None:
            return "unknown"
        if self.silent:
            return "silent"
        return "ready" if self.breaker.state is BreakerState.CLOSED else "failing"
