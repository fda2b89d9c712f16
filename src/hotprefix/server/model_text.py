"""The model's own tokenizer and template behind the server's `Text`. Owns: `ModelText`.

Rules: only the tokenizer's files are read; neither torch nor weights are loaded in the server's process.
A model without a chat template still serves completions.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

from hotprefix.engine.model.files import resolve_model
from hotprefix.engine.params import StructuredOutput
from hotprefix.engine.sampling.checker import GrammarChecker, Verdict
from hotprefix.engine.sampling.structured import Vocabulary
from hotprefix.engine.text.template import ChatTemplate
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.engine.text.tool_choice import forced_calls, shows_markers
from hotprefix.engine.text.tools import ToolParser, tool_format
from hotprefix.errors import ContextLengthExceeded, InputError, ModelLoadError
from hotprefix.server.text import Tools

ALWAYS_TAKEN_BYTES = 1024 * 1024


class ModelText:
    """See `server.text.Text`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        self._no_template = ""
        try:
            self._template = ChatTemplate(tokenizer)
        except ModelLoadError as error:
            self._no_template = str(error)
        self._longest = max(map(len, tokenizer.token_bytes))
        self._most_bytes = sys.maxsize
        self._max_tokens = 0
        self._format = tool_format(tokenizer.templates)
        self._checker = GrammarChecker(Vocabulary.of(tokenizer, tokenizer.size))

    @classmethod
    def load(cls, model: str) -> Self:
        """By the model's name, path or hub id. Raises ModelLoadError."""
        return cls(Tokenizer.load(resolve_model(model).path))

    def bound(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._most_bytes = max(ALWAYS_TAKEN_BYTES, max_tokens * self._longest)

    def _check_size(self, text: str, param: str) -> None:
        size = len(text) if len(text) > self._most_bytes else len(text.encode(errors="surrogatepass"))
        if size > self._most_bytes:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self._max_tokens} tokens, but {param} has {size} "
                f"bytes: more than {self._most_bytes} are too long even in the longest tokens "
                f"({self._longest} bytes); shorten it",
                param=param,
            )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self._check_size(text, "prompt")
        return self._tokenizer.encode(text, special="template", bos=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes[token] if token < self._tokenizer.size else b""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Tools,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> list[int]:
        if self._template is None:
            raise InputError(self._no_template, param="messages")
        prompt = self._template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, kwargs=variables,
            check=lambda text: self._check_size(text, "messages"),
        )  # fmt: skip
        return list(prompt.ids)

    @property
    def hides_tool_marks(self) -> bool:
        return shows_markers(self._format, self._tokenizer)

    def tool_parser(self, tools: Tools) -> ToolParser:
        return ToolParser(self._format, [tool["function"]["name"] for tool in tools])

    def forced_calls(self, tools: Tools, choice: str, *, parallel: bool) -> StructuredOutput | None:
        return forced_calls(self._format, tools, choice, self._tokenizer, parallel=parallel)

    def known_grammar(self, structured: StructuredOutput) -> Verdict | None:
        return self._checker.known(structured)

    def judge_grammar(self, structured: StructuredOutput) -> Verdict:
        return self._checker.judge(structured)
