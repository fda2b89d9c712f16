"""The bench's engine. Owns: `load_rig`, which loads a model once for any number of fresh loops.

Rules: the same parts as the server's engine (decoder, pool, sampler, loop), driven in this process and
thread, without HTTP and without text output, so that a run times the engine and nothing else.
"""

from __future__ import annotations

from importlib.metadata import version

from rich.console import Console

from hotprefix.bench.prompts import TextMaterial
from hotprefix.bench.runner import PAGE, PAGES, Rig
from hotprefix.engine.executor import Executor
from hotprefix.engine.kvpool import KVPool
from hotprefix.engine.live import TokensOnly
from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.messages import EngineInfo
from hotprefix.engine.model.files import resolve_model
from hotprefix.engine.model.loader import load_model
from hotprefix.engine.sampling.sampler import Sampler
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.engine.torch_executor import TorchExecutor
from hotprefix.kernel.config import KernelConfig


def load_rig(model: str, dtype: str, device: str, console: Console) -> Rig:
    """Load `model` (as `--model`) and a KV pool of PAGES pages; progress goes to `console`. Raises
    ModelLoadError or ConfigError."""
    files = resolve_model(model)
    with console.status(f"loading {files.name}") as status:
        loaded = load_model(
            files, dtype, device, progress=lambda stage, share: status.update(f"{stage}: {share:.0%}")
        )
    decoder = loaded.decoder
    config = decoder.config
    pool = KVPool.allocate(config, PAGES, PAGE, decoder.dtype, decoder.device)
    executor = TorchExecutor(decoder, pool, Sampler(config.vocab_size, decoder.device))
    tokenizer = Tokenizer.load(files.path)

    def make_loop(counting: Executor, kernel: KernelConfig) -> EngineLoop:
        tokens = kernel.total_pages * kernel.page_size
        info = EngineInfo(
            model=files.name,
            max_model_len=min(config.max_positions, tokens),
            vocab_size=config.vocab_size,
            page_size=kernel.page_size,
            kv_tokens=tokens,
        )
        return EngineLoop(
            kernel,
            counting,
            info,
            fingerprint=loaded.fingerprint,
            eos_ids=(),
            make_text=lambda _: TokensOnly(),
        )

    return Rig(
        executor=executor,
        make_loop=make_loop,
        material=TextMaterial(tokenizer.encode),
        model=files.name,
        dtype=str(decoder.dtype).removeprefix("torch."),
        device=str(decoder.device),
        versions={name: version(name) for name in ("torch", "numpy")},
    )
