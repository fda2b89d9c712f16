"""POST /v1/chat/completions. Owns: what a conversation's request means, and the shape of its answer.

Rules:
1. The first piece of each choice has the role and an empty content, the last one only the finish reason.
2. `developer` messages are the template's system messages.
3. The model is told the tools whatever the tool choice is, so that the prompt's prefix stays the same. With
   choice "none" the output is not searched for calls.
4. Whatever an answer holds, the next request may send back.
5. Reasoning is kept apart from content if the request asks for it.
6. The pieces follow from the deltas and the answer's id alone, so that another engine can make them again
   (resume.py). The ids of calls are derived from the answer's id, which is random.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hotprefix.engine.executor import TokenLogprob
from hotprefix.engine.messages import Delta
from hotprefix.engine.params import MAX_LOGPROBS
from hotprefix.engine.text.call_ids import short_id
from hotprefix.engine.text.reasoning import ReasoningSplitter
from hotprefix.engine.text.tools import ToolDelta, ToolOutput
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
        tools=template_tools(body),
        add_generation_prompt=body.add_generation_prompt,
        variables=variables,
    )


def template_tools(body: Conversation) -> list[dict[str, Any]]:
    """The tools without fields that are null. Keys keep the order in which they came."""
    return [tool.model_dump(exclude_none=True) for tool in body.tools]


def template_message(message: Message) -> dict[str, Any]:
    """The message without fields that are null. `developer` becomes `system`, and `reasoning` is another name
    of `reasoning_content`. If a message has a refusal and no content, the refusal is its content."""
    shown = message.model_dump(exclude_none=True, exclude={"reasoning", "refusal"})
    if isinstance(message.reasoning, str):
        shown.setdefault("reasoning_content", message.reasoning)
    if message.refusal is not None and not message.tool_calls:
        shown.setdefault("content", message.refusal)
    shown["role"] = "system" if message.role == "developer" else message.role
    return shown


def max_tokens(body: Chat) -> int | None:
    """The limit on outputs. Raises InputError if its two names differ, or if it allows no output."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise InputError(
            f"max_tokens={old} and max_completion_tokens={new} differ: give one", param="max_tokens"
        )
    limit = new if new is not None else old
    if limit == 0:
        raise InputError("max_tokens=0: give a whole number >= 1", param="max_tokens")
    return limit


def check(body: Chat) -> None:
    """Raises InputError if fields contradict each other."""
    if body.top_logprobs is not None:
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise InputError(
                f"top_logprobs={body.top_logprobs}: give 0 to {MAX_LOGPROBS}", param="top_logprobs"
            )
        if not body.logprobs:
            raise InputError("top_logprobs needs logprobs true", param="top_logprobs")
    if not body.tools and body.choice not in ("none", "auto"):
        raise InputError(f"tool_choice {body.choice!r} needs tools", param="tool_choice")
    if body.stream and body.prompt_logprobs is not None:
        raise InputError("prompt_logprobs is not available in a stream", param="prompt_logprobs")


class ChatChoice:
    """One choice. answer: its id. prompt: the conversation's ids."""

    def __init__(self, index: int, body: Chat, text: Text, answer: str, prompt: Sequence[int]) -> None:
        self._index, self._body, self._text, self._answer = index, body, text, answer
        self._splitter = _splitter(prompt, text) if body.separate_reasoning else None
        self._reasoning: list[str] = []
        self._parser = text.tool_parser(template_tools(body)) if body.choice != "none" else None
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
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
        for reasoning, output in self._read(delta):
            if reasoning:
                self._reasoning.append(reasoning)
                found.append(self._piece({"reasoning_content": reasoning}, self._new_entries()))
            if output.content:
                self._content.append(output.content)
                found.append(self._piece({"content": output.content}, self._new_entries()))
            for call in filter(self._wanted, output.calls):
                found.append(self._piece({"tool_calls": [self._call_piece(call)]}, self._new_entries()))
        if delta.finish is not None:
            reason = finish_reason(delta.finish)
            reason = "tool_calls" if self._calls and reason == "stop" else reason
            self._end = {"finish_reason": reason, "stop_reason": delta.stop_reason}
            found.append({**self._piece({}, self._new_entries()), **self._end})
        return found

    def _read(self, delta: Delta) -> Iterator[tuple[str, ToolOutput]]:
        """The delta's text, split into reasoning on the one side and content and calls on the other."""
        reasoning, text = self._splitter.push(delta.text) if self._splitter else ("", delta.text)
        if self._splitter and delta.finish is not None:
            last = self._splitter.flush()
            reasoning, text = reasoning + last[0], text + last[1]
        if self._parser is None:
            yield reasoning, ToolOutput(text)
            return
        yield reasoning, self._parser.push(text)
        if delta.finish is not None:
            yield "", self._parser.flush()

    def _wanted(self, call: ToolDelta) -> bool:
        return self._body.parallel_tool_calls or call.index == 0

    def _call_piece(self, call: ToolDelta) -> dict[str, Any]:
        """The piece that a stream sends; the same is added to the whole calls. Arguments stay byte for
        byte."""
        if call.name is None:
            self._calls[call.index]["function"]["arguments"] += call.arguments
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        name = short_id(f"{self._answer}/{self._index}/{call.index}")
        whole = {"id": name, "type": "function", "function": function}
        self._calls.append(whole)
        return {"index": call.index, **whole, "function": dict(function)}

    def whole(self) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._splitter:
            message["reasoning_content"] = "".join(self._reasoning) or None
        if self._calls:
            message |= {"content": content or None, "tool_calls": self._calls}
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


_TAIL = 16


def _splitter(prompt: Sequence[int], text: Text) -> ReasoningSplitter:
    """A splitter for the output behind the prompt. The prompt's last few tokens tell whether a thought is
    open."""
    return ReasoningSplitter.after(text.decode(prompt[-_TAIL:], skip_special_tokens=False))
