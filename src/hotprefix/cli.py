"""The command line. Owns: argument parsing and exit statuses, nothing else.

Rules: the exit status is 0 if the command was done, 2 for bad usage or input (one clear line on stderr), and
1 for a failure of hotprefix. Progress and tables go to stderr, machine-readable results to files or stdout.
Heavy imports happen inside commands, so `--help` is instant and works without the engine's dependencies. The
environment is read here (also by options that say so), and in `compiled.py` before anything is loaded.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hotprefix import __version__, compiled
from hotprefix.commands import trace
from hotprefix.commands.calibrate import calibrate
from hotprefix.commands.compile import compile_
from hotprefix.commands.fleet import fleet
from hotprefix.commands.options import filled, takes
from hotprefix.commands.replay import replay
from hotprefix.commands.route import route
from hotprefix.definitions import Slo
from hotprefix.engine.config import EngineConfig
from hotprefix.errors import ConfigError, HotprefixError, InputError
from hotprefix.kernel.config import Refresh
from hotprefix.localfleet.config import LocalFleetConfig
from hotprefix.server.config import ServerConfig

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="An LLM engine whose main character is the prefix cache.\n\nExample: hotprefix serve --port 8000",
)
stderr = Console(stderr=True)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"{__version__} (kernel compiled)" if compiled.in_use() else __version__)
        raise typer.Exit


@app.command()
@takes(ServerConfig, EngineConfig, Slo)
def serve(**given: Any) -> None:
    """Serve the OpenAI API on a real model, until SIGTERM or SIGINT.

    docs/policies.md has these options as a page, docs/api.md the routes.

    Example: hotprefix serve --port 8000 --kv-tokens 65536 --order lpm

    Example: hotprefix serve --paced llama-3.1-8b.1xh100.fp8 --kv-tokens 400000
    """
    _need_engine("torch" if given["paced"] is None else "starlette")
    from hotprefix.server.serve import serve as run_server

    if os.environ.get("HOTPREFIX_WAITING_REFRESH") == "0":
        given["refresh"] = Refresh.OFF
    slo = filled(Slo, given)
    engine = filled(EngineConfig, given, slo=None if slo == Slo() else slo)
    run_server(engine, filled(ServerConfig, given))


@app.command()
@takes(EngineConfig, LocalFleetConfig, only=("model", "dtype", "device", "paced", "engines"))
def bench(
    workload: Annotated[
        str, typer.Argument(help="overlap, fan-out, burst, follow, late-pair, churn, or all; or fleet.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for summary.json and report.html.")],
    runs: Annotated[
        int | None,
        typer.Option(help="Runs of each arm.", metavar="RUNS", show_default="3, or 1 with --quick"),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Small sizes, a minute or two.")] = False,
    every_arm: Annotated[bool, typer.Option(help="All publication x flight pairs everywhere.")] = False,
    **given: Any,
) -> None:
    """Run live experiments: workloads by publication and flight policy; `fleet`: by routing policy, on
    engines and routers that are started for it.

    Writes OUT/report.html with tables and charts, and OUT/summary.json with the same figures.

    Example: hotprefix bench burst --runs 5 --out out/burst

    Example: hotprefix bench fleet --workers 4 --paced llama-3.1-8b.1xh100.fp8 --out out/fleet
    """
    if workload == "fleet":
        _bench_fleet(runs, quick, out, given)
        return
    if given["paced"] is not None or given["workers"] != LocalFleetConfig().engines:
        raise InputError("paced and workers are for `bench fleet`: leave them out", param="paced")
    _need_engine()
    from hotprefix.bench.rig import load_rig
    from hotprefix.bench.runner import Options, parse_names, run_bench

    options = Options(parse_names(workload), runs, quick, every_arm)
    config = filled(EngineConfig, given)
    rig = load_rig(config.model, config.dtype, config.device, stderr)
    run_bench(rig, options, out, stderr)
    stderr.print(f"report: {out / 'report.html'}")


def _bench_fleet(runs: int | None, quick: bool, out: Path, given: dict[str, Any]) -> None:
    _need_engine("torch" if given["paced"] is None else "aiohttp")
    from hotprefix.bench.fleet_runner import FleetOptions, run_fleet_bench

    filled(EngineConfig, given)
    workers = filled(LocalFleetConfig, given).engines
    run_fleet_bench(FleetOptions(given, workers, runs=runs, quick=quick), out, stderr)
    stderr.print(f"report: {out / 'report.html'}")


@app.command()
def inspect(
    log: Annotated[
        Path, typer.Argument(help="Event log (.jsonl or .parquet); its further parts are read too.")
    ],
    out: Annotated[Path | None, typer.Option(help="HTML file to write.")] = None,
    rows: Annotated[
        Path | None, typer.Option(help="Table to write, a row a request: FILE.csv or FILE.parquet.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON on stdout.")] = False,
    skip_bad: Annotated[
        bool, typer.Option(help="Leave out lines that are no records; they are counted.")
    ] = False,
) -> None:
    """Show what an event log says: chains, loss, sources, hot and cold groups, buckets.

    Writes a page with tables and charts (--out) or a table with a row a request (--rows); --json prints the
    page's figures.

    Example: hotprefix inspect events.jsonl --out events.html
    """
    if out is None and rows is None and not json:
        raise InputError("give one or more of --out FILE.html, --rows FILE.csv and --json", param="out")
    from hotprefix.report.inspect import inspect_log, to_json

    found = inspect_log(log, out, rows=rows, skip_bad=skip_bad)
    if json:
        typer.echo(to_json(found))
    if out is not None:
        stderr.print(f"report: {out}")
    if rows is not None:
        stderr.print(f"rows: {rows}")


app.command()(route)
app.command()(fleet)
app.command()(replay)
app.command()(calibrate)
app.command("compile")(compile_)
app.add_typer(trace.app, name="trace")
for each in (*app.registered_commands, *trace.app.registered_commands):
    assert each.callback is not None
    each.callback = takes()(each.callback)  # so that wrong numbers are told alike everywhere


def _need_engine(library: str = "torch") -> None:
    if find_spec(library) is None:
        raise ConfigError("this command needs the engine's dependencies: pip install 'hotprefix[engine]'")


def main() -> None:
    """Entry point."""
    try:
        app()
    except InputError as error:
        stderr.print(f"hotprefix: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    except HotprefixError as error:
        stderr.print(f"hotprefix: {type(error).__name__}: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(1)
