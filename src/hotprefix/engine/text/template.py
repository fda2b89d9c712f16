"""Chat messages to a prompt. Owns: `ChatTemplate`, rendering a model's own Jinja template.

Rules: what a message says can never become a control token (handed case 17). Before rendering, every
control token's text inside a caller's string is broken by a guard character that occurs nowhere in the
request; after rendering, the tokenizer finds the control tokens, which are then all the template's, and
only then drops the guards. Strings are changed nowhere else, so templates may trim, split, compare and
slice them, and text runs through template and message are tokenized as one, as the model was trained.
An assistant's own earlier words may hold markup tokens (<think>, <tool_call>), never control tokens.
BOS comes from the template alone (handed case 16). Keys of tools keep the caller's order (handed case
42): the same tools in another order are another prompt. A template that knows no tools gets them in
plain messages (tool_prompt.py). Any fault is an InputError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hotprefix.engine.text.guard import Guard
from hotprefix.engine.text.messages import RawJson, normalise
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.engine.text.tool_prompt import inlined
from hotprefix.errors import InputError, ModelLoadError

_RESERVED = frozenset(
    ("messages", "tools", "documents", "bos_token", "eos_token", "raise_exception", "strftime_now")
)
# What a template can raise over a request's values.
_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered chat: what the model sees, as text and as ids."""

    text: str
    ids: tuple[int, ...]


class ChatTemplate:
    """One model's chat template(s).

    source: a template that replaces the model's. now: clock of `strftime_now` (a template that prints
    it makes a new prompt each day: the prefix cache ends there). Raises ModelLoadError where there is
    no template or it does not parse.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        source: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._tokenizer = tokenizer
        self._environment = _environment(now)
        sources = {"default": source} if source is not None else dict(tokenizer.templates)
        if "default" not in sources:
            raise ModelLoadError("the model has no chat template: give one, or use plain completions")
        try:
            self._templates = {name: self._environment.from_string(s) for name, s in sources.items()}
            for_tools = self._environment.parse(sources.get("tool_use", sources["default"]))
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the chat template does not parse: {error}") from error
        self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(for_tools)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        check: Callable[[str], None] = lambda text: None,
    ) -> Prompt:
        """The prompt of a chat. kwargs: further variables for the template (chat_template_kwargs). check:
        sees the text before it is tokenized. Raises InputError, and what `check` raises."""
        reserved = _RESERVED.intersection(kwargs or ())
        if reserved:
            name = min(reserved)
            raise InputError(f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")
        try:
            guard = Guard(self._tokenizer, (messages, tools, documents, kwargs))
            told = list(normalise(messages))
            if tools and not self.knows_tools:
                told = inlined(told, tools)
            variables = {
                "add_generation_prompt": add_generation_prompt,
                **guard.value(dict(kwargs or {})),
                "messages": [guard.message(m) for m in told],
                "tools": guard.value(list(tools)) if tools else None,
                "documents": guard.value(list(documents)) if documents else None,
                "bos_token": self._tokenizer.text_of(self._tokenizer.bos_id),
                "eos_token": self._tokenizer.text_of(self._tokenizer.eos_id),
            }
            name = "tool_use" if tools and "tool_use" in self._templates else "default"
            text = self._templates[name].render(variables)
        except RecursionError:
            raise InputError("messages: nested too deeply", param="messages") from None
        except _FAULTS as error:
            raise InputError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        check(text)
        ids = self._tokenizer.encode(text, special="template", guard=guard.character)
        if not ids:
            raise InputError("messages: the prompt they make is empty", param="messages")
        return Prompt(text.replace(guard.character, ""), tuple(ids))


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's words for training; rendering passes them through."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: no HTML escapes. What a model wrote comes back byte
    for byte."""
    if isinstance(value, RawJson):
        return value.raw
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
