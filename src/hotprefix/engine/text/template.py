"""Chat messages to a prompt. Owns: `ChatTemplate`, rendering a model's own Jinja template.

Rules:
1. What a message says is never changed, and can never become a control token. For that the template's own
   words are marked, and keep the mark through whatever the template does with them (dialect.py, origin.py).
   Only text marked so can become a control token.
2. An assistant's own earlier words may become markup tokens (<think>, <tool_call>), never control tokens.
3. A stretch of text that goes from the template into a message is tokenized as one, as the model was trained.
4. BOS comes from the template alone.
5. Keys of tools keep the caller's order, so the same tools in another order are another prompt.
6. A conversation that the template would refuse or not show is rewritten first (history.py).
7. Any fault is an InputError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import jinja2.meta

from hotprefix.engine.text.chat_messages import normalise
from hotprefix.engine.text.dialect import Environment
from hotprefix.engine.text.history import TRIAL_TOOLS, Adapter
from hotprefix.engine.text.origin import Origin, runs_of, traced
from hotprefix.engine.text.tokenizer import Special, Tokenizer
from hotprefix.errors import InputError, ModelLoadError

_RESERVED = frozenset(
    ("messages", "tools", "documents", "bos_token", "eos_token", "raise_exception", "strftime_now")
)
# What a template can raise because of a request's values.
_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_SPECIAL: Mapping[Origin, Special] = {
    Origin.CALLER: "none",
    Origin.MODEL: "markup",
    Origin.TEMPLATE: "template",
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered chat as the model sees it: its text and its ids."""

    text: str
    ids: tuple[int, ...]


class ChatTemplate:
    """The chat template or templates of one model. Raises ModelLoadError if there is none or it cannot be
    parsed.

    source: a template that replaces the model's.
    now: the clock of `strftime_now`. A template that prints the date makes a new prompt each day, so what the
    prefix cache holds is found up to the date only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        source: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._tokenizer = tokenizer
        environment = Environment(now)
        sources = {"default": source} if source is not None else dict(tokenizer.templates)
        if "default" not in sources:
            raise ModelLoadError("the model has no chat template: give one, or use plain completions")
        try:
            self._templates = {name: environment.from_string(s) for name, s in sources.items()}
            for_tools = environment.parse(sources.get("tool_use", sources["default"]))
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the chat template does not parse: {error}") from error
        self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(for_tools)
        self._adapters = {name: Adapter(self._trial(name), tells_tools=self.knows_tools) for name in sources}

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
        """The prompt of a chat. Raises InputError, and what `check` raises.

        kwargs: further variables for the template (chat_template_kwargs).
        check: is given the text before it is tokenized.
        """
        reserved = _RESERVED.intersection(kwargs or ())
        if reserved:
            name = min(reserved)
            raise InputError(f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        try:
            told = self._adapters[name](list(normalise(messages)), tools or ())
            variables = {
                "add_generation_prompt": add_generation_prompt,
                **(kwargs or {}),
                "tools": list(tools) if tools else None,
                "documents": list(documents) if documents else None,
            }
            text = self._text(name, told, variables)
        except RecursionError:
            raise InputError("messages: nested too deeply", param="messages") from None
        except _FAULTS as error:
            raise InputError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        check(text)
        ids = self._tokenizer.encode_runs(
            text, [(length, _SPECIAL[origin]) for length, origin in runs_of(text)]
        )
        if not ids:
            raise InputError("messages: the prompt they make is empty", param="messages")
        return Prompt("".join((text,)), tuple(ids))

    def _text(self, name: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        marks = {
            f"{name}_token": traced(self._tokenizer.text_of(token), Origin.TEMPLATE)
            for name, token in (("bos", self._tokenizer.bos_id), ("eos", self._tokenizer.eos_id))
        }
        return self._templates[name].render({**variables, **marks, "messages": list(messages)})

    def _trial(self, name: str) -> Callable[[Sequence[Mapping[str, Any]]], str | None]:
        """A function that gives the text a conversation becomes; None if the template refuses it."""

        def shows(messages: Sequence[Mapping[str, Any]]) -> str | None:
            variables = {"add_generation_prompt": False, "tools": TRIAL_TOOLS if self.knows_tools else None}
            try:
                return self._text(name, messages, variables)
            except (*_FAULTS, RecursionError):
                return None

        return shows
