"""`hotprefix calibrate`. Owns: its arguments.

Rules: progress goes to stderr and the result to the file; `--json` prints it, too.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hotprefix.commands.options import filled, takes
from hotprefix.engine.config import EngineConfig
from hotprefix.errors import InputError

if TYPE_CHECKING:
    from hotprefix.cost.model import CostModel
    from hotprefix.lab.cost.calibrate import Progress, Settings

stderr = Console(stderr=True)


@takes(
    EngineConfig,
    only=(
        "model",
        "dtype",
        "device",
        "threads",
        "kv_tokens",
        "page_size",
        "max_batched_tokens",
        "max_running",
    ),
)
def calibrate(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the cost model.", metavar="NAME", show_default="the file's")
    ] = None,
    clock: Annotated[
        str,
        typer.Option(
            help="How time is read.\n\nwall: by the clock on the wall; the usual choice\n\n"
            "cpu: CPU time, if other programs use the machine (one CPU thread only)"
        ),
    ] = "wall",
    seconds: Annotated[
        float | None, typer.Option(help="How long to measure.", metavar="SECONDS", show_default="120")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Measure for 20 seconds; less exact.")] = False,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Measure a running server with OpenAI's chat route, over HTTP. --model: the name that "
            "requests give; --max-running: the most streams at a time.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --url: file with the server's API key.")
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="EXPERIMENT",
            help="Find the largest load that one instance serves, in the simulator, under the conditions of "
            "this experiment (a shipped name or a .toml file).",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="With --capacity: as for replay."),
    ] = None,
    share: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="With --capacity: share of requests that must meet the objective."
        ),
    ] = 0.95,
    within: Annotated[
        float, typer.Option(metavar="SHARE", help="With --capacity: relative error of the rate.")
    ] = 0.05,
    json: Annotated[bool, typer.Option("--json", help="Print the result on stdout too.")] = False,
    **given: Any,
) -> None:
    """Measure what a step costs on this machine, for `hotprefix replay`.

    Writes a cost model (docs/cost-model.md) that experiments name in `cost`.

    Example: hotprefix calibrate --out cost.json

    Example: hotprefix calibrate --url http://10.0.0.5:8000 --out vllm.json

    Example: hotprefix calibrate --capacity refresh-off-on --set slo.ttft_s=5 --out capacity.json
    """
    if capacity is not None:
        _capacity(capacity, out, tuple(set_ or ()), share, within, json)
        return
    if set_:
        raise InputError("--set belongs to --capacity EXPERIMENT; give both", param="set")
    from hotprefix.lab.cost.calibrate import FULL_S, QUICK_S, Settings
    from hotprefix.lab.trace.write_trace import check_name

    if seconds is not None and quick:
        raise InputError("give --seconds or --quick, not both", param="quick")
    if api_key_file is not None and url is None:
        raise InputError("--api-key-file belongs to --url URL; give both", param="api_key_file")
    check_name(out)
    config = filled(EngineConfig, given)
    settings = Settings(
        QUICK_S if quick else FULL_S if seconds is None else seconds,
        config.max_batched_tokens, config.max_running, clock,
    )  # fmt: skip
    _check_writable(out)
    with stderr.status("starting") as status:
        told = name or out.stem
        if url is None:
            found = _this_engine(config, settings, told, status.update)
        else:
            found = _over_http(url, api_key_file, config, settings, told, status.update)
    found.save(out)
    stderr.print(found.label, markup=False, soft_wrap=True)
    if json:
        typer.echo(found.model_dump_json(indent=2))


def _this_engine(config: EngineConfig, settings: Settings, name: str, told: Progress) -> CostModel:
    from hotprefix.engine.token_engine import TokenEngine
    from hotprefix.lab.cost.calibrate import calibrate as measure

    bare = TokenEngine.load(
        config.model, config.dtype, config.device, pages=config.kv_tokens // config.page_size,
        page_size=config.page_size, threads=config.threads, progress=told,
    )  # fmt: skip
    return measure(bare, settings, name, told)[0]


def _over_http(
    url: str, key_file: Path | None, config: EngineConfig, settings: Settings, name: str, told: Progress
) -> CostModel:
    """The `--url` form of the command."""
    try:
        from hotprefix.lab.cost.over_http import Server, calibrate_url
    except ImportError as error:
        raise InputError(
            f"--url needs aiohttp ({error}): pip install 'hotprefix[engine]'", param="url"
        ) from None
    usual = EngineConfig(model=config.model, max_running=config.max_running)
    if config != usual or settings.clock != "wall":
        raise InputError("--url takes of the engine's options only --model and --max-running", param="url")
    key = None
    if key_file is not None:
        try:
            key = key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"api_key_file={str(key_file)!r}: {error}", param="api_key_file") from None
    server = Server(url, None if config.model == EngineConfig().model else config.model, key)
    return calibrate_url(server, name, settings.seconds, config.max_running, told)


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
