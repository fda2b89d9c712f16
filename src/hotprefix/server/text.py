"""What the server needs of the tokenizer and the chat template. Owns: that protocol.

Rules: methods are pure and may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Text(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a raw text; special tokens written in it are recognised."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> list[int]:
        """Token ids of a conversation. Control tokens come from the template alone, never from what a
        message holds (handed case 17). Raises InputError."""
        ...
