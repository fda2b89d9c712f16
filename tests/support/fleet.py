"""What tests of the fleet share: a worker's profile, prices that are easy to reckon with, requests."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from hotprefix.fleet.records import Keys, Profile, RouteRequest


@dataclass(frozen=True)
class TokenPrices:
    """A step costs a price for each token and each decode, and a fixed one; 1 ms, 0.1 ms and 0 if not
    told."""

    token_s: float = 0.001
    decode_s: float = 0.0001
    step: float = 0.0

    def step_s(
        self, prefill_tokens: int, prefill_context: int, decodes: int, decode_context: int, /
    ) -> float:
        return self.step + self.token_s * prefill_tokens + self.decode_s * decodes

    def scheduler_s(self, running: int, waiting: int, /) -> float:
        return 0.0


def profile(token_s: float = 0.001, page_size: int = 16, pages: int = 10_000, **more: object) -> Profile:
    """A worker's profile."""
    values: dict[str, object] = {"max_batched_tokens": 2048, "max_running": 64, **more}
    return Profile(TokenPrices(token_s), pages, page_size, **values)  # type: ignore[arg-type]


def keys(*pages: str) -> Keys:
    """Chained page keys: each covers the pages before it, as 64-bit numbers."""
    return tuple(int.from_bytes(text.encode()[-8:].rjust(8, b"\1"), "big") for text in accumulate(pages))


def prompt(name: str, count: int) -> Keys:
    """The keys of a prompt of its own, `count` pages long."""
    start = sum(ord(letter) << (8 * i) for i, letter in enumerate(name[-4:])) << 24
    return tuple(range(start + 1, start + 1 + count))


def request(id: str, keys: Keys, tail: int = 1, page_size: int = 16, **more: object) -> RouteRequest:
    """A request with these pages and `tail` tokens more."""
    return RouteRequest(id, keys, len(keys) * page_size + tail, **more)  # type: ignore[arg-type]
