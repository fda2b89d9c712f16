"""How long an answer will be. Owns: `AnswerLengths`, a running mean of what was seen.

Rules: only answers that have ended are learned from, so a prediction has no knowledge of the future. It
begins with FIRST tokens, which weigh as much as one answer.
"""

from __future__ import annotations

from typing import Final

FIRST: Final = 256


class AnswerLengths:
    """Predicts lengths, tokens."""

    def __init__(self) -> None:
        self._sum, self._count = FIRST, 1

    @property
    def expected(self) -> int:
        """The next answer's predicted length, at least 1."""
        return max(1, round(self._sum / self._count))

    def learn(self, tokens: int) -> None:
        """Learn from an answer that has ended."""
        self._sum, self._count = self._sum + tokens, self._count + 1
