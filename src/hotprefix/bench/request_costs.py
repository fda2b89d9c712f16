"""What one request and one group of requests cost. Owns: the record of a request, the counts and timings of a
group, and the duplication factor.

Rules: counts are tokens; they depend on nothing but the policy, so every run gives the same. Timings are
seconds of one monotonic clock. What was not measured is None, never 0 (docs/terms.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hotprefix.bench.workloads import Submission
from hotprefix.kernel import tokens as tk


@dataclass(frozen=True, slots=True)
class Record:
    """One finished request.

    restored: prompt tokens from the cache.
    computed: prompt positions that the model ran for it.
    ttft, completion: seconds from its own submission.
    ended: seconds from its wave's barrier.
    """

    submission: Submission
    restored: int
    computed: int
    outputs: tuple[int, ...]
    ttft: float
    completion: float
    ended: float


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of one group in one run.

    required: what perfect sharing with an unlimited cache computes.
    restored_each: of each follower, in submission order.
    """

    requests: int
    prompt: int
    restored: int
    computed: int
    required: int
    restored_each: tuple[int, ...]

    @property
    def duplication(self) -> float:
        """Prompt tokens computed / distinct prompt tokens that had to be computed; 1.0 is perfect."""
        return self.computed / self.required

    @property
    def restored_per_follower(self) -> float | None:
        return fmean(self.restored_each) if self.restored_each else None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one group in one run. makespan: from the barrier to the last request's end."""

    mean_ttft: float
    max_ttft: float
    slowest_completion: float
    makespan: float


def required(submissions: Iterable[Submission], page_size: int) -> dict[str, int]:
    """Prompt tokens that each request must compute under perfect sharing, by request id.

    A request must compute what no earlier prompt holds in complete pages. It always computes at least one
    token, because that token's logits are needed; so if all of its prompt is known, its last page is
    computed.
    """
    seen: set[bytes] = set()
    out: dict[str, int] = {}
    width = page_size * tk.TOKEN_BYTES
    for s in submissions:
        data = tk.encode(s.prompt)
        chain, shared = hashlib.sha256(), 0  # the chain stands for the whole prefix, not one page
        for page in range(len(s.prompt) // page_size):
            chain.update(data[page * width : (page + 1) * width])
            digest = chain.digest()
            if digest in seen and (page + 1) * page_size < len(s.prompt):
                shared = (page + 1) * page_size
            seen.add(digest)
        out[s.id] = len(s.prompt) - shared
    return out


def counts(records: Sequence[Record], need: Mapping[str, int]) -> Counts:
    """Counts of one group's records (at least one)."""
    return Counts(
        requests=len(records),
        prompt=sum(len(r.submission.prompt) for r in records),
        restored=sum(r.restored for r in records),
        computed=sum(r.computed for r in records),
        required=sum(need[r.submission.id] for r in records),
        restored_each=tuple(r.restored for r in records if r.submission.follower),
    )


def timings(records: Sequence[Record]) -> Timings:
    """Timings of one group's records (at least one)."""
    return Timings(
        mean_ttft=fmean(r.ttft for r in records),
        max_ttft=max(r.ttft for r in records),
        slowest_completion=max(r.completion for r in records),
        makespan=max(r.ended for r in records),
    )
