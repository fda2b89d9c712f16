"""Every option of `hotprefix serve` is one field, and changes what the server is started with."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hotprefix import cli
from hotprefix.commands.options import as_typed, filled, takes
from hotprefix.definitions import Slo
from hotprefix.engine.config import EngineConfig
from hotprefix.errors import InputError
from hotprefix.options import Group, Setting, option, settings
from hotprefix.router.config import SHARED, RouterConfig
from hotprefix.server import serve
from hotprefix.server.config import ServerConfig
from tests.support.options_page import PAGE, ROUTER_PAGE, page, router_page

KEYS = Path(__file__).parents[1] / "fixtures" / "api-keys.txt"
L2, L3 = {"l2_tokens": 1024}, {"l2_tokens": 1024, "l3": "file:///tmp/pages"}
KV = {"kv_events": "tcp://127.0.0.1:*"}
# Option: what else has to be given, and a value where another of its type is no good.
WITH: dict[str, dict[str, Any]] = {
    "write": L2, "l3": L2, "prefetch": L3, "prefetch_timeout": L3,
    "preemption": {"order": "priority"},
    "kv_events_replay": KV, "kv_events_form": KV, "kv_events_topic": KV, "kv_events_tokens": KV,
    "isolate_keys": {"api_key_file": KEYS}, "pace_factor": {"paced": "llama-3.1-8b.1xh100.fp8"},
}  # fmt: skip
VALUES: dict[str, Any] = {
    "l2_tokens": 1024, "api_key_file": KEYS, "internal_key_file": KEYS, "capacity": 2.5,
    "events": Path("log.jsonl"),
    "served_model_name": ["a"], "events_key_file": Path("key"), "window_tokens": 5, "max_model_len": 5,
    "threads": 1, "max_running": 3, "max_connections": 7, "allowed_hosts": ["a"], "allowed_host": ["a"],
    "slo_ttft": 1.0, "slo_tpot": 1.0, "slo_completion": 1.0, "slo_timeout": 1.0,
}  # fmt: skip
OPTIONS = inspect.signature(cli.serve).parameters
CHOICES = {
    one.parameter: one.choices
    for config in (EngineConfig, ServerConfig, RouterConfig)
    for one in settings(config)
}


def another(name: str, default: Any) -> Any:
    """A value other than the default, of its type."""
    if name in VALUES:
        return VALUES[name]
    if CHOICES.get(name):
        return next(value for value in CHOICES[name] if value != default)
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int | float) else "another"


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_reaches_the_server_or_its_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(serve, "serve", lambda *given: started.append(given))
    usual = {each: option.default for each, option in OPTIONS.items()}
    with_ = WITH.get(name, {})
    for value in (usual[name], another(name, usual[name])):
        cli.serve(**(usual | with_ | {name: value}))
    assert started[0] != started[1]


def test_without_options_the_configurations_are_the_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(serve, "serve", lambda *given: started.append(given))
    assert CliRunner().invoke(cli.app, ["serve"]).exit_code == 0
    assert started == [(EngineConfig(), ServerConfig())]


@pytest.mark.parametrize(
    "name", [f"{c.__name__}.{f.name}" for c in (EngineConfig, ServerConfig, Slo) for f in fields(c)]
)
def test_every_field_is_an_option(name: str) -> None:
    """Also those that only the library takes, so that their values are checked and their page has them."""
    of, field = name.split(".")
    told = {c.__name__: {one.name for one in settings(c)} for c in (EngineConfig, ServerConfig, Slo)}
    assert field in told[of] or name == "EngineConfig.slo"


@dataclass(frozen=True)
class More(EngineConfig):
    """One edit: a field."""

    patience: int = option(3, "How many times to try.", Group.LIMITS, "TIMES", ">= 2")
    mood: str = option(
        "calm", "How to try.", Group.LIMITS, "MOOD", values={"calm": "one by one", "wild": "at once"}
    )


def more(*arguments: str) -> tuple[Any, Any]:
    app, found = typer.Typer(rich_markup_mode="rich"), []

    @app.command()
    @takes(More)
    def start(**given: Any) -> None:
        found.append(filled(More, given))

    return CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "NO_COLOR": "1"}), found


def test_an_option_is_one_edit() -> None:
    """It is on the command line, in its help, in its configuration, checked, and on the page."""
    assert more("--patience", "7", "--mood", "wild")[1] == [More(patience=7, mood="wild")]
    assert more()[1] == [More()]
    help = more("--help")[0].output
    assert all(said in help for said in ("TIMES", "How many times to try. (>= 2)", "wild: at once"))
    for arguments, says in (
        (["--patience", "1"], "--patience 1: give a whole number >= 2"),
        (["--patience", "x"], "--patience x: give a whole number"),
        (["--mood", "wield"], "--mood wield: give one of calm, wild; did you mean wild?"),
    ):
        assert str(more(*arguments)[0].exception) == says
    assert "| `--patience` TIMES >= 2 | 3 |" in page(More)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--order fcsf", "--order fcsf: give one of fcfs, lpm, spf, dfs, priority; did you mean fcfs?"),
        ("--device tpu:0", "--device tpu:0: give one of auto, cpu, cuda; did you mean cpu?"),
        ("--order=", "--order '': give one of fcfs"),
        ("--cors-origin [", "--cors-origin '[': no regular expression"),
        ("--kv-tokens 0", "--kv-tokens 0: give a whole number >= 1"),
        ("--kv-tokens 1e3", "--kv-tokens 1e3: give a whole number"),
        ("--port 65536", "--port 65536: give 0 (any free port) to 65535"),
        ("--prefetch-timeout nan", "--prefetch-timeout nan: give seconds >= 0"),
        ("--drain-seconds inf", "--drain-seconds inf: give seconds >= 0"),
        ("--idle-timeout 0", "--idle-timeout 0.0: give seconds > 0"),
        ("--slo-ttft 0", "--slo-ttft 0.0: give seconds > 0, or leave it out"),
        ("--threads 0", "--threads 0: give a whole number >= 1, or leave it out"),
        ("--preemption", "--preemption does nothing without --order priority"),
        ("--write back --l2-tokens 0", "--write back does nothing without an L2: give --l2-tokens"),
        ("--prefetch wait_complete", "--prefetch wait_complete does nothing without an external store: give"),
        ("--isolate-keys", "--isolate-keys: there are no keys to tell apart; give --api-key-file, or leave"),
        ("--max-running 9 --max-batched-tokens 8", "--max-running 9 exceeds --max-batched-tokens 8: each"),
        ("--events /tmp/kv_tokens/l3.txt --l3 x", "--l3 x does nothing without an L2: give --l2-tokens"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_as_it_was_typed(arguments: str, says: str) -> None:
    error = CliRunner().invoke(cli.app, ["serve", *arguments.split()]).exception
    assert isinstance(error, InputError)
    assert str(error).startswith(says)


def test_paths_and_words_of_a_message_stay() -> None:
    flags = {"order": "--order", "l3": "--l3", "kv_tokens": "--kv-tokens"}
    for message in ("in order to, /tmp/l3/x: kv_tokens.txt and my_kv_tokens", "reorder=3"):
        assert as_typed(message, flags) == message.replace(": kv_tokens.txt", ": --kv-tokens.txt")


@pytest.mark.parametrize("width", ["80", "100"])
def test_help_has_every_option_under_a_heading_with_its_values(width: str) -> None:
    shown = CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": width, "NO_COLOR": "1"}).output
    assert "Example: hotprefix serve" in shown
    shows(shown, *(one for config in (ServerConfig, EngineConfig, Slo) for one in settings(config)))


def test_help_of_route_has_every_option_too() -> None:
    shown = CliRunner().invoke(cli.app, ["route", "--help"], env={"COLUMNS": "100", "NO_COLOR": "1"}).output
    shared = [one for one in settings(ServerConfig) if one.name in SHARED]
    assert len(shared) == len(SHARED)
    shows(shown, *shared, *settings(RouterConfig))


def shows(shown: str, *options: Setting) -> None:
    for one in options:
        assert f"─ {one.option.group} ─" in shown
        assert not one.parameter or f" {one.flag}" in shown, one.name
        assert all(f" {value}: " in shown for value in one.choices), one.name
        assert bool(one.option.unit) != (one.kind is bool), one.name
        assert all(help for help in one.choices.values()), one.name


def test_what_is_wrong_for_a_router_is_told_as_it_was_typed() -> None:
    for arguments, says in (
        (["--worker", "http://h:1", "--policy", "predict"], "--policy predict: give one of"),
        (["--worker", "http://h:1/v1"], "worker 'http://h:1/v1': give http://h:1 without /v1"),
        ([], "there is no worker: give --worker URL"),
        (["--worker", "http://h:1", "--poll", "0"], "--poll 0.0: give seconds > 0"),
    ):
        error = CliRunner().invoke(cli.app, ["route", *arguments]).exception
        assert isinstance(error, InputError)
        assert str(error).startswith(says), str(error)


def test_every_option_reaches_the_router(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[Any] = []
    monkeypatch.setattr("hotprefix.router.serve.route", lambda *given: started.append(given))
    key = tmp_path / "key"
    key.write_text("secret")
    plain = ["route", "--worker", "http://h:1", "--api-key-file", str(KEYS)]
    assert CliRunner().invoke(cli.app, plain).exit_code == 0
    files = {"admin_digests", "internal_key", "key_digests"}
    for one in (*(s for s in settings(ServerConfig) if s.name in SHARED), *settings(RouterConfig)):
        if one.kind is bool:
            given = [one.flag]
        elif one.name in files:
            given = [one.flag, str(key)]
        else:
            value = {"workers": "http://other:1", "page_size": 32, "max_connections": 7}.get(one.name)
            given = [one.flag, str(another(one.parameter, one.default) if value is None else value)]
        assert CliRunner().invoke(cli.app, [*plain, *given]).exit_code == 0, given
        for before, after in zip(started[0], started[-1], strict=True):
            if hasattr(before, one.name):
                assert getattr(before, one.name) != getattr(after, one.name), given


def test_the_page_of_options_is_what_is_generated() -> None:
    """`python -m tests.support.options_page` writes it again."""
    assert PAGE.read_text(encoding="utf-8") == page(ServerConfig, EngineConfig, Slo)
    assert ROUTER_PAGE.read_text(encoding="utf-8") == router_page()
