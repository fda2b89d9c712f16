"""What a pool's choices add up to. Owns: `Tally`, its counts and the times to the first token."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from hotprefix.fleet.correction import BOUNDS
from hotprefix.fleet.records import Decision, Found, Stage


@dataclass(slots=True)
class Times:
    """Durations by bucket, the last without an upper end (`BOUNDS`, seconds)."""

    histogram: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.histogram[bisect_left(BOUNDS, seconds)] += 1
        self.total_s += seconds


@dataclass(slots=True)
class Tally:
    """Monotonic.

    rules: decisions by the rule that chose. matched: prompt tokens of decisions that need not be computed, by
    where they are (`Found`); prompt: all of them. ended: stays with a worker by how they ended. refused: by
    why. held: requests that waited here. retries: of requests whose answer had not begun. migrations: of
    answers that had begun, by why they left their worker, and what came of it. predicted, observed: seconds
    to the first token, of the same requests.
    """

    rules: Counter[str] = field(default_factory=Counter)
    matched: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(Found._fields, 0)))
    prompt: int = 0
    ended: Counter[Stage] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    held: int = 0
    retries: int = 0
    migrations: Counter[tuple[str, str]] = field(default_factory=Counter)
    predicted: Times = field(default_factory=Times)
    observed: Times = field(default_factory=Times)

    def decided(self, decision: Decision) -> None:
        self.rules[decision.rule] += 1
        self.prompt += decision.prompt
        for shelf, tokens in zip(Found._fields, decision.found, strict=True):
            if tokens:
                self.matched[shelf] += tokens

    def first_token(self, predicted_s: float, observed_s: float) -> None:
        self.predicted.add(predicted_s)
        self.observed.add(observed_s)
