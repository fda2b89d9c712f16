"""Conversations that a template would refuse or not show. Owns: `Adapter`, which finds out by trial what a
model's template does with tool calls, and rewrites normalised messages if that is needed.

Rules: a template is tried once, when it is loaded. A conversation is rewritten only in ways that the trial
showed to help; otherwise it is given as it came. Whatever an answer of this server holds, the next request
may send back. These are the rewritings:
- Calls or results that the template does not print are told in plain messages (tool_prompt.py).
- Several calls at once, if the template takes one: each goes into a message of its own, before its results.
- Text beside calls, if it prints only one of the two: the text goes into a message of its own.
- Ids of another form than nine letters and digits, if it insists on that form: a digest, the same for call
  and result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotprefix.engine.text.call_ids import LENGTH, short_id
from hotprefix.engine.text.chat_messages import Absent, normalise
from hotprefix.engine.text.tool_prompt import inlined

Message = dict[str, Any]
Rewrite = Callable[[Sequence[Message]], list[Message]]


class Adapter:
    """What one template needs.

    shows: the text that a conversation becomes; None if the template refuses it.
    tells_tools: whether the template prints the request's tools.
    """

    def __init__(self, shows: Callable[[Sequence[Message]], str | None], *, tells_tools: bool) -> None:
        self._shows = shows
        self._tells_tools = tells_tools
        self._takes_system = shows(list(normalise([_SYSTEM, _USER]))) is not None
        self._rewrites: list[Rewrite] = []
        one, foreign = _trial("a"), _trial("a", id_of="call_{}".format)
        if shows(foreign) is None and shows(one) is not None:
            self._rewrites.append(short_ids)
        self._shows_calls = self._works(one) or not self._works(inlined(one, ()))
        self._try(one_call_each, _trial("a", "b"))
        self._try(text_apart, _trial("a", text=True))

    def __call__(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Normalised messages as the template can show them. tools: the request's."""
        if tools and not self._tells_tools:
            return inlined(messages, tools, takes_system=self._takes_system)
        if not any("tool_calls" in message for message in messages):
            return list(messages)
        if not self._shows_calls:
            return inlined(messages, ())
        for rewrite in self._rewrites:
            messages = rewrite(messages)
        return list(messages)

    def _try(self, rewrite: Rewrite, trial: list[Message]) -> None:
        if not self._works(trial) and self._works(rewrite(trial)):
            self._rewrites.append(rewrite)

    def _works(self, messages: Sequence[Message]) -> bool:
        """Whether the template shows everything that the messages of a trial say."""
        text = self._shows(messages)
        return text is not None and all(needle in text for needle in _needles(messages))


TRIAL_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": f"trial_{c}",
            "description": "a trial",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    for c in "ab"
]
_SYSTEM = {"role": "system", "content": "trial of system"}
_USER = {"role": "user", "content": "trial of user"}


def _trial(
    *calls: str, text: bool = False, id_of: Callable[[str], str] = lambda c: c * LENGTH
) -> list[Message]:
    """A conversation with an assistant's calls, their results, and what the assistant says then."""
    called = [
        {
            "id": id_of(c),
            "type": "function",
            "function": {"name": f"trial_{c}", "arguments": f'{{"key_{c}": 1}}'},
        }
        for c in calls
    ]
    assistant = {"role": "assistant", "content": "trial of text" if text else None, "tool_calls": called}
    results = [{"role": "tool", "tool_call_id": id_of(c), "content": f"trial of result {c}"} for c in calls]
    return list(normalise([_USER, assistant, *results, {"role": "assistant", "content": "trial of end"}]))


def _needles(messages: Sequence[Message]) -> list[str]:
    """What must appear if a template shows a trial: its texts, and those parts of its calls that the
    descriptions of the tools do not contain."""
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
    return [*(key for arguments in calls for key in arguments), *(message["content"] for message in messages)]


def short_ids(messages: Sequence[Message]) -> list[Message]:
    """The ids of calls and results as nine letters and digits. Ids that have that form stay."""
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: Message) -> Message:
    message = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        message["tool_call_id"] = short_id(message["tool_call_id"])
    if "tool_calls" in message:
        message["tool_calls"] = [
            {**call, "id": short_id(call["id"])} if isinstance(call.get("id"), str) else call
            for call in message["tool_calls"]
        ]
    return message


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Each call in an assistant's message of its own, directly before its results. Results that belong to no
    call stay behind the last call."""
    told: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            told.append(message)
            continue
        results = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.pop(0))
        for number, call in enumerate(calls):
            content = Absent() if number else message["content"]
            told.append({**message, "content": content, "tool_calls": [call]})
            own = [r for r in results if r.get("tool_call_id") == call.get("id") is not None]
            told += own
            results = [r for r in results if r not in own]
        told += results
    return told


def text_apart(messages: Sequence[Message]) -> list[Message]:
    """An assistant's text in a message before its calls."""
    told: list[Message] = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            told.append({key: item for key, item in message.items() if key != "tool_calls"})
            message = {**message, "content": Absent()}
        told.append(message)
    return told
