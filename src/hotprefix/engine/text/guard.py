"""Keeping callers' strings from forging control tokens. Owns: `Guard`, one per rendered prompt.

Rules: the guard character occurs in none of the request's strings; inserting it is the only change
made. It goes after the first character of every control text inside a string, and to an end of a
string that could complete a control text together with what a template puts beside it; blanks at the
ends stay outermost, so a template's `trim` works as before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hotprefix.engine.text.messages import RawJson
from hotprefix.engine.text.tokenizer import Tokenizer

_CANDIDATES = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class Guard:
    """Breaks control texts in `value`s. request: everything the caller sent."""

    def __init__(self, tokenizer: Tokenizer, request: Any) -> None:
        used = set("".join(s for s in _strings(request) if not s.isascii()))
        self.character = next(chr(c) for r in _CANDIDATES for c in r if chr(c) not in used)
        self._all = _Breaker(tokenizer.control, self.character)
        self._control = _Breaker(tokenizer.special, self.character)

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message whose role is one of the known ones; an assistant's content keeps its markup."""
        own = message["role"] == "assistant"
        return {
            key: item if key == "role" else self._walk(item, self._control if own else self._all)
            for key, item in message.items()
        }

    def value(self, value: Any) -> Any:
        """Any JSON value: strings and keys guarded, the order of keys kept."""
        return self._walk(value, self._all)

    def _walk(self, value: Any, breaker: _Breaker) -> Any:
        if isinstance(value, str):
            return breaker(value)
        if isinstance(value, RawJson):
            return RawJson(self._walk(dict(value), breaker), breaker(value.raw))
        if isinstance(value, Mapping):
            return {breaker(str(key)): self._walk(item, breaker) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._walk(item, breaker) for item in value]
        return value


class _Breaker:
    def __init__(self, texts: Iterable[str], character: str) -> None:
        texts = sorted(texts, key=len, reverse=True)
        self._character = character
        self._whole = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._starts = {t[:n] for t in texts for n in range(1, len(t))}
        self._ends = {t[n:] for t in texts for n in range(1, len(t))}
        self._longest = max(map(len, texts), default=0)
        self._texts = texts

    def __call__(self, text: str) -> str:
        if self._whole is None or not text:
            return text
        text = self._whole.sub(lambda m: m[0][0] + self._character + m[0][1:], text)
        core = text.strip()
        if not core:
            return text
        reach = range(1, min(self._longest, len(core) + 1))
        before = any(core[:n] in self._ends for n in reach)
        after = any(core[-n:] in self._starts for n in reach)
        inside = len(core) < self._longest and any(core in t for t in self._texts)
        if not (before or after or inside):
            return text
        lead = text[: len(text) - len(text.lstrip())]
        tail = text[len(text.rstrip()) :]
        first = self._character if before else ""
        last = self._character if after or inside else ""
        return f"{lead}{first}{core}{last}{tail}"


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
