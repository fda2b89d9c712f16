"""Engine settings. Owns: `EngineConfig`, what `build_engine` needs to know.

Rules: settings are frozen, validated when they are built (the policies' own limits by `KernelConfig`), and
picklable, so that they can travel to the engine's process. No option is without effect: one that needs
another is refused without it. Only what a switch turns off (`prefix_cache`, `refresh`) may keep its
values, so that the switch can be changed alone. Units: tokens, seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

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
from hotprefix.options import Group, Needs, check, option, settings

MODEL, CACHE, POLICIES, LIMITS = Group.MODEL, Group.CACHE, Group.POLICIES, Group.LIMITS
TIERS, SEEN, EVENTS, FLEET = Group.TIERS, Group.OBSERVABILITY, Group.KV_EVENTS, Group.FLEET
BY_PRIORITY: Final[Needs] = ("order='priority'", lambda config: config.order is Order.PRIORITY)
L2: Final[Needs] = ("an L2: give l2_tokens", lambda config: bool(config.l2_tokens))
L3: Final[Needs] = ("an external store: give l3 (and l2_tokens)", lambda config: config.l3 is not None)
KV: Final[Needs] = ("KV events: give kv_events", lambda config: config.kv_events is not None)
PACED: Final[Needs] = ("a paced engine: give paced", lambda config: config.paced is not None)
# What a paced engine has no use for: it has no weights, no device and no bytes.
OF_A_MODEL: Final = ("dtype", "device", "decode_weights", "threads", "window_tokens", "l3")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's settings; docs/policies.md has them as a page. A policy is given as a member of its
    enum, or by name. Raises ConfigError."""

    # fmt: off
    model: str = option(
        "default", "Hugging Face directory, .gguf file or hub id; `default` is the embedded model.",
        MODEL, "MODEL")
    dtype: str = option(
        "auto", "Type of weights and KV.", MODEL, "TYPE",
        values={
            "auto": "bfloat16 if the device multiplies it natively, otherwise float32",
            "float32": "to compare results exactly; twice the memory",
            "bfloat16": "half the memory, and quicker where the device has instructions for it",
            "fp32": "short for float32",
            "bf16": "short for bfloat16",
        })
    device: str = option(
        "auto", "Where the model runs.", MODEL, "DEVICE", indexed=True,
        values={
            "auto": "a CUDA device if there is one, otherwise the CPU",
            "cpu": "the CPU",
            "cuda": "a CUDA device; cuda:1 is the second",
        })
    decode_weights: str = option(
        "auto", "What small steps read; the numbers are the same.", MODEL, "WEIGHTS",
        values={
            "auto": "the quantised blocks of a .gguf file if that is quicker here",
            "dense": "the dense weights; to compare with",
            "quantised": "the blocks; refused if this machine has no kernels for them",
        })
    threads: int | None = option(None, "CPU threads of the engine.", MODEL, "COUNT", ">= 1", unset="all")

    prefix_cache: bool = option(True, "Keep computed prefixes for later requests.", CACHE)
    page_size: int = option(16, "Size of a KV page.", CACHE, "TOKENS", ">= 1")
    kv_tokens: int = option(32768, "Capacity of the KV pool.", CACHE, "TOKENS", ">= 1")
    window_tokens: int | None = option(
        None, "Capacity for layers with an attention window; 0 = no pools of their own (engine/groups.py).",
        CACHE, "TOKENS", ">= 0", unset="kv-tokens if all layers have a window, otherwise 0")
    session_tokens: int = option(
        0, "What ended requests with a session_id may keep protected.", CACHE, "TOKENS", ">= 0")

    publication: Publication = option(
        Publication.SCHEDULE, "When computed pages become visible to other requests.", POLICIES, "WHEN")
    flight: Flight = option(Flight.COALESCED, "Which request computes a shared prompt.", POLICIES, "WHICH")
    order: Order = option(Order.FCFS, "In which order waiting requests are tried.", POLICIES, "ORDER")
    eviction: Eviction = option(Eviction.LRU, "Which pages leave the cache first.", POLICIES, "WHICH")
    refresh: Refresh = option(
        Refresh.WINDOW, "What the waiting queue tells the cache; HOTPREFIX_WAITING_REFRESH=0 means off.",
        POLICIES, "WHAT")
    refresh_window: int = option(
        128, "Waiting requests that a refresh looks at.", POLICIES, "REQUESTS", ">= 0")
    refresh_every: int = option(
        1, "Planning passes from one refresh to the next.", POLICIES, "PASSES", ">= 1")

    max_model_len: int | None = option(
        None, "Prompt plus outputs of one request.", LIMITS, "TOKENS", ">= 1",
        unset="the model's context, or the pool if that is smaller")
    max_batched_tokens: int = option(2048, "What one step may compute.", LIMITS, "TOKENS", ">= 1")
    max_running: int = option(64, "Requests that run at a time.", LIMITS, "REQUESTS", ">= 1")
    max_waiting: int = option(
        1024, "Requests that may wait, beyond which one gets 429; 0 = no limit.", LIMITS, "REQUESTS", ">= 0")
    preemption: bool = option(
        False, "Let a waiting request displace less important running ones.", LIMITS, needs=BY_PRIORITY)
    lookahead: int = option(
        8, "Requests that are tried behind a head that does not fit.", LIMITS, "REQUESTS", ">= 0", flag="")

    l2_tokens: int = option(0, "Capacity of the host tier, L2; 0 = none.", TIERS, "TOKENS", ">= 0")
    l3: str | None = option(
        None, "External store (docs/stores.md): file:///path, valkey://host:port/0 or s3://bucket.",
        TIERS, "URL", unset="none", needs=L2)
    write: Write = option(Write.THROUGH, "When pages get a copy in L2.", TIERS, "WHEN", needs=L2)
    prefetch: Prefetch = option(
        Prefetch.TIMEOUT, "How long a request waits for its pages from L3.", TIERS, "HOW", needs=L3)
    prefetch_timeout_s: float = option(
        1.0, "The longest wait of prefetch=timeout, from the request's arrival.", TIERS, "SECONDS", ">= 0",
        needs=L3)
    min_restore_tokens: int = option(
        32, "Fewer are computed rather than restored from L2.", TIERS, "TOKENS", ">= 1", flag="", needs=L2)
    min_fetch_tokens: int = option(
        64, "Fewer are computed rather than fetched from L3.", TIERS, "TOKENS", ">= 1", flag="", needs=L3)

    events: str | None = option(
        None, "Event log to write: PATH.jsonl or PATH.parquet (docs/records.md).", SEEN, "FILE", read=str,
        unset="none")
    events_key_file: str | None = option(
        None, "Key of the log's fingerprints.", SEEN, "FILE", read=str, unset="a new key each time")
    otel: str | None = option(
        None, "Send a span for each request to this OTLP/HTTP collector.", SEEN, "URL", unset="none")
    kv_events: str | None = option(
        None, "Where to publish KV events, as tcp://127.0.0.1:5557.", EVENTS, "ADDRESS", unset="nowhere")
    kv_events_replay: str | None = option(
        None, "Where to send missed KV events again.", EVENTS, "ADDRESS", unset="nowhere", needs=KV)
    kv_events_form: str = option(
        "maps", "How KV events are written.", EVENTS, "FORM", needs=KV,
        values={"maps": "as vLLM 0.32 writes them", "arrays": "as earlier vLLM; for routers that read those"})
    kv_events_topic: str = option("", "Topic of KV events, the first frame.", EVENTS, "TEXT", needs=KV)
    kv_events_tokens: bool = option(
        False, "Send token ids in KV events; routers that hash tokens need them.", EVENTS, needs=KV)

    cost: str | None = option(
        None, "What a step costs here, for routers to predict with: a preset, or a file of `calibrate`.",
        FLEET, "NAME", unset="not told")
    capacity: float | None = option(
        None, "What `calibrate --capacity` found for this engine; routers divide its load by that.",
        FLEET, "REQUESTS/S", "> 0", unset="not told")
    paced: str | None = option(
        None, "Compute nothing, wait as long as this cost model says (a preset, or a file of `calibrate`), "
        "and answer with words that mean nothing: to try fleets.", FLEET, "NAME", unset="a real model")
    pace_factor: float = option(
        1.0, "How many times as long each step takes as the cost model says.", FLEET, "FACTOR", "> 0",
        needs=PACED)
    # fmt: on
    slo: Slo | None = None  # objectives that requests are measured against; its fields are options

    def __post_init__(self) -> None:
        check(self)
        for name in ("kv_tokens", "l2_tokens"):
            if 0 < getattr(self, name) < self.page_size:
                raise ConfigError(
                    f"{name}={getattr(self, name)} holds no page of {self.page_size}: give more", param=name
                )
        if self.eviction is Eviction.REUSE:
            raise ConfigError(
                "eviction='reuse' evicts first what is expected back last, and no part of the engine "
                "predicts that, so it would be lru: give lru, slru, lfu, fifo, sieve or priority",
                param="eviction",
            )
        if self.paced is not None:
            self._check_paced()
        self.kernel()

    def _check_paced(self) -> None:
        kind: Any = type(self)
        for one in settings(kind):
            value = getattr(self, one.name)
            if one.name in OF_A_MODEL and value != one.default:
                raise ConfigError(
                    f"{one.name}={value!r} does nothing with paced, which has no model: leave one out",
                    param=one.name,
                )

    @property
    def observed(self) -> str | None:
        """The first option given that asks for records, which only an observer writes; None if none does."""
        return next((name for name in ("events", "kv_events", "otel") if getattr(self, name)), None)

    def kernel(self) -> KernelConfig:
        """The kernel's part: the settings that it has under the same name, and sizes in pages."""
        return KernelConfig(
            total_pages=self.kv_tokens // self.page_size,
            session_pages=self.session_tokens // self.page_size,
            **self._of(KernelConfig),
            tiers=self._tiers(),
        )

    def _tiers(self) -> TierConfig | None:
        tiers = TierConfig(  # built also without an L2, so that its values are checked
            pages=max(1, self.l2_tokens // self.page_size),
            storage=self.l3 is not None,
            min_restore_pages=-(-self.min_restore_tokens // self.page_size),
            min_fetch_pages=-(-self.min_fetch_tokens // self.page_size),
            **self._of(TierConfig),
        )
        return tiers if self.l2_tokens else None

    def _of(self, part: type[KernelConfig | TierConfig]) -> dict[str, Any]:
        """The settings that a part has under the same name."""
        return {each.name: getattr(self, each.name) for each in fields(part) if each.name in self.__slots__}
