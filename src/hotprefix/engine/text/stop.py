"""Stop strings in a stream. Owns: `StopMatcher`.

Rules: text is held back exactly as long as it could still be the beginning of a stop string, and is released
the moment it cannot. The stop string that is complete first wins; of those that are complete at the same
character, the longest. So the outcome does not depend on how the text was cut. A character always costs the
same, however long a stop string is and however much of it is held.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Looks for `stops` (none of them empty) in the text that is pushed. include: show the stop string
    itself."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that is now complete, or None). After a stop nothing more
        comes out, and nothing may be pushed."""
        if not self._patterns:
            return text, None
        before = len(self._held)
        shown = self._held + text
        for at, character in enumerate(text, start=before + 1):
            complete = [p.text for p in self._patterns if p.takes(character)]
            if complete:
                stop = max(complete, key=len)
                self._held = ""
                return shown[: at if self._include else at - len(stop)], stop
        keep = max(pattern.matched for pattern in self._patterns)
        self._held = shown[len(shown) - keep :]
        return shown[: len(shown) - keep], None

    def flush(self) -> str:
        """The text that was held. It has ended, so no stop string will be complete any more."""
        text, self._held = self._held, ""
        return text


class _Pattern:
    """One stop string against the text so far, by the method of Knuth, Morris and Pratt.

    matched: how many characters at the text's end are the first characters of the string.
    shorter[n]: the next shorter match at the end of the string's first n characters.
    """

    __slots__ = ("_shorter", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._shorter = [0, 0]
        for character in text[1:]:
            self._shorter.append(self._extended(self._shorter[-1], character))

    def _extended(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._shorter[matched]
        return matched + (self.text[matched] == character)

    def takes(self, character: str) -> bool:
        """Go on by one character. True if the string is complete with it."""
        self.matched = self._extended(self.matched, character)
        return self.matched == len(self.text)
