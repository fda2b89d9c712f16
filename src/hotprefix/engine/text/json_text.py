"""JSON as templates write it. Owns: `to_json`, the filter behind `tojson`.

Rules: the text is that of `json.dumps` with Hugging Face's defaults (no HTML escapes, no escapes of letters),
with two exceptions: a call's arguments are the very bytes that the model wrote, wherever they stand in the
value, and absent content is null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hotprefix.engine.text.chat_messages import Absent, Arguments
from hotprefix.engine.text.origin import Traced, between, joined, runs_of, traced


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The value's JSON. Raises TypeError for what JSON cannot hold."""
    item, colon = separators or (", " if indent is None else ",", ": ")
    step = " " * indent if isinstance(indent, int) else indent
    return _Writer(ensure_ascii, step, item, colon, sort_keys).write(value, "\n")


@dataclass(frozen=True, slots=True)
class _Writer:
    ascii: bool
    step: str | None
    item: str
    colon: str
    sort: bool

    def write(self, value: Any, newline: str) -> str:
        """newline: a line feed and the indentation of the value's own line."""
        if isinstance(value, Arguments):
            return value.text
        if isinstance(value, Mapping):
            return self._nest("{", "}", list(self._items(value, newline + (self.step or ""))), newline)
        if isinstance(value, list | tuple):
            inner = newline + (self.step or "")
            return self._nest("[", "]", [self.write(item, inner) for item in value], newline)
        return self._scalar(None if isinstance(value, Absent) else value)

    def _items(self, value: Mapping[Any, Any], newline: str) -> Iterator[str]:
        for key, item in sorted(value.items()) if self.sort else value.items():
            name = key if isinstance(key, str) else json.dumps(key)
            yield joined((self._scalar(name), self.colon, self.write(item, newline)))

    def _nest(self, opener: str, closer: str, items: list[str], newline: str) -> str:
        if not items:
            return opener + closer
        if self.step is None:
            return joined((opener, between(self.item, items), closer))
        inner = newline + self.step
        return joined((opener, inner, between(self.item + inner, items), newline, closer))

    def _scalar(self, value: Any) -> str:
        text = json.dumps(value, ensure_ascii=self.ascii)
        if not isinstance(value, Traced):
            return text
        origins = {origin for _, origin in runs_of(value)}
        return traced(text, *origins) if len(origins) == 1 else text
