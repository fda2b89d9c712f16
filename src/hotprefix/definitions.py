"""The words that live figures, event logs and replays share. Owns: hot and cold, the buckets, the latency
objectives and which requests meet them.

Rules: each word has one function and one constant here; the live server, `inspect` and the lab call these and
have none of their own. Units: tokens, seconds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from hotprefix.options import Group, check, option

SEEN: Final = Group.OBSERVABILITY
HOT_SHARE: Final = 0.5
KNOWN_PAGES: Final = 2**17  # some 2 million tokens in pages of 16
GROUPS: Final = ("hot", "cold")
EDGES: Final[dict[str, tuple[int, ...]]] = {
    "heat": (0, 1, 4, 16, 64, 256),
    "queue depth": (0, 1, 4, 16, 64, 256),
    "prompt tokens": (0, 1024, 4096, 16384, 65536, 131072),
}


def is_hot(known_tokens: Any, prompt_tokens: Any) -> Any:
    """Whether a request is hot: at least half of its prompt lies in leading pages that earlier requests had,
    as prompt or as answer. All others are cold. Takes numbers, or arrays of them."""
    return known_tokens >= HOT_SHARE * prompt_tokens


class Known(NamedTuple):
    """What was known of a prompt when it arrived.

    pages: how many of its leading pages earlier requests had.
    heat: how many earlier requests' prompts began with the same page; 0 if the prompt has no complete page.
    """

    pages: int
    heat: int


class KnownPrefixes:
    """The last KNOWN_PAGES page prefixes that requests had: what an endless cache would hold, as far as
    memory goes. The name of a page is anything hashable that identifies it together with all pages before
    it."""

    def __init__(self, most: int = KNOWN_PAGES) -> None:
        self._most = most
        self._asked: OrderedDict[Hashable, int] = OrderedDict()  # name -> prompts that had it

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, chain: Sequence[Hashable]) -> Known:
        """What was known of a prompt that arrives now. chain: the names of its pages, the first page first.
        From now on they are known."""
        asked = self._asked
        heat = asked.get(chain[0], 0) if chain else 0
        known = 0
        for name in chain:
            if name not in asked:
                break
            known += 1
        self._keep(chain, 1)
        return Known(known, heat)

    def answered(self, chain: Sequence[Hashable]) -> None:
        """From now on the prefixes that a request's answer completed are known, too."""
        self._keep(chain, 0)

    def _keep(self, chain: Sequence[Hashable], prompts: int) -> None:
        """Count `prompts` uses of each page. The first page becomes the most recent, so that what is
        forgotten is the tail of a chain."""
        asked = self._asked
        for name in reversed(chain):
            asked[name] = asked.get(name, 0) + prompts
            asked.move_to_end(name)
        while len(asked) > self._most:
            asked.popitem(last=False)


def buckets_of(by: str) -> Iterator[tuple[int, str, float, float]]:
    """(order, name, low, high) of every bucket of a kind. A value belongs to a bucket if low <= value <
    high."""
    edges = EDGES[by]
    for order, (low, high) in enumerate(zip(edges, (*edges[1:], None), strict=True)):
        yield order, _name(low, high), low, math.inf if high is None else high


def bucket(by: str, value: float) -> str:
    """The name of the bucket of that kind in which a value lies."""
    return next(name for _, name, low, high in buckets_of(by) if low <= value < high)


def _name(low: int, high: int | None) -> str:
    if high is None:
        return f"{low:,} and more"
    return f"{low:,}" if high == low + 1 else f"{low:,} to {high - 1:,}"


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives in seconds; None = no objective. Raises ConfigError."""

    # fmt: off
    ttft_s: float | None = option(
        None, "Objective: to the first token (docs/metrics.md, goodput).", SEEN, "SECONDS", "> 0",
        flag="slo-ttft", unset="none")
    tpot_s: float | None = option(
        None, "Objective: per output token after the first.", SEEN, "SECONDS", "> 0", flag="slo-tpot",
        unset="none")
    completion_s: float | None = option(
        None, "Objective: to the end.", SEEN, "SECONDS", "> 0", flag="slo-completion", unset="none")
    timeout_s: float | None = option(
        None, "A request without a first token by then has timed out; it is still served.", SEEN, "SECONDS",
        "> 0", flag="slo-timeout", unset="none")
    # fmt: on

    def __post_init__(self) -> None:
        check(self)

    @property
    def limits(self) -> bool:
        """Whether there is an objective that a finished request may have missed."""
        return not (self.ttft_s is None and self.tpot_s is None and self.completion_s is None)

    def met(self, ttft: Any, tpot: Any, completion: Any) -> Any:
        """Whether a request that ended well met every objective. Takes seconds, or arrays of them; NaN meets
        no objective.

        ttft, completion: from the request's arrival to its first token, and to its end.
        tpot: (last token - first token) / (tokens - 1); 0 for less than two tokens.
        """
        good: Any = True
        for value, limit in ((ttft, self.ttft_s), (tpot, self.tpot_s), (completion, self.completion_s)):
            if limit is not None:
                good = good & (value <= limit)
        return good

    def timed_out(self, waited: Any) -> Any:
        """Whether a request has timed out. waited: seconds from its arrival to its first token, or until now
        if it has none."""
        return waited > (math.inf if self.timeout_s is None else self.timeout_s)
