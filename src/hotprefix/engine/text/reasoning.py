"""Reasoning apart from the answer. Owns: `ReasoningSplitter`, which reads <think>...</think> as it arrives.

Rules: a thought is one only if it begins the output, or if the prompt has already opened it. Line feeds
beside the marks belong to the marks. Text is held back only while it could still be a mark or such a line
feed. The outcome does not depend on how the text is cut. If a thought has no end, the whole rest of the
output is thought.
"""

from __future__ import annotations

from collections.abc import Callable

OPENER = "<think>"
CLOSER = "</think>"
_BLANK = " \t\r\n"


class ReasoningSplitter:
    """Splits one output. opened: whether the prompt ends inside a thought."""

    def __init__(self, *, opened: bool = False) -> None:
        self._rest = ""
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._state: Callable[[], bool] = self._after_opener if opened else self._start

    @classmethod
    def after(cls, prompt: str) -> ReasoningSplitter:
        """A splitter for the output behind a prompt. prompt: its end is enough."""
        return cls(opened=prompt.rstrip(_BLANK).endswith(OPENER))

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that may be shown now."""
        self._rest += text
        while self._rest and self._state():
            pass
        return self._taken()

    def flush(self) -> tuple[str, str]:
        """(reasoning, content) that was held, when the output has ended."""
        if self._state == self._start:
            self._content.append(self._rest)
        elif self._state == self._thought:
            self._reasoning.append(self._rest.rstrip("\n"))
        self._rest = ""
        return self._taken()

    def _taken(self) -> tuple[str, str]:
        taken = "".join(self._reasoning), "".join(self._content)
        self._reasoning, self._content = [], []
        return taken

    # -- states: each takes from _rest and says whether to go on ---------------------------------------

    def _start(self) -> bool:
        body = self._rest.lstrip(_BLANK)
        if body.startswith(OPENER):
            self._rest, self._state = body[len(OPENER) :], self._after_opener
        elif OPENER.startswith(body):
            return False
        else:
            self._state = self._answer
        return True

    def _after_opener(self) -> bool:
        self._rest = self._rest.lstrip("\n")
        if self._rest:
            self._state = self._thought
        return True

    def _thought(self) -> bool:
        thought, found, after = self._rest.partition(CLOSER)
        if found:
            self._reasoning.append(thought.rstrip("\n"))
            self._rest, self._state = after, self._after_closer
            return True
        held = next((n for n in range(len(CLOSER) - 1, 0, -1) if thought.endswith(CLOSER[:n])), 0)
        shown = thought[: len(thought) - held].rstrip("\n")
        self._reasoning.append(shown)
        self._rest = thought[len(shown) :]
        return False

    def _after_closer(self) -> bool:
        self._rest = self._rest.lstrip("\n")
        if self._rest:
            self._state = self._answer
        return True

    def _answer(self) -> bool:
        self._content.append(self._rest)
        self._rest = ""
        return False
