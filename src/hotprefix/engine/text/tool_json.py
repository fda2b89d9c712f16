"""One tool call written as a JSON object, read as it arrives. Owns: `CallScanner`.

Rules: as little as possible is parsed: the value of `arguments` (or `parameters`) is passed on as the very
characters that the model wrote; its end is found by counting brackets outside of strings. Arguments are
passed on only when the name is complete; if they come first, they wait for it.
"""

from __future__ import annotations

import json
from enum import Enum, auto

_ARGUMENTS = ("arguments", "parameters")
_BLANK = " \t\r\n"


class Phase(Enum):
    """Where in the object the scanner is."""

    OPEN = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    NEXT = auto()
    END = auto()
    BROKEN = auto()


class Span:
    """Finds the end of one JSON value, character by character."""

    def __init__(self) -> None:
        self._depth = 0
        self._string = False
        self._escape = False
        self._scalar = False
        self.text: list[str] = []
        self.done = False

    def take(self, c: str) -> bool:
        """Whether the character belongs to the value. Afterwards `done` tells whether it was the last one."""
        if self._string:
            self._in_string(c)
        elif c == '"':
            self._string = True
        elif c in "{[":
            self._depth += 1
        elif c in "]}" and self._depth:
            self._depth -= 1
            self.done = self._depth == 0
        elif not self._depth and (c in ",]}" or c in _BLANK):
            return False
        self.text.append(c)
        return True

    def _in_string(self, c: str) -> None:
        if self._escape:
            self._escape = False
        elif c == "\\":
            self._escape = True
        elif c == '"':
            self._string = False
            self.done = self._depth == 0


class CallScanner:
    """Reads the text of one call, from its opening brace on. If it is made with a `name`, the text is the
    arguments alone.

    phase: in END and BROKEN it takes no more text.
    name: the tool's; None until it is known.
    started: it is certain that this is a call (a name, then arguments).
    raw: all text taken.
    """

    def __init__(self, name: str | None = None) -> None:
        self.phase = Phase.OPEN if name is None else Phase.VALUE
        self.name = name
        self.raw: list[str] = []
        self._bare = name is not None
        self._key = "" if name is None else _ARGUMENTS[0]
        self._span = Span()
        self._arguments: list[str] | None = None
        self._streams = False
        self._passed = 0

    @property
    def started(self) -> bool:
        return self.name is not None and self._arguments is not None

    def feed(self, text: str) -> int:
        """Take characters up to the object's end. Returns how many were taken."""
        for n, c in enumerate(text):
            self._take(c)
            if self.phase is Phase.BROKEN:
                return n
            self.raw.append(c)
            if self.phase is Phase.END:
                return n + 1
        return len(text)

    def arguments(self) -> str:
        """Characters of the arguments that may be passed on and have not been passed on yet."""
        if self._arguments is None or self.name is None:
            return ""
        if self._streams:
            new = "".join(self._arguments[self._passed :])
            self._passed = len(self._arguments)
            return new
        if self.phase is not Phase.END or self._passed:
            return ""
        self._passed = 1
        return _unwrapped("".join(self._arguments))

    def _take(self, c: str) -> None:
        phase = self.phase
        if phase is Phase.IN_KEY or phase is Phase.IN_VALUE:
            self._in_span(c)
        elif c in _BLANK:
            return
        elif phase is Phase.OPEN and c == "{":
            self.phase = Phase.KEY
        elif phase is Phase.KEY and c == '"':
            self._begin(Phase.IN_KEY, c)
        elif phase is Phase.COLON and c == ":":
            self.phase = Phase.VALUE
        elif phase is Phase.VALUE and c not in ",]}":
            self._begin_value(c)
        elif phase is Phase.NEXT and c == ",":
            self.phase = Phase.KEY
        elif phase in (Phase.NEXT, Phase.KEY) and c == "}":
            self.phase = Phase.END
        else:
            self.phase = Phase.BROKEN

    def _begin(self, phase: Phase, c: str) -> None:
        self.phase, self._span = phase, Span()
        self._span.take(c)

    def _begin_value(self, c: str) -> None:
        self._begin(Phase.IN_VALUE, c)
        if self._key in _ARGUMENTS and self._arguments is None:
            self._arguments = self._span.text
            self._streams = self.name is not None and c == "{"
        if self._bare and c != "{":
            self.phase = Phase.BROKEN

    def _in_span(self, c: str) -> None:
        took = self._span.take(c)
        if took and not self._span.done:
            return
        key = self.phase is Phase.IN_KEY
        self.phase = Phase.COLON if key else Phase.END if self._bare else Phase.NEXT
        try:
            if key:
                self._key = str(json.loads("".join(self._span.text)))
            elif self._key == "name" and self.name is None:
                name = json.loads("".join(self._span.text))
                self.name = name if isinstance(name, str) and name else None
        except ValueError:
            self.phase = Phase.BROKEN
        if not took:
            self._take(c)


def _unwrapped(text: str) -> str:
    """The arguments that a model wrote as a string that holds JSON; for null an empty object."""
    if text == "null":
        return "{}"
    try:
        inner = json.loads(text) if text.startswith('"') else text
    except ValueError:
        return text
    return str(inner)
