"""`hotprefix calibrate`. Owns: its arguments.

Rules: progress goes to stderr and the model to the file; `--json` prints the model, too.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hotprefix.errors import InputError

stderr = Console(stderr=True)


def calibrate(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    model: Annotated[str, typer.Option(help="Hugging Face directory, .gguf file or hub id.")] = "default",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: all.")] = None,
    kv_tokens: Annotated[int, typer.Option(help="Capacity of the KV pool, tokens.")] = 32768,
    page_size: Annotated[int, typer.Option(help="Tokens per KV page.")] = 16,
    max_batched_tokens: Annotated[int, typer.Option(help="Tokens one step may compute.")] = 2048,
    max_running: Annotated[int, typer.Option(help="Requests that run at a time.")] = 64,
    name: Annotated[str | None, typer.Option(help="Name of the cost model; default: the file's.")] = None,
    clock: Annotated[
        str, typer.Option(help="wall; or cpu where other programs use the machine (one CPU thread only).")
    ] = "wall",
    seconds: Annotated[float | None, typer.Option(help="How long to measure; default 120.")] = None,
    quick: Annotated[bool, typer.Option(help="20 seconds; less exact.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the model on stdout too.")] = False,
) -> None:
    """Measure what a step costs on this machine, for `hotprefix replay`.

    Example: hotprefix calibrate --out cost.json
    """
    from hotprefix.engine.config import EngineConfig
    from hotprefix.engine.token_engine import TokenEngine
    from hotprefix.lab.cost.calibrate import FULL_S, QUICK_S, Settings
    from hotprefix.lab.cost.calibrate import calibrate as measure
    from hotprefix.lab.trace.write_trace import check_name

    if seconds is not None and quick:
        raise InputError("give --seconds or --quick, not both", param="quick")
    check_name(out)
    settings = Settings(
        QUICK_S if quick else FULL_S if seconds is None else seconds, max_batched_tokens, max_running, clock
    )
    EngineConfig(kv_tokens=kv_tokens, page_size=page_size, threads=threads,
                 max_batched_tokens=max_batched_tokens, max_running=max_running)  # fmt: skip
    _check_writable(out)
    with stderr.status("starting") as status:
        bare = TokenEngine.load(
            model, dtype, device, pages=kv_tokens // page_size, page_size=page_size, threads=threads,
            progress=status.update,
        )  # fmt: skip
        found, _ = measure(bare, settings, name or out.stem, status.update)
    found.save(out)
    stderr.print(found.label, markup=False, soft_wrap=True)
    if json:
        typer.echo(found.model_dump_json(indent=2))


def _check_writable(out: Path) -> None:
    """Measuring takes minutes, so a file that cannot be written is found out before. Raises InputError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise InputError(f"{out}: cannot write the cost model: {error.strerror}", param="out") from None
