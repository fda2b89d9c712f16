"""Stop strings in a stream. Owns: `StopMatcher`.

Rules: text is held back exactly as long as it could still be the beginning of a stop string, and let
go the moment it cannot (handed case 87). The stop that is complete first wins, the longest of those
that are complete at the same character; so the outcome does not depend on how the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Looks for `stops` (none empty) in the text pushed. include: show the stop string itself."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that is now complete). After a stop nothing more
        comes out, and nothing may be pushed."""
        text = self._held + text
        self._held = ""
        found = min(
            ((at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0),
            default=None,
        )
        if found is not None:
            end, start, stop = found
            return text[: end if self._include else start], stop
        keep = self._possible(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held: the text has ended, so no stop string will be complete any more."""
        text, self._held = self._held, ""
        return text

    def _possible(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return max(
            (
                n
                for stop in self._stops
                for n in range(min(len(stop) - 1, len(text)), 0, -1)
                if text.endswith(stop[:n])
            ),
            default=0,
        )
