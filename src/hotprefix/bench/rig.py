"""The bench's engine. Owns: `load_rig`, a `TokenEngine` engine as the bench wants it.

Rules: the engine is driven in this process and thread, without HTTP and without text output, so that a run
times the engine and nothing else.
"""

from __future__ import annotations

from importlib.metadata import version

from rich.console import Console

from hotprefix.bench.bench_prompts import TextMaterial
from hotprefix.bench.runner import PAGE, PAGES, Rig
from hotprefix.engine.model.files import resolve_model
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.engine.token_engine import TokenEngine


def load_rig(model: str, dtype: str, device: str, console: Console) -> Rig:
    """Load `model` (as `--model`) and a KV pool of PAGES pages; progress goes to `console`. Raises
    ModelLoadError or ConfigError."""
    with console.status(f"loading {model}") as status:
        bare = TokenEngine.load(model, dtype, device, pages=PAGES, page_size=PAGE, progress=status.update)
    tokenizer = Tokenizer.load(resolve_model(model).path)
    return Rig(
        executor=bare.executor,
        make_loop=lambda counting, kernel: bare.loop(kernel, counting),
        material=TextMaterial(tokenizer.encode),
        model=bare.name,
        dtype=bare.dtype,
        device=bare.device,
        versions={name: version(name) for name in ("torch", "numpy")},
    )
