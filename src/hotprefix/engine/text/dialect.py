"""The Jinja dialect of chat templates. Owns: `Environment`, whose templates remember where text came from.

Rules: a template's own words (text between tags, and string constants) are marked as its own when it is
compiled (`own`). Everything that joins text (output, `~`, `join`, blocks, macros, `format`) keeps the marks
(origin.py). Names and blanks follow Hugging Face's convention; the sandbox is Jinja's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hotprefix.engine.text.chat_messages import Absent
from hotprefix.engine.text.json_text import to_json
from hotprefix.engine.text.origin import Origin, Traced, between, formatted, joined, traced


class _Code(CodeGenerator):
    """Compiles the template's own strings to marked strings."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.value, str):
            self.write(_own(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:  # noqa: N802
        self.write(_own(node.data))

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return _own("".join(group))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


def _own(text: str) -> str:
    return f"environment.own({text!r})"


class Environment(ImmutableSandboxedEnvironment):
    """Compiles chat templates. now: the clock of `strftime_now`."""

    code_generator_class = _Code
    concat = staticmethod(joined)

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        self.own = functools.cache(functools.partial(traced, origin=Origin.TEMPLATE))
        self.filters |= {"tojson": to_json, "join": _join, "safe": lambda value: value}
        self.tests["none"] = lambda value: value is None or isinstance(value, Absent)
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: now().strftime(form)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`form.format`, with the marks of the form kept."""
        wrapped = super().wrap_str_format(value)
        form = getattr(value, "__self__", None)
        if wrapped is None or not isinstance(form, Traced) or value.__name__ != "format":
            return wrapped
        return lambda *args, **kwargs: formatted(form, args, kwargs, str(wrapped(*args, **kwargs)))


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's words for training; rendering passes them through."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@jinja2.pass_environment
def _join(
    environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    """Jinja's `join`, with the origins kept."""
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return between(str(d), map(str, value))
