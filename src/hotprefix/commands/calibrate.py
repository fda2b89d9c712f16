"""`hotprefix calibrate`. Owns: its arguments.

Rules: progress goes to stderr and the result to the file; `--json` prints it, too.
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
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="EXPERIMENT",
            help="Find the largest load that one instance serves, in the simulator, under the conditions of "
            "this experiment (a shipped name or a .toml file).",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="With --capacity: key=value, as for replay.")
    ] = None,
    share: Annotated[
        float, typer.Option(help="With --capacity: share of requests that must meet the objective.")
    ] = 0.95,
    within: Annotated[float, typer.Option(help="With --capacity: relative error of the rate.")] = 0.05,
    json: Annotated[bool, typer.Option("--json", help="Print the result on stdout too.")] = False,
) -> None:
    """Measure what a step costs on this machine, for `hotprefix replay`.

    Example: hotprefix calibrate --out cost.json

    Example: hotprefix calibrate --capacity refresh-off-on --set slo.ttft_s=5 --out capacity.json
    """
    if capacity is not None:
        _capacity(capacity, out, tuple(set_ or ()), share, within, json)
        return
    if set_:
        raise InputError("--set belongs to --capacity EXPERIMENT; give both", param="set")
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


def _capacity(
    experiment: str, out: Path, sets: tuple[str, ...], share: float, within: float, json: bool
) -> None:
    """The `--capacity` form of the command."""
    from hotprefix.lab.experiment.find_capacity import find_capacity
    from hotprefix.lab.experiment.load import Changes, load

    _check_writable(out, "capacity")
    with stderr.status("reading the trace") as status:
        conditions = load(experiment, Changes(sets=sets))
        found = find_capacity(conditions, share=share, within=within, told=status.update)
    found.save(out)
    stderr.print(
        f"{found.requests_per_s:.4g} requests/s: {share:.0%} meet {found.conditions.objectives}; at "
        f"{found.too_much:.4g} they do not ({found.conditions.cost}, {found.conditions.trace})",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    if json:
        typer.echo(found.model_dump_json(indent=2))


def _check_writable(out: Path, what: str = "cost model") -> None:
    """Measuring takes minutes, so a file that cannot be written is found out before. Raises InputError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise InputError(f"{out}: cannot write the {what}: {error.strerror}", param="out") from None
