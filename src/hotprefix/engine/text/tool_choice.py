"""Making a model call a tool. Owns: the grammar behind a `tool_choice` of "required" or of a named tool.

Rules: the grammar is the model's own format, token for token: a mark for which the vocabulary has a token is
that token. So the parser reads what the grammar forces like any other call, and the next turn's prompt
repeats it. A tool's parameters are the root of a schema of their own, so references inside it keep their
meaning. `auto` and `none` force nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hotprefix.engine.params import StructuredOutput
from hotprefix.engine.sampling.json_schema import JSON_OPTIONS, adapted
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.engine.text.tools import CLOSER, OPENERS, ToolFormat
from hotprefix.errors import InputError

_ANY = {"type": "object"}
_SHAPES = {
    ToolFormat.HERMES: ('\n{"name": %s, "arguments": ', "}\n"),
    ToolFormat.LLAMA3: ('{"name": %s, "parameters": ', "}"),
    ToolFormat.MISTRAL: ('{"name": %s, "arguments": ', "}"),
}


def forced_calls(
    form: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    tokenizer: Tokenizer,
    *,
    parallel: bool = True,
) -> StructuredOutput | None:
    """The grammar for a choice; None for "auto" and "none". Raises InputError for a tool that does not exist.

    choice: "auto", "none", "required", or a tool's name, given as "name:f".
    parallel: whether several calls may follow each other.
    """
    if choice in ("auto", "none"):
        return None
    functions = [tool["function"] for tool in tools]
    if choice != "required":
        wanted = choice.removeprefix("name:")
        functions = [f for f in functions if f["name"] == wanted]
    if not functions:
        known = ", ".join(tool["function"]["name"] for tool in tools) or "none"
        raise InputError(f"tool_choice {choice!r}: the request's tools are {known}", param="tool_choice")
    return StructuredOutput("lark", _grammar(form, functions, tokenizer, parallel and choice == "required"))


def shows_markers(form: ToolFormat, tokenizer: Tokenizer) -> bool:
    """Whether the format's opener is a control token, which is shown only with skip_special_tokens=False."""
    return OPENERS[form] in tokenizer.special


def _grammar(
    form: ToolFormat, functions: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, several: bool
) -> str:
    before, after = _SHAPES[form]
    opener = _mark(OPENERS[form], tokenizer)
    gap = {ToolFormat.HERMES: "\n", ToolFormat.LLAMA3: "; ", ToolFormat.MISTRAL: ", "}[form]
    start = f"call ({_text(gap)} call)*" if several else "call"
    if form is ToolFormat.MISTRAL:
        start = f'{opener} " [" {start} "]"'
    call_head = f"{opener} " if form is ToolFormat.HERMES else ""
    end_mark = f" {_mark(CLOSER, tokenizer)}" if form is ToolFormat.HERMES else ""
    calls = []
    rules = []
    for i, function in enumerate(functions):
        head = before % json.dumps(function["name"], ensure_ascii=False)
        calls.append(f"{call_head}{_text(head)} arguments_{i} {_text(after)}{end_mark}")
        rules.append(f"arguments_{i}: %json {_arguments(function)}")
    return "\n".join([f"start: {start}", f"call: {' | '.join(calls)}", *rules])


def _arguments(function: Mapping[str, Any]) -> str:
    """The schema of a function's arguments. Raises InputError if it cannot be written as JSON."""
    schema = adapted(function.get("parameters") or _ANY) | {"x-guidance": JSON_OPTIONS}
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise InputError(f"the parameters of {function['name']!r}: {error}", param="tools") from None


def _mark(text: str, tokenizer: Tokenizer) -> str:
    """A mark as its token, or as text if the vocabulary has no token for it."""
    return f"<[{tokenizer.token_id(text)}]>" if text in tokenizer.control else _text(text)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
