"""What a worker is. Owns: `Profile`, which a worker joins the fleet with.

Units: tokens, pages, seconds, bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from hotprefix.cost.prices import Prices
from hotprefix.errors import ConfigError


class Role(StrEnum):
    """What a worker does: compute prompts, generate answers, or both."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class LinkSpeed(NamedTuple):
    """A link: seconds before the first byte, then bytes a second."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size: float) -> float:
        """How long `size` bytes take if nothing else uses the link. Nothing takes no time."""
        return self.latency_s + size / self.bytes_per_s if size > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """What a worker is. Raises ConfigError if a value is out of range.

    prices: what its steps cost.
    total_pages, page_size, max_batched_tokens, max_running: as in its kernel's configuration.
    kv_token_bytes: keys and values of one token in all layers.
    role: prefill, decode or both.
    capacity: calibrated requests a second; None = not calibrated.
    restore: the link from L2 to L1. fetch: from L3 to L2. pull: from a peer. hand_off: from a prefill worker
    to a decode worker, at the receiver. None: there is no such link, so what lies behind it does not count.
    shared_l3: its L3 is the store that all such workers share: what one has stored, each can fetch.
    events: it tells what it caches. Otherwise that is presumed from the decisions, for a time.
    """

    prices: Prices
    total_pages: int
    page_size: int
    max_batched_tokens: int
    max_running: int
    kv_token_bytes: int = 1
    role: Role = Role.BOTH
    capacity: float | None = None
    restore: LinkSpeed | None = None
    fetch: LinkSpeed | None = None
    pull: LinkSpeed | None = None
    hand_off: LinkSpeed | None = None
    shared_l3: bool = False
    events: bool = True

    def __post_init__(self) -> None:
        for name in ("total_pages", "page_size", "max_batched_tokens", "max_running", "kv_token_bytes"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}={value}: give a whole number >= 1", param=name)
        if self.capacity is not None and not self.capacity > 0:
            raise ConfigError(f"capacity={self.capacity}: give requests a second > 0", param="capacity")
        for name in ("restore", "fetch", "pull", "hand_off"):
            link = getattr(self, name)
            if link is not None and not (link.latency_s >= 0 and link.bytes_per_s > 0):
                raise ConfigError(f"{name}={link}: give latency_s >= 0 and bytes_per_s > 0", param=name)
