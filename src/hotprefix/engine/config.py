"""Engine settings. Owns: `EngineConfig`, what `build_engine` needs to know.

Rules: settings are frozen, validated when they are built (the policies' own limits by `KernelConfig`), and
picklable, so that they can travel to the engine's process. No option is without effect: one that needs
another (`NEEDS`) is refused without it. Only what a switch turns off (`prefix_cache`, `refresh`) may keep its
values, so that the switch can be changed alone. Units: tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final

from hotprefix.definitions import Slo
from hotprefix.errors import ConfigError
from hotprefix.kernel.config import (
    Eviction,
    Flight,
    KernelConfig,
    Order,
    Prefetch,
    Publication,
    Refresh,
    TierConfig,
    Write,
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's settings. Raises ConfigError. Policies (publication, flight, order, eviction, refresh,
    write, prefetch) are given as members of their enums or by name.

    model: path, hub id or "default".
    dtype: auto | float32 | bfloat16.
    device: auto | cpu | cuda.
    decode_weights: auto | dense | quantised: what small steps read (docs/decisions/0009-quantised-decode.md).
    kv_tokens: capacity of the KV pool.
    window_tokens: capacity of the pools of layers with an attention window (engine/groups.py). None =
    kv_tokens if all layers have one, otherwise 0; 0 = no such pools.
    max_model_len: most tokens of one request, prompt plus outputs. None = the model's context, or the pool if
    that is smaller.
    session_tokens: how much ended requests of sessions may keep protected.
    l2_tokens: capacity of the host pool; 0 = no L2.
    l3: URL of an external store (docs/stores.md); needs an L2.
    threads: CPU threads; None = all.
    events: path of an event log.
    events_key_file: file with the key of the log's fingerprints; None = a random key.
    kv_events, kv_events_replay: addresses for KV events (docs/records.md).
    kv_events_form: maps | arrays.
    kv_events_topic: the first frame of each KV event message.
    kv_events_tokens: send token ids with KV events.
    otel: URL of a collector for spans.
    slo: objectives that requests are measured against; None = no objectives.
    """

    model: str = "default"
    dtype: str = "auto"
    device: str = "auto"
    decode_weights: str = "auto"
    kv_tokens: int = 32768
    page_size: int = 16
    window_tokens: int | None = None
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
    refresh: Refresh = Refresh.WINDOW
    refresh_window: int = 128
    refresh_every: int = 1
    lookahead: int = 8
    session_tokens: int = 0
    l2_tokens: int = 0
    l3: str | None = None
    write: Write = Write.THROUGH
    prefetch: Prefetch = Prefetch.TIMEOUT
    prefetch_timeout_s: float = 1.0
    min_restore_tokens: int = 32
    min_fetch_tokens: int = 64
    threads: int | None = None
    events: str | None = None
    events_key_file: str | None = None
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_form: str = "maps"
    kv_events_topic: str = ""
    kv_events_tokens: bool = False
    otel: str | None = None
    slo: Slo | None = None

    def __post_init__(self) -> None:
        for name, kind in POLICIES.items():
            object.__setattr__(self, name, _policy(kind, name, getattr(self, name)))
        self._check_sizes()
        if self.eviction is Eviction.REUSE:
            raise ConfigError(
                "eviction='reuse' evicts first what is expected back last, and no part of the engine "
                "predicts that, so it would be lru: give lru, slru, lfu, fifo, sieve or priority",
                param="eviction",
            )
        if self.kv_events_form not in ("maps", "arrays"):
            raise ConfigError(
                f"kv_events_form={self.kv_events_form!r}: give maps or arrays", param="kv_events_form"
            )
        self.kernel()
        self._check_needs()

    def _check_sizes(self) -> None:
        for name in ("kv_tokens", "page_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}: give a whole number >= 1", param=name)
        if self.kv_tokens < self.page_size:
            raise ConfigError(
                f"kv_tokens={self.kv_tokens} holds no page of {self.page_size}: give more",
                param="kv_tokens",
            )
        if self.window_tokens is not None and self.window_tokens < 0:
            raise ConfigError(
                f"window_tokens={self.window_tokens}: give tokens, or 0 for no pools of their own",
                param="window_tokens",
            )
        for name in ("max_model_len", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value!r}: give a whole number >= 1, or leave it out", param=name)
        if self.l3 is not None and not self.l2_tokens:
            raise ConfigError(
                f"l3={self.l3!r} needs an L2, through which its pages come: give l2_tokens", param="l3"
            )
        if self.l2_tokens and self.l2_tokens < self.page_size:
            raise ConfigError(
                f"l2_tokens={self.l2_tokens} holds no page of {self.page_size}: give more, or 0",
                param="l2_tokens",
            )

    def _check_needs(self) -> None:
        usual = {field.name: field.default for field in fields(self)}
        for name, (needs, holds) in NEEDS.items():
            value = getattr(self, name)
            if value != usual[name] and not holds(self):
                shown = str(value) if isinstance(value, StrEnum) else value
                raise ConfigError(f"{name}={shown!r} does nothing without {needs}", param=name)

    @property
    def observed(self) -> str | None:
        """The first option given that asks for records, which only an observer writes; None if none does."""
        return next((name for name in ("events", "kv_events", "otel") if getattr(self, name)), None)

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
            refresh=self.refresh,
            refresh_window=self.refresh_window,
            refresh_every=self.refresh_every,
            lookahead=self.lookahead,
            session_pages=self.session_tokens // self.page_size,
            tiers=self._tiers(),
        )

    def _tiers(self) -> TierConfig | None:
        tiers = TierConfig(  # built also without an L2, so that its values are checked
            pages=max(1, self.l2_tokens // self.page_size),
            storage=self.l3 is not None,
            write=self.write,
            prefetch=self.prefetch,
            prefetch_timeout_s=self.prefetch_timeout_s,
            min_restore_pages=-(-self.min_restore_tokens // self.page_size),
            min_fetch_pages=-(-self.min_fetch_tokens // self.page_size),
        )
        return tiers if self.l2_tokens else None


def _policy(kind: type[StrEnum], name: str, value: object) -> StrEnum:
    """The member of that name. Raises ConfigError."""
    try:
        return kind(str(value))
    except ValueError:
        names = ", ".join(kind)
        raise ConfigError(f"{name}={value!r}: give one of {names}", param=name) from None


POLICIES: Final[dict[str, type[StrEnum]]] = {
    "publication": Publication, "flight": Flight, "order": Order, "eviction": Eviction, "refresh": Refresh,
    "write": Write, "prefetch": Prefetch,
}  # fmt: skip
_L2: Final = ("an L2: give l2_tokens", lambda config: bool(config.l2_tokens))
_L3: Final = ("an external store: give l3 (and l2_tokens)", lambda config: config.l3 is not None)
_KV: Final = ("KV events: give kv_events", lambda config: config.kv_events is not None)
NEEDS: Final[dict[str, tuple[str, Callable[[EngineConfig], bool]]]] = {
    "preemption": ("order='priority'", lambda config: config.order is Order.PRIORITY),
    "write": _L2,
    "min_restore_tokens": _L2,
    "prefetch": _L3,
    "prefetch_timeout_s": _L3,
    "min_fetch_tokens": _L3,
    "kv_events_replay": _KV,
    "kv_events_form": _KV,
    "kv_events_topic": _KV,
    "kv_events_tokens": _KV,
}
