"""What live figures, event logs and replays mean by the same words. Owns: hot and cold, the buckets, the
latency objectives and what meets them.

Rules: one function and one constant for each; the live server, `inspect` and the lab call these and have
none of their own. Units: tokens, seconds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from hotprefix.errors import ConfigError

HOT_SHARE: Final = 0.5
KNOWN_PAGES: Final = 2**17  # some 2 million tokens in pages of 16
GROUPS: Final = ("hot", "cold")
EDGES: Final[dict[str, tuple[int, ...]]] = {
    "heat": (0, 1, 4, 16, 64, 256),
    "queue depth": (0, 1, 4, 16, 64, 256),
    "prompt tokens": (0, 1024, 4096, 16384, 65536, 131072),
}


def is_hot(known_tokens: Any, prompt_tokens: Any) -> Any:
    """Whether a request is hot: at least half of its prompt lies in the leading pages that earlier requests
    had, as prompt or as answer. All others are cold. Numbers, or arrays of them."""
    return known_tokens >= HOT_SHARE * prompt_tokens


class Known(NamedTuple):
    """pages: leading ones that earlier requests had. heat: earlier requests whose prompt began with the same
    page; 0 where a prompt has no complete page."""

    pages: int
    heat: int


class KnownPrefixes:
    """The page prefixes that requests had, the last KNOWN_PAGES of them: what an endless cache would hold,
    as far as memory goes. A prefix is named by anything hashable that tells it and all before it."""

    def __init__(self, most: int = KNOWN_PAGES) -> None:
        self._most = most
        self._asked: OrderedDict[Hashable, int] = OrderedDict()  # name -> prompts that had it

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, chain: Sequence[Hashable]) -> Known:
        """What was known of a prompt that arrives, first page first; from now on it is known."""
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
        """The prefixes that a request's answer completed are known, too."""
        self._keep(chain, 0)

    def _keep(self, chain: Sequence[Hashable], prompts: int) -> None:
        """The first page becomes the most recent, so that what is forgotten is a chain's tail."""
        asked = self._asked
        for name in reversed(chain):
            asked[name] = asked.get(name, 0) + prompts
            asked.move_to_end(name)
        while len(asked) > self._most:
            asked.popitem(last=False)


def buckets_of(by: str) -> Iterator[tuple[int, str, float, float]]:
    """(order, name, low, high) of every bucket of a kind; a value belongs where low <= value < high."""
    edges = EDGES[by]
    for order, (low, high) in enumerate(zip(edges, (*edges[1:], None), strict=True)):
        yield order, _name(low, high), low, math.inf if high is None else high


def bucket(by: str, value: float) -> str:
    """Name of the bucket of that kind in which a value lies."""
    return next(name for _, name, low, high in buckets_of(by) if low <= value < high)


def _name(low: int, high: int | None) -> str:
    if high is None:
        return f"{low:,} and more"
    return f"{low:,}" if high == low + 1 else f"{low:,} to {high - 1:,}"


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives, seconds; None = no objective. timeout_s: a request without a first token by then has
    timed out (it is still served). Raises ConfigError."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    completion_s: float | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "completion_s", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"slo.{name}={value!r}: give seconds > 0, or leave it out", param=name)

    @property
    def limits(self) -> bool:
        """Whether there is an objective that a request that finished may have missed."""
        return not (self.ttft_s is None and self.tpot_s is None and self.completion_s is None)

    def met(self, ttft: Any, tpot: Any, completion: Any) -> Any:
        """Whether a request that ended well met every objective. ttft, completion: from its arrival to its
        first token and to its end. tpot: (last token - first token) / (tokens - 1), 0 for less than two
        tokens. Seconds, or arrays of them; NaN meets no objective."""
        good: Any = True
        for value, limit in ((ttft, self.ttft_s), (tpot, self.tpot_s), (completion, self.completion_s)):
            if limit is not None:
                good = good & (value <= limit)
        return good

    def timed_out(self, waited: Any) -> Any:
        """Whether a request has timed out that waited so long for its first token, or waits still."""
        return waited > (math.inf if self.timeout_s is None else self.timeout_s)
