"""What a request asks, as far as a choice needs it. Owns: `Prompt`, and `Matcher`, which reads one.

Rules: reading never refuses. A body that cannot be read gives a prompt without keys, and the worker answers
with the error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol


class Prompt(NamedTuple):
    """One request.

    keys: of the prompt's complete pages. tokens: its prompt, in tokens, at least one. outputs: tokens that it
    may answer. model, session: as the client said. stream: it wants events. choices: answers to one prompt.
    exact: the keys are those of the engine; otherwise they only tell equal texts from others.
    """

    keys: tuple[int, ...] = ()
    tokens: int = 1
    outputs: int = 1
    model: str | None = None
    session: str | None = None
    stream: bool = False
    choices: int = 1
    exact: bool = False


class Matcher(Protocol):
    """Reads requests."""

    async def read(self, path: str, body: bytes, headers: Mapping[str, str], tenant: str | None) -> Prompt:
        """tenant: whose prefixes are kept apart from those of others; None = they are not."""
        ...
