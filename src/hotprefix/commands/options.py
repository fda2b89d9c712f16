"""A command's options from the configurations that they fill. Owns: `takes` and `filled`.

Rules: what an option is called, means and allows is written in its configuration (hotprefix/options.py) and
nowhere else. The message about a wrong value has the option as it is typed.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer

from hotprefix.errors import InputError
from hotprefix.options import Group, Setting, settings

C = TypeVar("C")


def takes(*configs: type, only: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, after its own options, those of configurations. It gets them as keywords, for `filled`.
    only: the names of the fields, if not all. Of two with one name the command has the first. Also without
    any, its errors are told in the same way."""
    every = [one for config in reversed(configs) for one in settings(config) if one.parameter]
    chosen = list({one.parameter: one for one in every if not only or one.name in only}.values())
    chosen.sort(key=lambda one: list(Group).index(one.option.group))

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        names = {each.name: f"--{each.name.strip('_').replace('_', '-')}" for each in own}
        flags = {name: one.flag for one in chosen for name in (one.name, one.parameter)}

        @wraps(function)
        def command(**values: Any) -> None:
            try:
                function(**values)
            except InputError as error:
                at_fault = {name: flag for name, flag in names.items() if name == error.param}
                error.args = (as_typed(str(error), at_fault | flags),)
                raise

        command.__doc__ = re.sub(
            r"(?<=\S)\n(?=\S)", " ", inspect.getdoc(function) or ""
        )  # help keeps its lines
        told = [_own(each, names[each.name]) for each in own] + [_given(one, flags) for one in chosen]
        command.__signature__ = signature.replace(parameters=told)  # type: ignore[attr-defined]
        return command

    return decorate


def filled(config: Callable[..., C], values: Mapping[str, Any], **more: Any) -> C:
    """The configuration that a command's keywords make; what was not given keeps its default. more: other
    fields. Raises ConfigError."""
    for one in settings(config):
        value = values.get(one.parameter)
        if value is not None:
            read = one.option.read or (tuple if one.kind is tuple else None)
            more[one.name] = value if read is None else read(value)
    return config(**more)


def as_typed(message: str, flags: Mapping[str, str]) -> str:
    """The message with options as they are typed: `kv_tokens=0` becomes `--kv-tokens 0`."""
    names = "|".join(map(re.escape, sorted(flags, key=len, reverse=True)))

    def typed(found: re.Match[str]) -> str:
        name, value = found["name"], found["plain"] if found["text"] is None else shlex.quote(found["text"])
        if value is None and name.isalpha():  # a word of the sentence
            return found[0]
        return flags[name] if value in (None, "True") else f"{flags[name]} {value}"

    pattern = rf"(?<![\w./-])(?P<name>{names})(?:=(?:'(?P<text>[^']*)'|(?P<plain>[^\s:;,]+))|(?![\w/=]))"
    return re.sub(pattern, typed, message) if flags else message


def _own(parameter: inspect.Parameter, flag: str) -> inspect.Parameter:
    """A command's own parameter, whose numbers are read by `_number`."""
    kind, *told = get_args(parameter.annotation) or (parameter.annotation,)
    number = next((each for each in (int, float) if each in (kind, *get_args(kind))), None)
    if number is None or not told:
        return parameter
    info = copy(told[0])
    info.parser = _number(number, flag)
    return parameter.replace(annotation=Annotated[kind, info])


def _given(one: Setting, flags: Mapping[str, str]) -> inspect.Parameter:
    """A setting as a command's parameter."""
    kind: Any = {int: int, float: float, bool: bool, tuple: list[str]}.get(one.kind, str)
    default = None if one.option.unset else str(one.default) if kind is str else one.default
    reads = _number(kind, one.flag) if kind in (int, float) else None
    info = typer.Option(
        help=told(one, flags), metavar=one.option.unit, rich_help_panel=one.option.group, parser=reads,
        show_default=one.option.unset or True,
    )  # fmt: skip
    kind = Path if one.option.read is not None else kind
    kind = kind if default is not None else kind | None
    return inspect.Parameter(
        one.parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def told(one: Setting, flags: Mapping[str, str]) -> str:
    """What an option is, allows and needs; then a paragraph for each value of a choice."""
    parts = [one.option.help, f"({one.option.range})" if one.option.range else ""]
    if one.option.needs is not None:
        parts.append(f"Needs {as_typed(one.option.needs[0], flags)}.")
    values = (f"{value}: {help}" for value, help in one.choices.items())
    return "\n\n".join([" ".join(filter(None, parts)), *values])


def _number(kind: type, flag: str) -> Callable[[Any], Any]:
    """What reads a number from the command line. Raises InputError, which names the option."""

    def read(value: Any) -> Any:
        try:
            return kind(value) if isinstance(value, str) else value
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise InputError(f"{flag} {value}: give {what}") from None

    read.__name__ = kind.__name__
    return read
