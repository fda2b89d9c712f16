"""Options. Owns: what is told of a setting (`option`), and the checks that follow from it.

Rules:
1. A setting is written once, as a field of a frozen dataclass: `kv_tokens: int = option(32768, ...)`. From it
   come the command line's option (commands/options.py), the check of its value, and its line in
   docs/policies.md. So a new option is one edit there; then its reader, its row
   in the tests' walk over all options, and docs/policies.md, which is generated.
2. On the command line it has the field's name, with hyphens and without `_s`, unless `flag` says otherwise.
3. `unit` names the value in `--help`. A policy is a StrEnum whose members have a `help`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from hotprefix.errors import ConfigError

T = TypeVar("T")
Needs = tuple[str, Callable[[Any], bool]]  # how to get what is needed, and whether a configuration has it


class Group(StrEnum):
    """The headings of `hotprefix serve --help` and `hotprefix route --help`, in their order."""

    SERVER = "Server"
    MODEL = "Model"
    CACHE = "Cache"
    POLICIES = "Policies"
    LIMITS = "Limits of the engine"
    TIERS = "Tiers below the cache"
    OBSERVABILITY = "Observability"
    KV_EVENTS = "KV events"
    FLEET = "Part of a fleet"
    SECURITY = "Security"
    INTAKE = "Limits of clients and requests"
    WORKERS = "Workers"
    ROUTING = "Routing"
    FAILURES = "Failures"
    OVERLOAD = "Overload"


@dataclass(frozen=True, slots=True)
class Option:
    """What is told of a setting.

    help: one sentence, without its unit, range and default.
    group: its heading.
    unit: what the value is called: TOKENS, SECONDS, FILE ...
    range: of a number: ">= 1" or "> 0"; "" = any.
    values: of a choice: each value, what it does and when to use it. (A policy tells its own.)
    indexed: a value of the choice may be followed by a colon and a number ("cuda:1").
    unset: what holds if the option is not given; the command line's default is then None.
    flag: its name on the command line, if it is not the field's; "" = only for the library.
    read: what makes the field's value of the file that the command line names.
    needs: what it does nothing without.
    """

    help: str
    group: Group
    unit: str
    range: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    indexed: bool = False
    unset: str = ""
    flag: str | None = None
    read: Callable[[Any], Any] | None = None
    needs: Needs | None = None


def option(
    default: T, help: str, group: Group, unit: str = "", range: str = "", *, repr: bool = True, **more: Any
) -> T:
    """A dataclass field with that default. more: fields of `Option`."""
    told = Option(help, group, unit, range, **more)
    made: T = field(default=default, metadata={"option": told}, repr=repr)
    return made


class Setting(NamedTuple):
    """A field that is an option. kind: its type, None taken away; of a tuple, `tuple`."""

    name: str
    kind: type
    default: Any
    option: Option

    @property
    def parameter(self) -> str:
        """The command's parameter; "" = it has none."""
        flag = self.option.flag
        return self.name.removesuffix("_s") if flag is None else flag.replace("-", "_")

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        return f"--{self.parameter.replace('_', '-')}"

    @property
    def choices(self) -> Mapping[str, str]:
        """Each allowed text and its meaning; empty = any text."""
        members = self.kind if issubclass(self.kind, StrEnum) else ()
        return {str(member): getattr(member, "help", "") for member in members} or self.option.values


@cache
def settings(config: Any) -> tuple[Setting, ...]:
    """The options of a configuration, which is a class."""
    hints = get_type_hints(config)
    told = ((each, each.metadata.get("option")) for each in fields(config))
    return tuple(Setting(each.name, _kind(hints[each.name]), each.default, of) for each, of in told if of)


def check(config: Any) -> None:
    """Make members of the names of policies. Raises ConfigError for the first value that is not allowed, and
    for the first option that was given and does nothing without another."""
    every = settings(config.__class__)
    for one in every:
        value = getattr(config, one.name)
        if value is None and one.default is None:
            continue
        if one.choices:
            text = str(value).partition(":")[0] if one.option.indexed else str(value)
            require_one_of(one.name, value, text, one.choices)
            if issubclass(one.kind, StrEnum):
                object.__setattr__(config, one.name, one.kind(text))
        elif one.option.range and not _allowed(one, value):
            what = "a whole number" if one.kind is int else one.option.unit.lower()
            leave = ", or leave it out" if one.default is None else ""
            raise ConfigError(f"{one.name}={value!r}: give {what} {one.option.range}{leave}", param=one.name)
    for one in every:
        needs, value = one.option.needs, getattr(config, one.name)
        if needs is not None and value != one.default and not needs[1](config):
            shown = str(value) if isinstance(value, StrEnum) else value
            raise ConfigError(f"{one.name}={shown!r} does nothing without {needs[0]}", param=one.name)


def require_one_of(name: str, value: object, text: str, allowed: Iterable[str]) -> None:
    """Raise ConfigError, which names the nearest allowed text, if this one is not allowed."""
    names = list(allowed)
    if text not in names:
        near = get_close_matches(text.lower(), names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{name}={value!r}: give one of {', '.join(names)}{hint}", param=name)


def _allowed(one: Setting, value: Any) -> bool:
    if not isinstance(value, int if one.kind is int else int | float) or isinstance(value, bool):
        return False
    sign, limit = one.option.range.split()
    return (value >= float(limit) if sign == ">=" else value > float(limit)) and value < math.inf


def _kind(hint: Any) -> type:
    if get_origin(hint) in (tuple, frozenset):
        return tuple
    found: type = (get_args(hint) or (hint,))[0]
    return found
