"""POST /v1/completions. Owns: the forms that a prompt may have, echo, and the shape of the answer.

Rules: a prompt is a text, a list of texts, a list of token ids, or a list of such lists. An empty one is
refused, and the message names its place. `echo` puts the prompt before the output, log-probabilities
included. With `echo`, `max_tokens` may be 0: the engine computes the prompt and no output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotprefix.engine.executor import TokenLogprob
from hotprefix.engine.messages import Delta
from hotprefix.errors import ContextLengthExceeded, InputError
from hotprefix.server.answer import finish_reason
from hotprefix.server.logprobs import Offsets, completion_part, joined, prompt_entries
from hotprefix.server.schemas import Completion
from hotprefix.server.text import Text

MAX_LOGPROBS = 5


def prompts_of(body: Completion, text: Text) -> list[list[int]]:
    """Token ids of each prompt. Raises InputError that names the prompt's place."""
    given = body.prompt
    if isinstance(given, str):
        return [text.encode(given, add_special_tokens=body.add_special_tokens)]
    if not isinstance(given, list) or not given:
        raise InputError("prompt: give a text, token ids, or a list of either, not empty", param="prompt")
    if type(given[0]) is int:
        return [_ids(given, "prompt")]
    prompts = []
    for number, one in enumerate(given):
        place = f"prompt[{number}]"
        if isinstance(one, str):
            prompts.append(_encoded(one, place, body, text))
        elif isinstance(one, list):
            prompts.append(_ids(one, place))
        else:
            raise InputError(f"{place} is {_kind(one)}: give a text or token ids", param=place)
    return prompts


def _encoded(prompt: str, place: str, body: Completion, text: Text) -> list[int]:
    try:
        return text.encode(prompt, add_special_tokens=body.add_special_tokens)
    except ContextLengthExceeded as error:
        raise ContextLengthExceeded(error.message, param=place) from None


def prompt_count(body: Completion) -> int:
    """How many prompts there are; called before they are checked one by one."""
    given = body.prompt
    return len(given) if isinstance(given, list) and given and type(given[0]) is not int else 1


def echoed(body: Completion, number: int, prompt: Sequence[int], text: Text) -> str | None:
    """The text of prompt `number`, to be shown before its output: the text that was given, otherwise the ids
    decoded. None if there is no echo."""
    if not body.echo:
        return None
    given = body.prompt
    if isinstance(given, list) and isinstance(given[0], str | list):
        given = given[number]
    return given if isinstance(given, str) else text.decode(prompt, skip_special_tokens=False)


def _ids(values: list[Any], place: str) -> list[int]:
    if set(map(type, values)) <= {int}:
        return values
    at = next(number for number, value in enumerate(values) if type(value) is not int)
    raise InputError(f"{place}[{at}] is {_kind(values[at])}: give a token id", param=f"{place}[{at}]")


def _kind(value: Any) -> str:
    return "a boolean" if isinstance(value, bool) else f"a {type(value).__name__}"


def check(body: Completion) -> None:
    """Raises InputError if fields contradict each other."""
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise InputError(f"logprobs={body.logprobs}: give 0 to {MAX_LOGPROBS}", param="logprobs")
    if body.max_tokens == 0 and not body.echo:
        raise InputError("max_tokens=0 needs echo: give a whole number >= 1", param="max_tokens")
    if body.stream and body.prompt_logprobs is not None:
        raise InputError("prompt_logprobs is not available in a stream", param="prompt_logprobs")


class CompletionChoice:
    """One choice. prompt_text: shown before the output; None = no echo."""

    def __init__(
        self, index: int, body: Completion, text: Text, prompt: tuple[int, ...], echoed: str | None
    ) -> None:
        self._index, self._body, self._text, self._prompt = index, body, text, prompt
        self._echoed = echoed
        self._offsets = Offsets()
        self._texts: list[str] = []
        self._parts: list[dict[str, list[Any]]] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._end: dict[str, Any] = {}
        self._started = False
        self._sent = 0

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        self._prompt_logprobs += delta.prompt_logprobs or ()
        if not delta.tokens and delta.finish is None:
            return []
        shown = ""
        if not self._started:
            self._started = True
            shown = self._echoed or ""
            if self._echoed is not None and self._body.logprobs is not None:
                self._add_part(zip(self._prompt, [None, *self._prompt_logprobs], strict=True))
        shown += delta.text
        self._add_part((entry.token, entry) for entry in delta.logprobs)
        self._texts.append(shown)
        if delta.finish is not None:
            self._end = {"finish_reason": finish_reason(delta.finish), "stop_reason": delta.stop_reason}
        elif not shown:
            return []
        waiting, self._sent = self._parts[self._sent :], len(self._parts)
        return [self._choice(shown, waiting)]

    def _add_part(self, entries: Any) -> None:
        if self._body.logprobs is not None:
            self._parts.append(completion_part(self._text, entries, self._offsets, self._body.logprobs))

    def whole(self) -> dict[str, Any]:
        choice = self._choice("".join(self._texts), self._parts)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_entries(self._text, self._prompt_logprobs)
        return choice

    def _choice(self, text: str, parts: list[dict[str, list[Any]]]) -> dict[str, Any]:
        logprobs = joined(parts) if self._body.logprobs is not None else None
        end = self._end or {"finish_reason": None}
        return {"index": self._index, "text": text, "logprobs": logprobs, **end}
