"""`hotprefix trace`. Owns: its sub-commands and their arguments.

Rules: results go to stdout, progress and tables to stderr; files are written whole or not at all. `info` and
`check` tell what a file records, so they assume nothing about coding-agent files unless they are asked to;
`convert` writes what `replay` would read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hotprefix.commands.readable import readable
from hotprefix.errors import InputError

FOLDER_VARIABLE = "HOTPREFIX_TRACES"

app = typer.Typer(
    no_args_is_help=True,
    help="Look at traces, get, convert, generate, check and fit them.\n\n"
    "Example: hotprefix trace info sample:agents",
)
stderr = Console(stderr=True)

File = Annotated[str, typer.Argument(help="Trace file, folder of kv-cache-tester, or sample:agents.")]
Format = Annotated[str, typer.Option(help="auto, hotprefix, mooncake, agents, bailian, azure or events.")]
BlockSize = Annotated[int | None, typer.Option(help="Tokens a block, if the file does not say.")]
TimeUnit = Annotated[str | None, typer.Option(help="Unit of timestamps: s, ms, us or ns.")]
SkipBad = Annotated[bool, typer.Option(help="Leave out lines that are no requests; they are counted.")]
Limit = Annotated[int | None, typer.Option(help="The first so many requests.")]
SharedPrefix = Annotated[
    bool | None, typer.Option(help="Assume that coding-agent sessions share tools and system prompt.")
]
Answers = Annotated[bool, typer.Option(help="Assume that their answers stand in the next prompt unchanged.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


@app.command()
def info(
    file: File,
    format: Format = "auto",
    block_size: BlockSize = None,
    time_unit: TimeUnit = None,
    skip_bad: SkipBad = False,
    limit: Limit = None,
    shared_prefix: SharedPrefix = None,
    answers: Answers = False,
    json: Json = False,
) -> None:
    """Count a trace: requests, tokens, what an endless cache would reuse.

    Prints a table on stderr, or JSON on stdout.

    Example: hotprefix trace info mooncake.jsonl.gz --json
    """
    from hotprefix.lab.trace.info import info as count

    trace = _open(file, format, block_size, time_unit, limit, shared_prefix, answers)
    trace.skip_bad = skip_bad
    with _progress(trace):
        found = dataclasses.asdict(count(trace))
    found["skipped_lines"] = trace.report.skipped
    found["reordered_requests"] = trace.report.reordered
    _told_bad(trace)
    _print(found, json)


@app.command()
def convert(
    file: File,
    out: Annotated[Path, typer.Option(help="File to write: .jsonl, .jsonl.gz or .jsonl.zst.")],
    format: Format = "auto",
    block_size: BlockSize = None,
    time_unit: TimeUnit = None,
    skip_bad: SkipBad = False,
    limit: Limit = None,
    shared_prefix: SharedPrefix = None,
    answers: Answers = False,
    session_rate: Annotated[
        float | None, typer.Option(help="Coding-agent sessions a second, Poisson; default: all at once.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the session starts.")] = 0,
) -> None:
    """Write a trace in our own format (docs/traces.md).

    OUT has a JSON object a line, a request each, as `replay` would read them.

    Example: hotprefix trace convert cc_weka_sessions_b64.jsonl.gz --session-rate 0.2 --out agents.jsonl.zst
    """
    from hotprefix.lab.trace.cc_sessions import SessionStarts
    from hotprefix.lab.trace.write_trace import write_trace

    starts = SessionStarts(session_rate, seed)
    if seed and session_rate is None:
        raise InputError(f"--seed {seed}: draws session starts; give --session-rate too", param="seed")
    trace = _open(file, format, block_size, time_unit, limit, shared_prefix, answers, starts)
    trace.skip_bad = skip_bad
    with _progress(trace):
        count = write_trace(trace, out)
    _told_bad(trace)
    stderr.print(f"{out}: {count} requests", markup=False, soft_wrap=True)


@app.command()
def gather(
    folder: Annotated[Path, typer.Argument(help="kv-cache-tester's folder of trace_*.json files.")],
    out: Annotated[Path, typer.Option(help="File to write: .jsonl, .jsonl.gz or .jsonl.zst.")],
    max_bytes: Annotated[int | None, typer.Option(help="Leave out files of more bytes.")] = None,
) -> None:
    """Put recorded coding-agent sessions into one file, each on a line (docs/traces.md).

    Example: hotprefix trace gather kv-cache-tester/traces --out sessions.jsonl.gz
    """
    from hotprefix.lab.trace import kvtester
    from hotprefix.lab.trace.write_trace import check_suffix, whole_file

    check_suffix(out)
    count = left = 0
    with stderr.status("reading") as status, whole_file(out) as file:
        for path, line in kvtester.gather(folder, max_bytes):
            status.update(path.name)
            if line is None:
                left += 1
                continue
            file.write(line)
            count += 1
    stderr.print(f"{out}: {count} sessions, {left} files left out", markup=False, soft_wrap=True)


@app.command()
def published(
    folder: Annotated[
        Path | None, typer.Option(envvar=FOLDER_VARIABLE, help="Where your copies are.", show_envvar=True)
    ] = None,
    json: Json = False,
) -> None:
    """List the public traces that documented figures rest on: where each comes from, how to get it, and
    whether your copy is the same (SHA-256). Exit status 2 if one differs.

    Example: HOTPREFIX_TRACES=traces hotprefix trace published
    """
    from hotprefix.lab.trace.published import PUBLISHED, CopyState, check

    if folder is not None and not folder.is_dir():
        raise InputError(f"{folder}: no such folder; make it, or give another", param="folder")
    place = f'"${FOLDER_VARIABLE}"'
    states = {one.name: None if folder is None else check(one, folder) for one in PUBLISHED}
    if json:
        rows = [
            dataclasses.asdict(one) | {"get": one.steps(place), "state": states[one.name]}
            for one in PUBLISHED
        ]
        typer.echo(_json(rows))
    else:
        for one in PUBLISHED:
            state = states[one.name] or f"not looked for: set {FOLDER_VARIABLE}"
            typer.echo(f"{one.name}: {state} ({one.licence}, {one.repository} at {one.commit[:7]})")
            if states[one.name] is not CopyState.SAME:
                typer.echo("".join(f"    {step}\n" for step in one.steps(place)), nl=False)
    differing = [name for name, state in states.items() if state is CopyState.DIFFERS]
    if differing:
        raise InputError(
            f"{folder}: {', '.join(differing)} differ from what was published; get them again", param="folder"
        )


@app.command()
def generate(
    name: Annotated[str, typer.Argument(help="agents, bursts, documents, skew, churn or stranger.")],
    out: Annotated[Path, typer.Option(help="File to write: .jsonl, .jsonl.gz or .jsonl.zst.")],
    params: Annotated[
        Path | None, typer.Option(help='JSON file with "params", as `trace fit` writes it.')
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A parameter: name=JSON value. Repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal bytes.")] = 0,
    limit: Limit = None,
) -> None:
    """Make a trace up, with published parameters or yours.

    Writes it in our own format (docs/traces.md); equal seeds give equal bytes.

    Example: hotprefix trace generate agents --set sessions=20 --seed 7 --out agents.jsonl.gz
    """
    from hotprefix.lab.trace.generate.registry import generate_trace
    from hotprefix.lab.trace.write_trace import write_trace

    chosen = (_params(params, name) if params else {}) | dict(_setting(text) for text in settings or ())
    trace = generate_trace(name, chosen, seed=seed, limit=limit)
    with _progress(trace):
        count = write_trace(trace, out)
    stderr.print(f"{out}: {count} requests", markup=False, soft_wrap=True)


@app.command()
def check(
    file: File,
    format: Format = "auto",
    block_size: BlockSize = None,
    time_unit: TimeUnit = None,
    limit: Limit = None,
    shared_prefix: SharedPrefix = None,
    json: Json = False,
) -> None:
    """Find everything that is wrong with a trace. Exit status 2 if something is.

    Prints each kind of fault with its count and its first case.

    Example: hotprefix trace check mine.jsonl
    """
    from hotprefix.lab.trace.check import check as find

    trace = _open(file, format, block_size, time_unit, limit, shared_prefix, False)
    with _progress(trace):
        found = find(trace)
    if json:
        typer.echo(_json(dataclasses.asdict(found)))
    else:
        table = Table("count", "problem", "first case")
        for problem in found.problems:
            table.add_row(str(problem.count), problem.what, problem.first)
        if found.problems:
            stderr.print(table)
        for what, count in found.notes.items():
            stderr.print(f"{what}: {count}", markup=False)
    if found.problems:
        total = sum(problem.count for problem in found.problems)
        raise InputError(f"{file}: {total} faults of {len(found.problems)} kinds", param="trace")
    stderr.print(f"{file}: {found.requests} requests, no fault found", markup=False, soft_wrap=True)


@app.command()
def fit(
    file: Annotated[Path, typer.Argument(help="Coding-agent session file.")],
    out: Annotated[Path, typer.Option(help="JSON file to write, for `trace generate --params`.")],
    skip_bad: SkipBad = False,
) -> None:
    """Fit the coding-agent generator to recorded sessions.

    Writes parameters, and prints how well each distribution fits.

    Example: hotprefix trace fit cc_weka_sessions_b64.jsonl.gz --out fitted.json
    """
    from hotprefix.lab.trace.fit_agents import fit_agents
    from hotprefix.lab.trace.problems import Report
    from hotprefix.lab.trace.write_trace import whole_file

    report = Report(skip_bad=skip_bad)
    with stderr.status("reading"):
        found = fit_agents(file, report)
    with whole_file(out) as written:
        written.write(_json(found).encode() + b"\n")
    table = Table("quantity", "n", "form", "KS of lognormal", "median", "sigma", "p50", "p90")
    for quantity, of in found["fit"]["quantities"].items():
        cells = (of.get(key) for key in ("ks", "median", "sigma", "p50", "p90"))
        shown = ("" if value is None else f"{value:.4g}" for value in cells)
        table.add_row(quantity, str(of["n"]), of["form"], *shown)
    stderr.print(table)
    stderr.print(f"{out}: {found['fit']['sessions']} sessions, {report.skipped} lines skipped", markup=False)


def _open(
    file: str, format: str, block_size: int | None, time_unit: str | None, limit: int | None,
    shared_prefix: bool | None, answers: bool, starts: Any = None,
) -> Any:  # fmt: skip
    """Open a trace. starts: when sessions begin, given only if the trace is to be replayed; its sessions
    share a prefix then, unless `shared_prefix` says otherwise."""
    from hotprefix.lab.trace.cc_sessions import Assumed
    from hotprefix.lab.trace.open_trace import open_trace
    from hotprefix.lab.trace.timestamps import PER_SECOND

    if time_unit is not None and time_unit not in PER_SECOND:
        raise InputError(f"--time-unit {time_unit}: there are {', '.join(PER_SECOND)}", param="time_unit")
    shares = starts is not None if shared_prefix is None else shared_prefix
    trace = open_trace(
        file, format=format, block_size=block_size, time_unit=time_unit, limit=limit,  # type: ignore[arg-type]
        sessions=starts, assumed=Assumed(shares, answers),
    )  # fmt: skip
    if shared_prefix is not None and trace.provenance.format != "agents":
        raise InputError(
            f"--shared-prefix: {file} is of format {trace.provenance.format}, which leaves nothing to "
            "assume: leave it out",
            param="shared_prefix",
        )
    return trace


@contextmanager
def _progress(trace: Any) -> Iterator[None]:
    with stderr.status("reading") as status:
        trace.told = lambda count: status.update(f"{count} requests")
        yield


def _told_bad(trace: Any) -> None:
    if trace.report.skipped:
        text = f"{trace.report.skipped} bad lines skipped; the first: {trace.report.first_bad}"
        stderr.print(text, markup=False, soft_wrap=True)


def _print(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(_json(found))
        return
    table = Table("what", "value")
    for name, value in found.items():
        table.add_row(name, readable(name, value))
    stderr.print(table)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)


def _params(path: Path, name: str) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8-sig"))
        given = held["params"]
        made_for = held.get("generator", name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f'{path}: give a JSON object with "params" ({error})', param="params") from None
    if made_for != name or not isinstance(given, dict):
        raise InputError(f"{path}: holds parameters of generator {made_for!r}", param="params")
    return given


def _setting(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    try:
        if not sign:
            raise ValueError("there is no =")
        return name, json.loads(value)
    except ValueError as error:
        raise InputError(f"--set {text}: give name=value, the value as JSON ({error})", param="set") from None
