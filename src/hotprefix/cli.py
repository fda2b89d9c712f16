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
from typing import Annotated

import typer
from rich.console import Console

from hotprefix import __version__, compiled
from hotprefix.commands import trace
from hotprefix.commands.calibrate import calibrate
from hotprefix.commands.compile import compile_
from hotprefix.commands.replay import replay
from hotprefix.definitions import Slo
from hotprefix.errors import ConfigError, HotprefixError, InputError
from hotprefix.kernel.config import Eviction, Flight, Order, Prefetch, Publication, Refresh, Write

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
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes any free one.")] = 8000,
    model: Annotated[
        str, typer.Option(help="Hugging Face directory, .gguf file or hub id; default: the embedded model.")
    ] = "default",
    served_model_name: Annotated[list[str] | None, typer.Option(help="Name clients may give.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    decode_weights: Annotated[
        str, typer.Option(help="What small steps read: auto, dense or quantised (same numbers).")
    ] = "auto",
    page_size: Annotated[int, typer.Option(help="Tokens per KV page.")] = 16,
    kv_tokens: Annotated[int, typer.Option(help="Capacity of the KV pool, tokens.")] = 32768,
    window_tokens: Annotated[
        int | None,
        typer.Option(help="Capacity for layers with an attention window, tokens; 0: none of their own."),
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt plus outputs, tokens.")] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Keep computed prefixes.")] = True,
    publication: Annotated[
        Publication, typer.Option(help="When pages become visible.")
    ] = Publication.SCHEDULE,
    flight: Annotated[Flight, typer.Option(help="Who computes a shared prompt.")] = Flight.COALESCED,
    order: Annotated[Order, typer.Option(help="Order of the waiting queue.")] = Order.FCFS,
    eviction: Annotated[
        Eviction, typer.Option(help="What leaves the cache first; reuse is for replays.")
    ] = Eviction.LRU,
    preemption: Annotated[bool, typer.Option(help="With --order priority: displace less important.")] = False,
    max_batched_tokens: Annotated[int, typer.Option(help="Tokens one step may compute.")] = 2048,
    max_running: Annotated[int, typer.Option(help="Requests that run at a time.")] = 64,
    max_waiting: Annotated[int, typer.Option(help="Queue limit; 0 = none. Beyond it: 429.")] = 1024,
    refresh: Annotated[
        Refresh,
        typer.Option(help="What the waiting queue tells the cache; HOTPREFIX_WAITING_REFRESH=0 means off."),
    ] = Refresh.WINDOW,
    refresh_window: Annotated[int, typer.Option(help="Waiting requests that refresh looks at.")] = 128,
    refresh_every: Annotated[int, typer.Option(help="Planning passes between two refreshes.")] = 1,
    session_tokens: Annotated[
        int, typer.Option(help="What ended requests with a session_id may keep protected, tokens.")
    ] = 0,
    l2_tokens: Annotated[int, typer.Option(help="Capacity of the host tier, tokens; 0 = none.")] = 0,
    l3: Annotated[
        str | None, typer.Option(help="External store: file:///path, valkey://host:port/0, s3://bucket.")
    ] = None,
    write: Annotated[Write, typer.Option(help="When pages are copied to L2.")] = Write.THROUGH,
    prefetch: Annotated[Prefetch, typer.Option(help="How long a request waits for L3.")] = Prefetch.TIMEOUT,
    prefetch_timeout: Annotated[float, typer.Option(help="Seconds from enqueue, with timeout.")] = 1.0,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the engine.")] = None,
    events: Annotated[
        Path | None, typer.Option(help="Write an event log: PATH.jsonl or PATH.parquet (docs/records.md).")
    ] = None,
    events_key_file: Annotated[
        Path | None, typer.Option(help="Key of the log's fingerprints; default: a new one each time.")
    ] = None,
    kv_events: Annotated[
        str | None, typer.Option(help="Publish KV events there, for example tcp://127.0.0.1:5557.")
    ] = None,
    kv_events_replay: Annotated[str | None, typer.Option(help="Send missed KV events again there.")] = None,
    kv_events_form: Annotated[
        str, typer.Option(help="Events as maps (as vLLM 0.32) or arrays (earlier vLLM).")
    ] = "maps",
    kv_events_topic: Annotated[str, typer.Option(help="Topic of KV events, the first frame.")] = "",
    kv_events_tokens: Annotated[
        bool, typer.Option(help="Send token ids in KV events; routers that hash tokens need them.")
    ] = False,
    otel: Annotated[
        str | None, typer.Option(help="Send a span for each request to the OTLP/HTTP collector at this URL.")
    ] = None,
    slo_ttft: Annotated[
        float | None, typer.Option(help="Objective: seconds to the first token (docs/metrics.md, goodput).")
    ] = None,
    slo_tpot: Annotated[
        float | None, typer.Option(help="Objective: seconds per output token after the first.")
    ] = None,
    slo_completion: Annotated[float | None, typer.Option(help="Objective: seconds to the end.")] = None,
    slo_timeout: Annotated[
        float | None, typer.Option(help="Seconds without a first token that count as a time-out.")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with one API key a line.")] = None,
    isolate_keys: Annotated[bool, typer.Option(help="Keys do not share cached prefixes.")] = False,
    drain_seconds: Annotated[float, typer.Option(help="How long SIGTERM lets open requests run.")] = 30.0,
    cors_origin: Annotated[
        str | None,
        typer.Option(help="Regular expression of origins whose pages may call; default: localhost."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Further name a Host header may give: NAME, *.NAME, or * for any."),
    ] = None,
    stream_keepalive: Annotated[
        float, typer.Option(help="Seconds without a byte after which a stream sends a comment; 0: never.")
    ] = 0.0,
    body_limit: Annotated[int, typer.Option(help="Bytes of a request's body.")] = 32 * 1024 * 1024,
    max_choices: Annotated[int, typer.Option(help="Prompts times n in one request.")] = 128,
    max_messages: Annotated[int, typer.Option(help="Messages of one conversation; as many tools.")] = 10_000,
    max_json_values: Annotated[int, typer.Option(help="Values of any kind in a body (token ids).")] = 1 << 20,
    max_json_items: Annotated[
        int, typer.Option(help="Texts, names of fields, lists and objects in a body.")
    ] = 1 << 18,
    max_header_bytes: Annotated[int, typer.Option(help="Bytes of request line and headers.")] = 64 * 1024,
    max_headers: Annotated[int, typer.Option(help="Headers of a request.")] = 256,
    max_connections: Annotated[
        int | None,
        typer.Option(help="Open connections; default: what the limit of open files allows, to 4096."),
    ] = None,
    header_timeout: Annotated[float, typer.Option(help="Seconds for a request's headers.")] = 20.0,
    body_timeout: Annotated[float, typer.Option(help="Seconds for a body, plus what its bytes buy.")] = 60.0,
    min_body_rate: Annotated[int, typer.Option(help="Bytes of a body that buy one second more.")] = 64 * 1024,
    idle_timeout: Annotated[
        float, typer.Option(help="Seconds a connection waits for a next request.")
    ] = 75.0,
    send_timeout: Annotated[float, typer.Option(help="Seconds a client may read nothing.")] = 300.0,
) -> None:
    """Serve the OpenAI API on a real model.

    Example: hotprefix serve --port 8000 --kv-tokens 65536 --flight coalesced
    """
    _need_engine()
    from hotprefix.engine.config import EngineConfig
    from hotprefix.server.config import LOCAL_ORIGINS, ServerConfig
    from hotprefix.server.serve import serve as run_server

    engine = EngineConfig(
        model=model, dtype=dtype, device=device, decode_weights=decode_weights, kv_tokens=kv_tokens,
        page_size=page_size, window_tokens=window_tokens, max_model_len=max_model_len,
        prefix_cache=prefix_cache, publication=publication, flight=flight,
        order=order, eviction=eviction, preemption=preemption, max_batched_tokens=max_batched_tokens,
        max_running=max_running, max_waiting=max_waiting, threads=threads,
        refresh=_refresh(refresh), refresh_window=refresh_window, refresh_every=refresh_every,
        session_tokens=session_tokens, l2_tokens=l2_tokens, l3=l3, write=write, prefetch=prefetch,
        prefetch_timeout_s=prefetch_timeout,
        events=str(events) if events else None, kv_events=kv_events, kv_events_replay=kv_events_replay,
        events_key_file=str(events_key_file) if events_key_file else None, kv_events_form=kv_events_form,
        kv_events_topic=kv_events_topic, kv_events_tokens=kv_events_tokens, otel=otel,
        slo=_slo(ttft_s=slo_ttft, tpot_s=slo_tpot, completion_s=slo_completion, timeout_s=slo_timeout),
    )  # fmt: skip
    server = ServerConfig(
        host=host,
        port=port,
        key_digests=ServerConfig.keys_from_file(api_key_file) if api_key_file else frozenset(),
        isolate_keys=isolate_keys,
        served_names=tuple(served_model_name or ()),
        drain_s=drain_seconds,
        cors_origin=LOCAL_ORIGINS if cors_origin is None else cors_origin,
        allowed_hosts=tuple(allowed_host or ()),
        stream_keepalive_s=stream_keepalive, body_limit=body_limit, max_choices=max_choices,
        max_messages=max_messages, max_json_values=max_json_values, max_json_items=max_json_items,
        max_header_bytes=max_header_bytes, max_headers=max_headers, max_connections=max_connections,
        header_timeout_s=header_timeout, body_timeout_s=body_timeout, min_body_rate=min_body_rate,
        idle_timeout_s=idle_timeout, send_timeout_s=send_timeout,
    )  # fmt: skip
    run_server(engine, server)


@app.command()
def bench(
    workload: Annotated[
        str, typer.Argument(help="overlap, fan-out, burst, follow, late-pair, churn, or all.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for summary.json and report.html.")],
    runs: Annotated[int | None, typer.Option(help="Runs per arm (default 3; 1 with --quick).")] = None,
    quick: Annotated[bool, typer.Option(help="Small sizes, a minute or two.")] = False,
    every_arm: Annotated[bool, typer.Option(help="All publication x flight pairs everywhere.")] = False,
    model: Annotated[str, typer.Option(help="Hugging Face directory, .gguf file or hub id.")] = "default",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Run live experiments: workloads by publication and flight policy.

    Example: hotprefix bench burst --runs 5 --out out/burst
    """
    _need_engine()
    from hotprefix.bench.rig import load_rig
    from hotprefix.bench.runner import Options, parse_names, run_bench

    options = Options(parse_names(workload), runs, quick, every_arm)
    rig = load_rig(model, dtype, device, stderr)
    run_bench(rig, options, out, stderr)
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


app.command()(replay)
app.command()(calibrate)
app.command("compile")(compile_)
app.add_typer(trace.app, name="trace")


def _refresh(wanted: Refresh) -> Refresh:
    """The refresh to use: off if the operator's environment variable says so. It is read here, and once."""
    return Refresh.OFF if os.environ.get("HOTPREFIX_WAITING_REFRESH") == "0" else wanted


def _slo(**seconds: float | None) -> Slo | None:
    """The objectives; None if none was given. Raises ConfigError, which names the option."""
    return Slo(**seconds) if any(value is not None for value in seconds.values()) else None


def _need_engine() -> None:
    if find_spec("torch") is None:
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
