"""`hotprefix replay --against-live`. Owns: the way from its arguments to its files.

Rules: progress and tables go to stderr, results to `OUT/against-live.json` and `OUT/against-live.html`. The
exit status is 1 if the simulator did not make the engine's decisions, because that is a fault of hotprefix.
"""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from hotprefix.errors import InputError

DEFAULT_TRACE = "sample:agents"


def run(
    trace: str | None,
    out: Path,
    console: Console,
    *,
    limit: int | None = None,
    cost: str | None = None,
    model: str = "default",
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    seconds: float = 150.0,
    block: int | None = None,
    page_size: int = 16,
    kv_tokens: int | None = None,
    clock: str = "wall",
    seed: int = 0,
    json: bool = False,
) -> None:
    """Compare, show and write. cost: file or preset; None = calibrate first. Raises InputError."""
    from hotprefix.cost.presets import load_cost
    from hotprefix.engine.token_engine import TokenEngine
    from hotprefix.lab.live.against import Options, against_live
    from hotprefix.lab.trace.open_trace import open_trace
    from hotprefix.lab.trace.problems import require_prefixes
    from hotprefix.report.against_live import print_tables, render, to_json

    options = Options(
        **({} if limit is None else {"limit": limit}), seconds=seconds, block=block, page_size=page_size,
        kv_tokens=kv_tokens, clock=clock, seed=seed,
    )  # fmt: skip
    priced = None if cost is None else load_cost(cost)
    opened = open_trace(trace or DEFAULT_TRACE)
    require_prefixes(opened, "--against-live")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot make this folder: {error.strerror}", param="out") from error
    with console.status("starting") as status:
        bare = TokenEngine.load(
            model, dtype, device, pages=1, page_size=page_size, threads=threads, progress=status.update
        )
        found = against_live(bare, opened, options, priced, status.update)
    print_tables(found, console)
    (out / "against-live.json").write_text(to_json(found), encoding="utf-8")
    (out / "against-live.html").write_text(render(found), encoding="utf-8")
    console.print(f"report: {out / 'against-live.html'}", markup=False)
    if json:
        typer.echo(to_json(found))
    if not found.reuse_equal:
        raise typer.Exit(1)
