"""A store worker's settings. Owns: `WorkerConfig`; validated once, frozen."""

from __future__ import annotations

from dataclasses import dataclass, field

from hotprefix.engine.stores.breaker import BreakerConfig
from hotprefix.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Raises ConfigError for a value out of range.

    page_bytes: size of every payload; a payload of another size is never accepted.
    readers: number of reading threads.
    timeout_s: how long a fetch may take, and how long one call to the store may take before it counts as
    failed.
    max_inflight_bytes: host memory for pages being read, and as much again for pages being written.
    batch_bytes: how many bytes of pages one call asks for.
    breaker: when to stop asking a store that fails.
    """

    page_bytes: int
    readers: int = 2
    timeout_s: float = 1.0
    max_inflight_bytes: int = 256 * MIB
    batch_bytes: int = 4 * MIB
    breaker: BreakerConfig = field(default_factory=BreakerConfig)

    def __post_init__(self) -> None:
        if min(self.page_bytes, self.readers, self.batch_bytes) < 1 or self.timeout_s <= 0:
            raise ConfigError(f"sizes, thread counts and time limits must be positive: {self}")
        if self.max_inflight_bytes < self.page_bytes:
            raise ConfigError(
                f"max_inflight_bytes={self.max_inflight_bytes} holds no page of {self.page_bytes} bytes: "
                f"give at least that",
                param="max_inflight_bytes",
            )

    @property
    def batch_pages(self) -> int:
        return max(1, self.batch_bytes // self.page_bytes)

    @property
    def room_pages(self) -> int:
        return self.max_inflight_bytes // self.page_bytes
