"""What an engine tells of itself. Owns: `engine_info`.

Rules: it loads no model and does not import torch. A length that does not fit is refused with the numbers.
"""

from __future__ import annotations

from hotprefix.cost.model import CostModel
from hotprefix.engine.config import EngineConfig
from hotprefix.engine.messages import EngineInfo
from hotprefix.errors import ConfigError
from hotprefix.kernel.config import KernelConfig


def engine_info(
    config: EngineConfig,
    kernel: KernelConfig,
    model: str,
    *,
    positions: int,
    vocab_size: int,
    fingerprint: str,
    kv_token_bytes: int,
    cost: CostModel | None,
    **details: str | int,
) -> EngineInfo:
    """What is told of an engine with these settings. Raises ConfigError if `max_model_len` does not fit.

    positions: of the model's context.
    fingerprint: names the namespace of what it caches (`Namespace.model`).
    kv_token_bytes: keys and values of one token in all layers.
    cost: what its steps cost; None = not known.
    details: further ones.
    """
    tokens = config.kv_tokens // config.page_size * config.page_size
    most = min(positions, kernel.total_pages * config.page_size)
    wanted = config.max_model_len
    if wanted is not None and wanted > most:
        raise ConfigError(
            f"max_model_len={wanted}: the model has {positions} positions and the KV pool "
            f"{tokens} tokens; give at most {most}, or raise --kv-tokens",
            param="max_model_len",
        )
    return EngineInfo(
        model=model,
        max_model_len=wanted or most,
        vocab_size=vocab_size,
        page_size=config.page_size,
        kv_tokens=tokens,
        max_requests=config.max_running + config.max_waiting if config.max_waiting else None,
        cost=None if cost is None else cost.model_dump(mode="json"),
        details={
            **details,
            "fingerprint": fingerprint,
            "kv_token_bytes": kv_token_bytes,
            "total_pages": kernel.total_pages,
            "capacity": config.capacity,
            "publication": config.publication.value,
            "flight": config.flight.value,
            "order": config.order.value,
            "eviction": config.eviction.value,
            "prefix_cache": config.prefix_cache,
            "refresh": config.refresh.value,
            "window_tokens": max((g.frames for g in kernel.groups), default=0) * config.page_size,
            "l2_tokens": config.l2_tokens,
            "l3": config.l3 is not None,
            "max_batched_tokens": config.max_batched_tokens,
            "max_running": config.max_running,
            "max_waiting": config.max_waiting,
        },
    )
