"""`hotprefix replay`. Owns: its arguments.

Rules: progress and the summary's table go to stderr, results to files in --out, and with `--json` to stdout,
too. If a run failed, that is told at the end, after everything that worked was written, and the exit status
is 1.
"""

from __future__ import annotations

import json as jsonlib
import shlex
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hotprefix.errors import InputError

stderr = Console(stderr=True)
LIVE = partial(typer.Option, rich_help_panel="With --against-live")


def replay(
    experiment: Annotated[str | None, typer.Argument(help="A shipped name (--list) or a .toml file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results; a sweep continues there.")] = None,
    trace: Annotated[str | None, typer.Option(help="Trace file instead of the experiment's.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the trace's first so many requests.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds 1 to so many.")] = None,
    until_decided: Annotated[
        int | None,
        typer.Option(
            metavar="MAX_SEEDS", help="Go on with more seeds, up to so many, until every claim is decided."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, for example load.concurrency=32.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs at a time.", show_default="one a core")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Run through Ray, started here.")] = False,
    ray_address: Annotated[str | None, typer.Option(help="Run on this Ray cluster (or: auto).")] = None,
    force: Annotated[bool, typer.Option(help="Take over --out from another experiment.")] = False,
    against_live: Annotated[
        bool, LIVE("--against-live", help="Run a small trace on the engine and in the simulator.")
    ] = False,
    cost: Annotated[
        str | None, LIVE(help="Cost model file or preset.", show_default="measured first")
    ] = None,
    model: Annotated[str | None, LIVE(help="Model, as for serve.")] = None,
    threads: Annotated[int | None, LIVE(help="CPU threads.", show_default="all")] = None,
    seconds: Annotated[float | None, LIVE(help="About how many seconds it takes.")] = None,
    clock: Annotated[str | None, LIVE(help="wall or cpu, as for calibrate.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the shipped experiments.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout too.")] = False,
) -> None:
    """Replay a trace under several policies and say which claims hold.

    Writes OUT/summary.json and OUT/report.html (intervals, verdicts, charts), and a table to stderr. Takes
    half the time once `hotprefix compile` has run.

    Example: hotprefix replay refresh-off-on --out out/refresh

    Example: hotprefix replay --against-live --out out/live
    """
    live = {"cost": cost, "model": model, "threads": threads, "seconds": seconds, "clock": clock}
    given = {name: value for name, value in live.items() if value is not None}
    if against_live:
        unused = {
            "seeds": seeds,
            "set": set_,
            "jobs": jobs,
            "ray": ray,
            "ray-address": ray_address,
            "force": force,
        }
        _refuse_unused(unused)
        _against_live(experiment, trace, out, limit, given, json)
        return
    if given:
        raise InputError(f"--{next(iter(given))}: only with --against-live; an experiment names its own")
    from hotprefix.lab.experiment.load import Changes, load, shipped

    if list_:
        questions = {name: load(name).question for name in shipped()}
        typer.echo(jsonlib.dumps(questions, indent=1) if json else _table(questions))
        return
    if experiment is None or out is None:
        raise InputError("give an experiment and --out DIR (experiments: hotprefix replay --list)")
    from hotprefix.lab.experiment.one_run import run
    from hotprefix.lab.experiment.ray_sweep import LOCAL

    found = run(
        load(experiment, Changes(trace, limit, seeds, until_decided, tuple(set_ or ())), _tell),
        out,
        stderr,
        jobs=jobs,
        ray=ray_address or (LOCAL if ray else None),
        force=force,
        command=_command(experiment, trace, limit, seeds, until_decided, set_ or []),
        meanwhile=_load_report,
    )
    from hotprefix.report.replay.write_files import write

    write(found, out, stderr)
    if json:
        typer.echo((out / "summary.json").read_text(encoding="utf-8"), nl=False)
    if found.problems:
        stderr.print(
            f"{len(found.problems)} runs have no result; the same command tries them again", style="red"
        )
        raise typer.Exit(1)


def _refuse_unused(given: dict[str, Any]) -> None:
    """Raises InputError if an option that belongs to experiments is given with --against-live."""
    for name, value in given.items():
        if value:
            raise InputError(
                f"--{name}: belongs to experiments; leave it out with --against-live", param=name
            )


def _tell(line: str) -> None:
    stderr.print(line, markup=False, soft_wrap=True)


def _load_report() -> None:
    """Import the report's modules. matplotlib takes half a second; most of that passes while the runs go
    on."""
    import_module("hotprefix.report.replay.write_files")


def _against_live(
    experiment: str | None, trace: str | None, out: Path | None, limit: int | None, given: dict[str, Any],
    json: bool,
) -> None:  # fmt: skip
    from hotprefix.commands.against_live import run

    if experiment is not None or out is None:
        raise InputError("--against-live: give --out DIR and no experiment (--trace takes the trace)")
    run(trace, out, stderr, limit=limit, json=json, **given)


def _table(questions: dict[str, str]) -> str:
    width = max(map(len, questions))
    return "\n".join(f"{name:{width}}  {question}" for name, question in questions.items())


def _command(
    experiment: str, trace: str | None, limit: int | None, seeds: int | None, until_decided: int | None,
    sets: list[str],
) -> str:  # fmt: skip
    """The command that gives these results again."""
    words = ["hotprefix", "replay", experiment]
    given = {
        "--trace": trace, "--limit": limit, "--seeds": seeds, "--until-decided": until_decided,
    }  # fmt: skip
    for option, value in given.items():
        if value is not None:
            words += [option, str(value)]
    for one in sets:
        words += ["--set", one]
    return shlex.join([*words, "--out", "DIR"])
