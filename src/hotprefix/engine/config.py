"""Engine settings. Owns: `EngineConfig`, what `build_engine` needs to know.

Rules: frozen, validated when built (the policies' own limits by `KernelConfig`), picklable so that it
can travel to the engine's process. Units: tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotprefix.errors import ConfigError
from hotprefix.kernel.config import Eviction, Flight, KernelConfig, Order, Publication


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """model: path, hub id or "default". dtype: auto | float32 | bfloat16. device: auto | cpu | cuda.
    kv_tokens: capacity of the KV pool. max_model_len: prompt plus outputs of one request, at most
    (None = the model's context, or the pool where that is smaller). threads: CPU threads (None =
    all). Raises ConfigError."""

    model: str = "default"
    dtype: str = "auto"
    device: str = "auto"
    kv_tokens: int = 32768
    page_size: int = 16
    max_model_len: int | None = None
    prefix_cache: bool = True
    publication: Publication = Publication.SCHEDULE
    flight: Flight = Flight.COALESCED
    order: Order = Order.FCFS
    eviction: Eviction = Eviction.LRU
    preemption: bool = False
    max_batched_tokens: int = 2048
    max_running: int = 64
    max_waiting: int = 1024
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "page_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}: give a whole number >= 1", param=name)
        if self.kv_tokens < self.page_size:
            raise ConfigError(
                f"kv_tokens={self.kv_tokens} holds no page of {self.page_size}: give more",
                param="kv_tokens",
            )
        for name in ("max_model_len", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value!r}: give a whole number >= 1, or leave it out", param=name)
        self.kernel()

    def kernel(self) -> KernelConfig:
        """The kernel's part."""
        return KernelConfig(
            total_pages=self.kv_tokens // self.page_size,
            page_size=self.page_size,
            max_batched_tokens=self.max_batched_tokens,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            prefix_cache=self.prefix_cache,
            publication=self.publication,
            flight=self.flight,
            order=self.order,
            eviction=self.eviction,
            preemption=self.preemption,
        )
