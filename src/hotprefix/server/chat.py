"""POST /v1/chat/completions. Owns: what a conversation's request means and the shape of its answer.

Rules: the first piece of each choice has the role and an empty content, the last one only the finish
reason. `developer` messages are the template's system messages.
"""

from __future__ import annotations

from typing import Any

from hotprefix.engine.executor import TokenLogprob
from hotprefix.engine.messages import Delta
from hotprefix.engine.params import MAX_LOGPROBS
from hotprefix.errors import InputError
from hotprefix.server.answer import finish_reason
from hotprefix.server.logprobs import chat_content, prompt_entries
from hotprefix.server.schemas import Chat, Conversation, Message
from hotprefix.server.text import Text


def rendered(body: Conversation, text: Text) -> list[int]:
    """Token ids of the conversation. Raises InputError."""
    variables = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return text.render(
        [template_message(message) for message in body.messages],
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools],
        add_generation_prompt=body.add_generation_prompt,
        variables=variables,
    )


def template_message(message: Message) -> dict[str, Any]:
    """The message without what is null; `developer` is `system`."""
    shown = message.model_dump(exclude_none=True)
    shown["role"] = "system" if message.role == "developer" else message.role
    return shown


def max_tokens(body: Chat) -> int | None:
    """Raises InputError where the two names of the limit differ."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise InputError(
            f"max_tokens={old} and max_completion_tokens={new} differ: give one", param="max_tokens"
        )
    return new if new is not None else old


def check(body: Chat) -> None:
    """Raises InputError where fields contradict each other."""
    if body.top_logprobs is not None:
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise InputError(
                f"top_logprobs={body.top_logprobs}: give 0 to {MAX_LOGPROBS}", param="top_logprobs"
            )
        if not body.logprobs:
            raise InputError("top_logprobs needs logprobs true", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise InputError("prompt_logprobs is not available in a stream", param="prompt_logprobs")


class ChatChoice:
    """One choice."""

    def __init__(self, index: int, body: Chat, text: Text) -> None:
        self._index, self._body, self._text = index, body, text
        self._content: list[str] = []
        self._entries: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._end: dict[str, Any] = {}
        self._started = False
        self._sent = 0

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        self._prompt_logprobs += delta.prompt_logprobs or ()
        found = []
        if not self._started:
            self._started = True
            found.append(self._piece({"role": "assistant", "content": ""}, ()))
        self._entries += delta.logprobs
        self._content.append(delta.text)
        if delta.text:
            found.append(self._piece({"content": delta.text}, self._new_entries()))
        if delta.finish is not None:
            self._end = {"finish_reason": finish_reason(delta.finish), "stop_reason": delta.stop_reason}
            found.append({**self._piece({}, self._new_entries()), **self._end})
        return found

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content), "refusal": None}
        choice = {
            "index": self._index,
            "message": message,
            "logprobs": self._logprobs(self._entries),
            **self._end,
        }
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_entries(self._text, self._prompt_logprobs)
        return choice

    def _new_entries(self) -> list[TokenLogprob]:
        new, self._sent = self._entries[self._sent :], len(self._entries)
        return new

    def _piece(self, delta: dict[str, Any], entries: Any) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": self._logprobs(entries) if entries else None,
            "finish_reason": None,
        }

    def _logprobs(self, entries: Any) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return {"content": chat_content(self._text, entries), "refusal": None}
