"""The shape of chat messages. Owns: checking OpenAI-style messages and making them what templates take.

Rules: null means absent; text parts are joined by a line feed, other parts are refused; arguments of an
assistant's tool calls become an object that still remembers the model's very bytes (`RawJson`), so the
next turn's prompt repeats what was generated and its cached prefix. Each refusal names the message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hotprefix.errors import InputError

ROLES = ("system", "developer", "user", "assistant", "tool")


class RawJson(dict[str, Any]):
    """A JSON object with the text it was parsed from, which `tojson` gives back."""

    def __init__(self, value: Mapping[str, Any], raw: str) -> None:
        super().__init__(value)
        self.raw = raw


def normalise(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Messages as templates take them. Raises InputError; `param` is messages or messages[i]..."""
    if not messages:
        raise InputError("messages: give at least one", param="messages")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise InputError(f"{where} is no object", param=where)
        clean = {key: item for key, item in message.items() if item is not None}
        if clean.get("role") not in ROLES:
            raise InputError(
                f"{where}.role={message.get('role')!r}: give one of {', '.join(ROLES)}", param=f"{where}.role"
            )
        calls = clean.get("tool_calls")
        if calls:
            clean["tool_calls"] = [_call(c, f"{where}.tool_calls[{j}]") for j, c in enumerate(calls)]
        else:
            clean.pop("tool_calls", None)
        if "content" not in clean and not (clean["role"] == "assistant" and calls):
            raise InputError(f"{where} has no content", param=f"{where}.content")
        clean["content"] = _text(clean.get("content", ""), f"{where}.content")
        yield clean


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InputError(f"{where}: give a string or a list of text parts", param=where)
    return "\n".join(_part(part, f"{where}[{j}]") for j, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise InputError(f"{where}: parts of type {kind!r} are not supported, give text", param=where)
    return str(part["text"])


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(f"{where}: give type, function.name and function.arguments", param=where)
    arguments = function.get("arguments")
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    try:
        value = json.loads(raw or "{}")
    except ValueError as error:
        raise InputError(
            f"{where}.function.arguments is not valid JSON: {error}", param=f"{where}.function.arguments"
        ) from None
    if not isinstance(value, dict):
        raise InputError(
            f"{where}.function.arguments: give a JSON object", param=f"{where}.function.arguments"
        )
    return {**call, "type": "function", "function": {**function, "arguments": RawJson(value, raw or "{}")}}
