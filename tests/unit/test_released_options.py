"""An option that was released keeps its names, its default, the kind of its values and its choices.

Rules:
1. `tests/fixtures/released-options.json` has what was released; new options need no entry.
2. Taking an option away, or changing one, is a decision: it changes that file, and the change log says it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import typer

from hotprefix.cli import app
from hotprefix.engine.config import EngineConfig
from hotprefix.errors import HotprefixError, InputError
from hotprefix.server.config import ServerConfig

RELEASED = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "released-options.json").read_text(encoding="utf-8")
)


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its words, those of groups after the groups."""
    yield name, command
    for word, each in getattr(command, "commands", {}).items():
        yield from commands(each, f"{name} {word}".strip())


def kind(command: Any, given: Any) -> str:
    """What becomes of a value: whole numbers are tried first, text last."""
    if given.nargs == -1 or given.multiple:
        return "list"
    if getattr(given, "is_flag", False):
        return "switch"
    for value, kind in (("text", None), ("2.5", "number"), ("2", "whole number")):
        try:
            found = given.process_value(command.make_context("", [], resilient_parsing=True), value)
        except (HotprefixError, typer.BadParameter):
            continue
        if kind is None and isinstance(found, str | Path):
            return "path" if isinstance(found, Path) else "text"
        if kind:
            return kind
    return "choice"


def plain(value: Any) -> Any:
    """A default as JSON has it."""
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def options(command: Any) -> dict[str, Any]:
    return {
        " ".join([*given.opts, *given.secondary_opts]): {
            "default": plain(given.default), "kind": kind(command, given), "required": given.required,
            "environment": given.envvar,
        }
        for given in command.params
    }  # fmt: skip


def all_options() -> dict[str, Any]:
    return {name: options(each) for name, each in commands(typer.main.get_command(app))}
