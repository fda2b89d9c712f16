"""The shape of chat messages. Owns: checking OpenAI-style messages, and the form in which templates take
them.

Rules:
1. An absent or null content beside calls is `Absent`. Text parts are joined by a line feed; other parts are
   refused.
2. The arguments of a call are whatever the model wrote, complete or cut: an object for templates that want
   one, the very text for those that print it (`Arguments`).
3. What an assistant said is marked as the model's (origin.py). No string and no key is changed.
4. Each refusal names the message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hotprefix.engine.text.origin import Origin, joined, traced
from hotprefix.errors import InputError

ROLES = ("system", "developer", "user", "assistant", "tool")
_OPEN = re.compile(r"\s*\{\s*")
_COLON = re.compile(r"\s*:\s*")
_NEXT = re.compile(r"\s*(?:,\s*|\})")


class Absent(str):
    """No content: "" for a template that prints or searches it, none for a template that tests whether it is
    none."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or (isinstance(other, str) and not other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Arguments(dict[str, Any]):
    """The arguments of a call. As a mapping it is the object that the text says; if the text was cut, the
    members that were complete. If a template prints or joins it, it is `text`, what the model wrote."""

    def __init__(self, value: Mapping[str, Any], text: str) -> None:
        super().__init__(value)
        self.text = text

    @classmethod
    def of(cls, given: Any) -> Arguments:
        """The arguments that a client sent: a text, an object, or nothing."""
        text = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
        return cls(_of_model(_object(text)), traced(text or "{}", Origin.MODEL))

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: object) -> str:
        return joined((self.text, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return joined((other, self.text)) if isinstance(other, str) else NotImplemented


def normalise(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Messages as templates take them. Raises InputError; `param` is messages or messages[i]..."""
    if not messages:
        raise InputError("messages: give at least one", param="messages")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise InputError(f"{where} is no object", param=where)
        clean = {key: item for key, item in message.items() if item is not None}
        role = clean.get("role")
        if role not in ROLES:
            raise InputError(f"{where}.role={role!r}: give one of {', '.join(ROLES)}", param=f"{where}.role")
        calls = clean.pop("tool_calls", None)
        if calls:
            clean["tool_calls"] = [_call(c, f"{where}.tool_calls[{j}]") for j, c in enumerate(calls)]
        if "content" not in clean and not (role == "assistant" and (calls or "reasoning_content" in clean)):
            raise InputError(f"{where} has no content", param=f"{where}.content")
        content = _text(clean.get("content", ""), f"{where}.content")
        clean["content"] = Absent() if calls and not content else content
        if role == "assistant":
            clean = {key: _of_model(item) for key, item in clean.items()}
        yield clean | {"role": traced(role, Origin.TEMPLATE)}


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
    if not isinstance(arguments, str | Mapping | None):
        where = f"{where}.function.arguments"
        raise InputError(f"{where}: give JSON as a text, or an object", param=where)
    return {**call, "type": "function", "function": {**function, "arguments": Arguments.of(arguments)}}


def _of_model(value: Any) -> Any:
    """The value with its strings marked as the model's. Keys stay as they are."""
    if isinstance(value, Absent | Arguments):
        return value
    if isinstance(value, str):
        return traced(value, Origin.MODEL)
    if isinstance(value, Mapping):
        return {key: _of_model(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_of_model(item) for item in value]
    return value


def _object(text: str) -> dict[str, Any]:
    """The object that a JSON text says. If the text was cut: its complete members. If it is anything else: no
    members."""
    try:
        value = json.loads(text)
    except ValueError:
        return dict(_members(text))
    return value if isinstance(value, dict) else {}


def _members(text: str) -> Iterator[tuple[str, Any]]:
    """The members of an object, up to the first that is not complete."""
    decode = json.JSONDecoder().raw_decode
    mark = _OPEN.match(text)
    while mark and text.startswith('"', mark.end()):
        try:
            key, end = decode(text, mark.end())
            colon = _COLON.match(text, end)
            value, end = decode(text, colon.end() if colon else end)
        except ValueError:
            return
        mark = _NEXT.match(text, end)
        if mark:
            yield key, value
