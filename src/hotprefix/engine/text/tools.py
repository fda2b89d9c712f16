"""Tool calls in a model's text. Owns: the formats and `ToolParser`, which reads them as they arrive.

Rules: text that is not the beginning of a complete call stays content, character for character. Text is held
back only while it could still become a call. Arguments are the characters that the model wrote. The outcome
does not depend on how the text is cut. Blanks around calls are dropped, blanks inside content are not.

Formats:
- `hermes`: <tool_call>{...}</tool_call> (Qwen, Hermes, and models whose template knows no tools).
- `llama3`: the whole output is {...}, or several of them with ; between.
- `mistral`: [TOOL_CALLS][{...}, ...] or [TOOL_CALLS]name[ARGS]{...}.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from hotprefix.engine.text.tool_json import CallScanner, Phase


class ToolFormat(StrEnum):
    """How a model writes its calls."""

    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"


OPENERS = {
    ToolFormat.HERMES: "<tool_call>",
    ToolFormat.LLAMA3: "<|python_tag|>",
    ToolFormat.MISTRAL: "[TOOL_CALLS]",
}
CLOSER = "</tool_call>"
_NAMED = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*")
_NAME_SO_FAR = re.compile(r"[\w.-]{0,200}\s*(?:\[[A-Z_]{0,7}(?:\][\w-]{0,200}(?:\[[A-Z]{0,4}\]?)?)?)?\s*")
_BLANK = " \t\r\n"


def tool_format(templates: Mapping[str, str]) -> ToolFormat:
    """The format that a model's chat templates speak of; hermes if they speak of none."""
    text = "".join(templates.values())
    if OPENERS[ToolFormat.HERMES] in text:
        return ToolFormat.HERMES
    if OPENERS[ToolFormat.MISTRAL] in text:
        return ToolFormat.MISTRAL
    if "<|start_header_id|>" in text and '"parameters"' in text:
        return ToolFormat.LLAMA3
    return ToolFormat.HERMES


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of call `index`. The first piece has its name and no arguments; the later ones have no name and
    some characters of the arguments."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What one push gave: content to show and pieces of calls."""

    content: str = ""
    calls: tuple[ToolDelta, ...] = ()


class ToolParser:
    """Reads one output. names: those of the request's tools. An unmarked llama3 object is a call only if it
    names one of them."""

    def __init__(self, form: ToolFormat, names: Collection[str] = ()) -> None:
        self._form = form
        self._names = frozenset(names)
        self._state = self._start if form is ToolFormat.LLAMA3 else self._text
        self._rest = ""  # text that has not been read yet
        self._lead = ""  # read as a call's beginning; if no call follows, it is content
        self._blank = ""  # blanks: content, unless a call follows
        self._content: list[str] = []
        self._calls: list[ToolDelta] = []
        self._scanner = CallScanner()
        self._announced = False
        self._after_call = False
        self._in_list = False
        self.count = 0

    def push(self, text: str) -> ToolOutput:
        """Take more of the output. Returns what may be passed on now."""
        self._rest += text
        while self._rest and self._state():
            pass
        return self._taken()

    def flush(self) -> ToolOutput:
        """The output has ended: text that was held and is no call is content."""
        if self._announced:
            self._rest = ""
        elif self._state == self._call:
            self._give_up()
        if self._state != self._close:
            self._show(self._lead + self._rest)
        self._rest = self._lead = ""
        if not self._after_call:
            self._content.append(self._blank)
        self._blank = ""
        return self._taken()

    def _taken(self) -> ToolOutput:
        output = ToolOutput("".join(self._content), tuple(self._calls))
        self._content, self._calls = [], []
        return output

    def _show(self, text: str) -> None:
        text = self._blank + text
        shown = text.rstrip(_BLANK)
        self._blank = text[len(shown) :]
        if shown:
            self._content.append(shown)
            self._after_call = False

    # -- states: each takes from _rest and says whether to go on -------------------------------------

    def _plain(self) -> bool:
        self._show(self._rest)
        self._rest = ""
        return False

    def _text(self) -> bool:
        """Content, up to an opener."""
        opener = OPENERS[self._form]
        before, found, after = self._rest.partition(opener)
        if found:
            self._show(before)
            self._rest, self._lead, self._state = after, found, self._inside
            return True
        held = next((n for n in range(len(opener) - 1, 0, -1) if before.endswith(opener[:n])), 0)
        self._show(before[: len(before) - held])
        self._rest = before[len(before) - held :]
        return False

    def _start(self) -> bool:
        """llama3, before anything but blanks has come."""
        opener = OPENERS[self._form]
        body = self._rest.lstrip(_BLANK)
        if opener.startswith(body):
            return False
        if body.startswith(opener) and not self._lead:
            self._lead = self._rest[: len(self._rest) - len(body)] + opener
            self._rest = body[len(opener) :]
            return True
        if body[0] == "{":
            return self._begin(body)
        return self._no_call()

    def _inside(self) -> bool:
        """After an opener, up to the first brace of a call."""
        body = self._rest.lstrip(_BLANK)
        if not body:
            return False
        if body[0] == "{":
            return self._begin(body)
        if self._form is ToolFormat.MISTRAL and body[0] == "[" and not self._in_list:
            self._in_list = True
            self._lead += self._rest[: len(self._rest) - len(body)] + "["
            self._rest = body[1:]
            return True
        if self._form is ToolFormat.MISTRAL and not self._in_list:
            return self._named(body)
        return self._no_call()

    def _named(self, body: str) -> bool:
        """mistral: name[ARGS]{, with or without a call id."""
        head, brace, _ = body.partition("{")
        if not brace and _NAME_SO_FAR.fullmatch(head):
            return False
        match = _NAMED.fullmatch(head)
        if match is None:
            return self._no_call()
        return self._begin(body[len(head) :], match[1])

    def _begin(self, body: str, name: str | None = None) -> bool:
        self._lead += self._rest[: len(self._rest) - len(body)]
        self._rest, self._scanner, self._announced, self._state = body, CallScanner(name), False, self._call
        return True

    def _call(self) -> bool:
        """Inside a call's object."""
        scanner = self._scanner
        self._rest = self._rest[scanner.feed(self._rest) :]
        ended = scanner.phase is Phase.END
        known = self._form is not ToolFormat.LLAMA3 or scanner.name in self._names
        if known and (scanner.started or (ended and scanner.name and self._form is not ToolFormat.LLAMA3)):
            self._pass_on(scanner)
        if ended and not self._announced:
            self._give_up()
            return True
        if ended:
            self._announced = False
            self._state = self._close
        elif scanner.phase is Phase.BROKEN:
            if not self._announced:
                self._give_up()
            self._announced = False
            self._state = self._after_give_up()
        return True

    def _pass_on(self, scanner: CallScanner) -> None:
        if not self._announced:
            self._announced = self._after_call = True
            self._lead = self._blank = ""
            self._calls.append(ToolDelta(self.count, scanner.name, ""))
            self.count += 1
        new = scanner.arguments() if scanner.started else "{}"
        if new:
            self._calls.append(ToolDelta(self.count - 1, None, new))

    def _close(self) -> bool:
        """After a call: its end mark, or the next call."""
        body = self._rest.lstrip(_BLANK)
        if self._form is ToolFormat.HERMES:
            if body != CLOSER and CLOSER.startswith(body):
                return False
            self._rest = body[len(CLOSER) :] if body.startswith(CLOSER) else self._rest
            self._state = self._text
            return True
        if not self._in_list and self._form is ToolFormat.MISTRAL:
            self._state = self._text
            return True
        body = self._rest.lstrip(_BLANK + ",;")
        if not body:
            return False
        if body[0] == "{":
            self._rest = body
            return self._begin(body)
        if self._in_list and body[0] == "]":
            self._in_list, self._rest, self._state = False, body[1:], self._text
            return True
        return self._no_call()

    # -- what turned out to be no call -----------------------------------------------------------------

    def _no_call(self) -> bool:
        self._show(self._lead)
        self._lead = ""
        self._state = self._after_give_up()
        return True

    def _give_up(self) -> None:
        """Show a call's beginning as content."""
        self._show(self._lead + "".join(self._scanner.raw))
        self._lead = ""
        self._scanner = CallScanner()
        self._state = self._after_give_up()

    def _after_give_up(self) -> Callable[[], bool]:
        self._in_list = False
        return self._plain if self._form is ToolFormat.LLAMA3 else self._text
