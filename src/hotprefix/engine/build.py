"""From settings to a running loop. Owns: `build_engine`, the one place where the engine's parts meet.

Rules: it reads no environment variable. It tells what it is doing (`progress` gets lines for people to read).
Sizes that do not fit are refused with the numbers. Everything it returns is driven by one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hotprefix.cost.model import CostModel
from hotprefix.cost.presets import load_cost
from hotprefix.engine.config import EngineConfig
from hotprefix.engine.describe import engine_info
from hotprefix.engine.groups import kernel_config
from hotprefix.engine.hostpool import HostPool
from hotprefix.engine.kvpool import KVPool, page_bytes
from hotprefix.engine.l3_loop import Storage
from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.messages import EngineInfo
from hotprefix.engine.model.files import resolve_model
from hotprefix.engine.model.loader import LoadedModel, load_model
from hotprefix.engine.observe import Observer
from hotprefix.engine.paced.build import build_paced
from hotprefix.engine.sampling.sampler import Sampler
from hotprefix.engine.sampling.structured import Compiler, Vocabulary
from hotprefix.engine.stores.base import Store
from hotprefix.engine.stores.open_store import open_store
from hotprefix.engine.text.output import OutputText
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.engine.torch_executor import TorchExecutor
from hotprefix.errors import ConfigError
from hotprefix.kernel.config import KernelConfig
from hotprefix.kernel.events import Sink

Progress = Callable[[str], None]
MIN_FETCH_S = 1.0


def build_engine(
    config: EngineConfig,
    progress: Progress = lambda line: None,
    sink: Sink | None = None,
    observer: Observer | None = None,
) -> EngineLoop:
    """Load the model and make a loop. Raises ModelLoadError (the model's files) or ConfigError (the settings,
    or they ask for records and there is no observer to write them)."""
    started = time.monotonic()
    if config.observed is not None and observer is None:
        raise ConfigError(
            f"{config.observed}={getattr(config, config.observed)!r} is written by an observer, and there is "
            "none: give observer=hotprefix.records.open_recorder.open_recorder(config), as the server does",
            param=config.observed,
        )
    if config.paced is not None:
        return build_paced(config, progress, observer)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    # What is wrong with these is reported before the model loads.
    store = None if config.l3 is None else open_store(config.l3)
    cost = None if config.cost is None else load_cost(config.cost)
    files = resolve_model(config.model)
    progress(f"loading {files.name}")
    loaded = load_model(
        files, config.dtype, config.device, decode_weights=config.decode_weights,
        progress=lambda stage, share: progress(f"{stage} {share:.0%}"),
    )  # fmt: skip
    decoder = loaded.decoder
    tokenizer = Tokenizer.load(files.path)
    kernel = kernel_config(config, decoder.config)
    info = _info(config, kernel, files.name, loaded, cost)
    pool = KVPool.allocate(
        decoder.config, kernel.total_pages, config.page_size, decoder.dtype, decoder.device, kernel.groups
    )
    host, storage = _tiers(config, pool, store)
    compiler = Compiler(Vocabulary.of(tokenizer, decoder.config.vocab_size))
    sampler = Sampler(decoder.config.vocab_size, decoder.device, eos_ids=tokenizer.eos_ids, compiler=compiler)
    progress(f"ready in {time.monotonic() - started:.1f} s: {_summary(info, pool)}")
    return EngineLoop(
        kernel,
        TorchExecutor(decoder, pool, sampler, host),
        info,
        fingerprint=loaded.fingerprint,
        eos_ids=tokenizer.eos_ids,
        make_text=lambda params: OutputText(tokenizer, params),
        sink=sink,
        host=host,
        storage=storage,
        observer=observer,
        prepare=lambda params: compiler.pending(params.structured),
        replay=sampler.replay,
        slo=config.slo,
    )


def _tiers(config: EngineConfig, pool: KVPool, store: Store | None) -> tuple[HostPool | None, Storage | None]:
    if not config.l2_tokens:
        return None, None
    pages = config.l2_tokens // config.page_size
    if store is None:
        return HostPool(pool, pages), None
    storage = Storage(store, pool.page_bytes, max(config.prefetch_timeout_s, MIN_FETCH_S))
    return HostPool(pool, pages, storage.put), storage


def _info(
    config: EngineConfig, kernel: KernelConfig, name: str, loaded: LoadedModel, cost: CostModel | None
) -> EngineInfo:
    decoder = loaded.decoder
    return engine_info(
        config,
        kernel,
        name,
        positions=decoder.config.max_positions,
        vocab_size=decoder.config.vocab_size,
        fingerprint=loaded.fingerprint,
        kv_token_bytes=page_bytes(decoder.config, 1, decoder.dtype),
        cost=cost,
        dtype=str(decoder.dtype).removeprefix("torch."),
        device=str(decoder.device),
        decode_weights="quantised" if decoder.quantised_linears else "dense",
        threads=torch.get_num_threads(),
    )


def _summary(info: EngineInfo, pool: KVPool) -> str:
    return (
        f"{info.model}, {info.details['dtype']} on {info.details['device']}, context {info.max_model_len}, "
        f"KV pool {info.kv_tokens} tokens ({pool.bytes() / 2**20:.0f} MiB)"
    )
