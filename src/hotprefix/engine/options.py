"""Options. Owns: what is told of one (`option`), and the checks that follow from it.

Rules:
1. A setting is written once, as a field of a frozen dataclass: `kv_tokens: int = option(32768, ...)`. From it
   come the command line's option (commands/options.py), the check of its value, and its line in
   docs/policies.md. So adding one, or changing one, is one edit.
2. Its name on the command line is the field's, with hyphens and without `_s`, unless `flag` says otherwise.
3. Units stand in `unit`: they name the value in `--help`.
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
from hotprefix.kernel.config import Choice

T = TypeVar("T")


class Group(StrEnum):
    """The headings of `hotprefix serve --help`, in their order."""

    SERVER = "Server"
    MODEL = "Model"
    CACHE = "Cache"
    POLICIES = "Policies"
    LIMITS = "Limits of the engine"
    TIERS = "Tiers below the cache"
    OBSERVABILITY = "Observability"
    KV_EVENTS = "KV events"
    SECURITY = "Security"
    INTAKE = "Limits of clients and requests"


class Needs(NamedTuple):
    """What an option does nothing without. text: how to get it. holds: whether a configuration has it."""

    text: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Option:
    """What is told of a setting.

    help: one sentence, without its unit, range and default.
    group: its heading.
    unit: what the value is called: TOKENS, SECONDS, FILE ...
    values: of a choice: each value, what it does and when to use it. (A `Choice` has its own.)
    indexed: a value of the choice may be followed by a colon and a number ("cuda:1").
    least: the smallest allowed number.
    above: the number must be greater than this.
    most: the greatest allowed number.
    unset: what holds if the option is not given; the command line's default is then None.
    flag: its name on the command line, if it is not the field's; "" = only for the library.
    read: what makes the field's value of the file that the command line names.
    parts: the options of the fields of a nested dataclass.
    needs: what it does nothing without.
    """

    help: str
    group: Group
    unit: str
    values: Mapping[str, str] | None = None
    indexed: bool = False
    least: float | None = None
    above: float | None = None
    most: float | None = None
    unset: str = ""
    flag: str | None = None
    read: Callable[[Any], Any] | None = None
    parts: Mapping[str, Option] = field(default_factory=dict)
    needs: Needs | None = None

    @property
    def range(self) -> str:
        """The allowed numbers as text; "" = any."""
        if self.most is not None:
            return f"from {self.least:g} to {self.most:g}"
        if self.above is not None:
            return f"> {self.above:g}"
        return "" if self.least is None else f">= {self.least:g}"

    def allows(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and value < math.inf
        )


def option(default: T, help: str, group: Group, unit: str = "", *, repr: bool = True, **more: Any) -> T:
    """A dataclass field with that default. more: fields of `Option`."""
    made: T = field(default=default, metadata={"option": Option(help, group, unit, **more)}, repr=repr)
    return made


class Setting(NamedTuple):
    """A field that is an option. kind: its type, None taken away. within, part: the nested dataclass that
    `name` holds, and the field of it that this is; None, "" if it is the field itself."""

    name: str
    kind: type
    default: Any
    option: Option
    within: type | None = None
    part: str = ""

    @property
    def parameter(self) -> str:
        """The command's parameter; "" = it has none."""
        if self.option.flag is not None:
            return self.option.flag.replace("-", "_")
        return (f"{self.name}_{self.part}" if self.part else self.name).removesuffix("_s")

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        return f"--{self.parameter.replace('_', '-')}"

    @property
    def choices(self) -> Mapping[str, str]:
        """Each allowed text and its meaning; empty = any text."""
        if issubclass(self.kind, Choice):
            return {member.value: member.help for member in self.kind}
        return self.option.values or {}


@cache
def settings(config: type) -> tuple[Setting, ...]:
    """The options of a configuration, those of nested ones, too."""
    hints = get_type_hints(config)
    found = []
    for each in fields(config):
        told: Option | None = each.metadata.get("option")
        if told is not None:
            kind = _kind(hints[each.name])
            whole = Setting(each.name, kind, each.default, told)
            parts = (Setting(each.name, float, None, of, kind, part) for part, of in told.parts.items())
            found += [whole] if not told.parts else parts
    return tuple(found)


def check(config: Any) -> None:
    """Make members of the names of policies, and raise ConfigError for the first value that is not allowed.
    (Nested dataclasses check themselves.)"""
    for setting in settings(type(config)):
        value = getattr(config, setting.name)
        if setting.part or (value is None and setting.default is None):
            continue
        if setting.choices:
            text = str(value).partition(":")[0] if setting.option.indexed else str(value)
            require_one_of(setting.name, value, text, setting.choices)
            if issubclass(setting.kind, Choice):
                object.__setattr__(config, setting.name, setting.kind(text))
        elif setting.kind in (int, float) and setting.option.range:
            _require_number(setting, value)


def check_needs(config: Any) -> None:
    """Raise ConfigError for the first option that was given and does nothing without another."""
    for setting in settings(type(config)):
        needs, value = setting.option.needs, getattr(config, setting.name)
        if needs is not None and value != setting.default and not needs.holds(config):
            shown = str(value) if isinstance(value, StrEnum) else value
            raise ConfigError(
                f"{setting.name}={shown!r} does nothing without {needs.text}", param=setting.name
            )


def require_one_of(name: str, value: object, text: str, allowed: Iterable[str]) -> None:
    """Raise ConfigError, which names the nearest allowed text, if this one is not allowed."""
    names = list(allowed)
    if text not in names:
        near = get_close_matches(text.lower(), names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{name}={value!r}: give one of {', '.join(names)}{hint}", param=name)


def _require_number(setting: Setting, value: Any) -> None:
    whole = setting.kind is int
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not number or not setting.option.allows(value):
        what = "a whole number" if whole else setting.option.unit.lower()
        leave = ", or leave it out" if setting.default is None else ""
        raise ConfigError(
            f"{setting.name}={value!r}: give {what} {setting.option.range}{leave}", param=setting.name
        )


def _kind(hint: Any) -> type:
    if get_origin(hint) in (tuple, frozenset):
        return tuple
    kinds = [one for one in get_args(hint) or (hint,) if one is not type(None)]
    found: type = kinds[0]
    return found
