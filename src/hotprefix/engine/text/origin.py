"""Where each character of a prompt came from. Owns: `Origin`, and `Traced`, a string that remembers it.

Rules: a plain `str` counts as the caller's. So it is safe if an operation that this class does not follow
gives a plain string: text of the caller becomes no control token. A traced string has the very text; it
compares, hashes, measures, searches and prints like any other, so a template never sees a caller's text
changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, SupportsIndex


class Origin(IntEnum):
    """Who wrote a character: the caller, the model in an earlier turn, or the template."""

    CALLER = 0
    MODEL = 1
    TEMPLATE = 2


Runs = tuple[tuple[int, Origin], ...]
_PERCENT = re.compile(r"%([s%])")
_BRACES = re.compile(r"\{(\w*)\}|\{\{|\}\}")


class Traced(str):
    """Text made of runs (length, origin). It is made by `traced` and `joined`. The bare constructor, which
    other code may call with anything, makes a caller's text."""

    __slots__ = ("_runs",)
    _runs: Runs

    def __new__(cls, text: object = "") -> Traced:
        return _made(str(text), Origin.CALLER)

    def __str__(self) -> str:
        return self

    def __add__(self, other: object) -> Traced:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> Traced:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> Traced:
        return joined([self] * times.__index__())

    def __rmul__(self, times: SupportsIndex) -> Traced:
        return self * times

    def __mod__(self, values: Any) -> str:
        given = iter(values if isinstance(values, tuple) else (values,))

        def fill(hole: re.Match[str]) -> str:
            return self[hole.start()] if hole[1] == "%" else str(next(given, ""))

        return _filled(self, _PERCENT, fill, str.__mod__(self, values))

    def __iter__(self) -> Iterator[str]:
        return (self._cut(at, at + 1) for at in range(len(self)))

    def __getitem__(self, key: SupportsIndex | slice) -> Traced:
        if not isinstance(key, slice):
            at = range(len(self))[key]
            return self._cut(at, at + 1)
        start, stop, step = key.indices(len(self))
        if step == 1:
            return self._cut(start, max(start, stop))
        return joined(self._cut(at, at + 1) for at in range(start, stop, step))

    def _cut(self, start: int, stop: int) -> Traced:
        kept: list[tuple[int, Origin]] = []
        at = 0
        for length, origin in self._runs:
            inside = min(at + length, stop) - max(at, start)
            if inside > 0:
                kept.append((inside, origin))
            at += length
        cut = str.__new__(Traced, str.__getitem__(self, slice(start, stop)))
        cut._runs = tuple(kept)
        return cut

    def _cuts(self, pieces: Iterable[str], gap: int | None) -> Iterator[Traced]:
        """The pieces that a method of `str` made of this text, with their origins. gap: the length of what
        separates them; None = any number of blanks."""
        at = 0
        for piece in pieces:
            at = self.find(piece, at) if gap is None else at
            yield self._cut(at, at + len(piece))
            at += len(piece) + (gap or 0)

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        gap = None if sep is None else len(sep)
        return list[str](self._cuts(str.split(self, sep, maxsplit), gap))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        gap = None if sep is None else len(sep)
        return list[str](self._cuts(str.rsplit(self, sep, maxsplit), gap))

    def splitlines(self, keepends: bool = False) -> list[str]:
        shown = str.splitlines(self, keepends)
        whole = self._cuts(str.splitlines(self, True), 0)
        return [line._cut(0, len(text)) for line, text in zip(whole, shown, strict=True)]

    def partition(self, sep: str) -> tuple[str, str, str]:
        at = self.find(sep)
        return self._around(at, at + len(sep)) if at >= 0 else self._around(len(self), len(self))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        at = self.rfind(sep)
        return self._around(at, at + len(sep)) if at >= 0 else self._around(0, 0)

    def _around(self, start: int, stop: int) -> tuple[str, str, str]:
        return self._cut(0, start), self._cut(start, stop), self._cut(stop, len(self))

    def strip(self, chars: str | None = None) -> Traced:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> Traced:
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None) -> Traced:
        return self._cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str) -> Traced:
        return self._cut(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str) -> Traced:
        return self._cut(0, len(str.removesuffix(self, suffix)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return str.replace(self, old, new, count)
        return between(new, self.split(old, count))

    def join(self, items: Iterable[str]) -> Traced:
        return between(self, items)

    def lower(self) -> str:
        return self._same(str.lower(self))

    def upper(self) -> str:
        return self._same(str.upper(self))

    def title(self) -> str:
        return self._same(str.title(self))

    def capitalize(self) -> str:
        return self._same(str.capitalize(self))

    def _same(self, text: str) -> str:
        """`text` with this one's origins if it is as long, otherwise without any."""
        if len(text) != len(self):
            return text
        copy = str.__new__(Traced, text)
        copy._runs = self._runs
        return copy


def _made(text: str, origin: Origin) -> Traced:
    made = str.__new__(Traced, text)
    made._runs = ((len(text), origin),) if text else ()
    return made


def traced(text: str, origin: Origin) -> Traced:
    """The text with one origin throughout. If it was traced before, its origins are replaced."""
    return _made("".join((text,)), origin)


def runs_of(text: str) -> Runs:
    """Lengths and origins that cover the text."""
    if isinstance(text, Traced):
        return text._runs
    return ((len(text), Origin.CALLER),) if text else ()


def joined(pieces: Iterable[str]) -> Traced:
    """The pieces one after the other. Neighbouring pieces of one origin become one run."""
    pieces = list(pieces)
    runs: list[tuple[int, Origin]] = []
    for piece in pieces:
        for length, origin in runs_of(piece):
            if runs and runs[-1][1] is origin:
                runs[-1] = (runs[-1][0] + length, origin)
            else:
                runs.append((length, origin))
    whole = str.__new__(Traced, "".join(pieces))
    whole._runs = tuple(runs)
    return whole


def between(separator: str, items: Iterable[str]) -> Traced:
    """The items with the separator between them, as `str.join` puts it."""
    pieces: list[str] = []
    for item in items:
        pieces += (separator, item)
    return joined(pieces[1:])


def formatted(form: Traced, args: Sequence[Any], kwargs: Mapping[str, Any], text: str) -> str:
    """`text`, which `str.format` made, with the origins of the form and of the values. They are kept only if
    all holes of the form are plain ({}, {0}, {name})."""
    given = iter(args)

    def fill(hole: re.Match[str]) -> str:
        name = hole[1]
        if name is None:
            return form[hole.start()]
        if name.isdigit():
            return str(args[int(name)])
        return str(kwargs[name] if name else next(given))

    return _filled(form, _BRACES, fill, text)


def _filled(form: Traced, holes: re.Pattern[str], fill: Callable[[re.Match[str]], str], text: str) -> str:
    """The form with its holes filled. If that is not the `text` that Python made of it, `text` without
    origins."""
    parts: list[str] = []
    at = 0
    for hole in holes.finditer(form):
        parts += (form._cut(at, hole.start()), fill(hole))
        at = hole.end()
    whole = joined((*parts, form._cut(at, len(form))))
    return whole if whole == text else text
