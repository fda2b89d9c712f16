"""What the server needs of the model's text side. Owns: that protocol.

Rules: methods are pure and may be called from any thread; `judge_grammar` may take seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hotprefix.engine.params import StructuredOutput
from hotprefix.engine.sampling.checker import Verdict
from hotprefix.engine.text.tools import ToolParser

Tools = Sequence[Mapping[str, Any]]


class Text(Protocol):
    """Text to token ids and back, tool calls and grammars."""

    @property
    def hides_tool_marks(self) -> bool:
        """Whether tool calls can be read only with skip_special_tokens false."""
        ...

    def bound(self, max_tokens: int) -> None:
        """From now on refuse a text, before it is tokenized, if it cannot have as few as `max_tokens` tokens.
        Called once, before anything else. A text of up to a mebibyte is always taken, because the request may
        only ask for its tokens."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a raw text; special tokens written in it are recognised. Raises ContextLengthExceeded
        (see `bound`)."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Tools,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> list[int]:
        """Token ids of a conversation. Control tokens come from the template alone, never from what a message
        holds. Raises InputError, or ContextLengthExceeded (see `bound`)."""
        ...

    def tool_parser(self, tools: Tools) -> ToolParser:
        """A reader of one output's calls."""
        ...

    def forced_calls(self, tools: Tools, choice: str, *, parallel: bool) -> StructuredOutput | None:
        """The grammar behind a tool choice, which is "auto", "none", "required" or "name:f"; None for the
        first two. Raises InputError for a tool that does not exist."""
        ...

    def known_grammar(self, structured: StructuredOutput) -> Verdict | None:
        """The verdict on a grammar that was judged before; None if it was not. Returns at once."""
        ...

    def judge_grammar(self, structured: StructuredOutput) -> Verdict:
        """Whether the grammar is right and not too costly to compile."""
        ...
