"""An option that was released keeps its names, its default, the kind of its values and its choices.

Rules:
1. `tests/fixtures/released-options.json` has what was released; new options need no entry.
2. Taking an option away, or changing one, is a decision: it changes that file, and the change log says it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from hotprefix.cli import app
from hotprefix.engine.config import EngineConfig
from hotprefix.errors import InputError
from hotprefix.options import settings

RELEASED = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "released-options.json").read_text(encoding="utf-8")
)


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its words, those of groups after the groups."""
    yield name, command
    for word, each in getattr(command, "commands", {}).items():
        yield from commands(each, f"{name} {word}".strip())


def kind(command: Any, given: Any) -> str:
    """What a value is read as."""
    if given.nargs == -1 or given.multiple:
        return "list"
    if getattr(given, "is_flag", False):
        return "switch"
    for value in ("text", "2.5", "2"):
        try:
            found = given.process_value(command.make_context("", [], resilient_parsing=True), value)
        except (InputError, typer.BadParameter):
            continue
        kinds = {float: "number", int: "whole number", str: "text"}
        return "path" if isinstance(found, Path) else kinds[type(found)]
    return "unknown"


def options(command: Any) -> dict[str, Any]:
    return {
        " ".join([*given.opts, *given.secondary_opts]): {
            "default": given.default, "kind": kind(command, given), "required": given.required,
            "environment": given.envvar,
        }
        for given in command.params
    }  # fmt: skip


def all_options() -> dict[str, Any]:
    return {name: options(each) for name, each in commands(typer.main.get_command(app))}


FOUND = all_options()


@pytest.mark.parametrize("command", RELEASED)
def test_every_released_option_is_as_it_was(command: str) -> None:
    for flags, was in RELEASED[command].items():
        now = {"required": False, "environment": None} | {k: v for k, v in was.items() if k != "choices"}
        assert FOUND[command][flags] == now, f"{command} {flags}"


@pytest.mark.parametrize(
    ("flag", "choices"),
    [(flag, was["choices"]) for flag, was in RELEASED["serve"].items() if "choices" in was],
)
def test_every_released_choice_is_one_still(flag: str, choices: list[str]) -> None:
    name = flag.removeprefix("--")
    allowed = next(one.choices for one in settings(EngineConfig) if one.name == name)
    assert set(choices) <= set(allowed)
