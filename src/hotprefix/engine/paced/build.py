"""From settings to a loop over an engine that is only pretended. Owns: `build_paced`.

Rules: kernel, text, KV events and records are the real ones. Of the model's files only the tokenizer's are
read; torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable

from hotprefix.cost.presets import load_cost
from hotprefix.engine.config import EngineConfig
from hotprefix.engine.describe import engine_info
from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.model.files import resolve_model
from hotprefix.engine.observe import Observer
from hotprefix.engine.paced.answers import Words
from hotprefix.engine.paced.executor import PacedExecutor, PacedHost
from hotprefix.engine.text.output import OutputText
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.errors import ConfigError


def build_paced(
    config: EngineConfig,
    progress: Callable[[str], None] = lambda line: None,
    observer: Observer | None = None,
) -> EngineLoop:
    """Make the loop of an engine with `paced`. Raises ModelLoadError (the tokenizer's files), InputError (the
    cost model) or ConfigError."""
    if config.paced is None:
        raise ConfigError("paced=None: give a cost model", param="paced")
    cost = load_cost(config.paced).scaled(config.pace_factor)
    told = cost if config.cost is None else load_cost(config.cost)
    files = resolve_model(config.model)
    tokenizer = Tokenizer.load(files.path)
    kernel = config.kernel()
    host = PacedHost(cost, config.page_size * cost.kv_token_bytes) if config.l2_tokens else None
    executor = PacedExecutor(cost, Words.of(tokenizer), host)
    info = engine_info(
        config,
        kernel,
        files.name,
        positions=kernel.total_pages * config.page_size,
        vocab_size=tokenizer.size,
        fingerprint=f"paced {files.name} {tokenizer.size}",
        kv_token_bytes=cost.kv_token_bytes,
        cost=told,
        dtype=cost.dtype,
        device=f"paced: {cost.hardware}",
    )
    progress(f"ready: {info.model}, paced by {cost.name}, KV pool {info.kv_tokens} tokens")
    return EngineLoop(
        kernel,
        executor,
        info,
        fingerprint=str(info.details["fingerprint"]),
        eos_ids=tokenizer.eos_ids,
        make_text=lambda params: OutputText(tokenizer, params),
        host=host,
        observer=observer,
        slo=config.slo,
        replay=executor.replay,
        pace=executor.pace.totals,
    )
