"""Tools for a model whose template does not know them. Owns: `inlined`, which tells tools and calls in plain
messages.

Rules: the format is `hermes`, which `tools.py` reads back. The text is a function of the request alone, and
the description of the tools comes first, so that requests with the same tools share a prefix. The words
written here may hold the vocabulary's marks (<tool_call>); the caller's words never do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hotprefix.engine.text.origin import Origin, between, joined, traced

Message = dict[str, Any]

_HEAD = """\
You can call functions. Each line between <tools> and </tools> describes one as JSON:
<tools>
"""
_TAIL = """
</tools>
To call one, answer with its name and arguments as JSON in this form:
<tool_call>
{"name": "the function's name", "arguments": {"argument": "value"}}
</tool_call>"""


def inlined(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, takes_system: bool = True
) -> list[Message]:
    """Normalised messages in which the tools, if there are any, are told at the beginning: in the system
    message or, if the template takes none, in the first message. Calls and results are told as text;
    neighbouring results become one message."""
    told = list(_plain(messages))
    if not tools:
        return told
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = joined((_own(_HEAD), described, _own(_TAIL)))
    if told[0]["role"] == "system" or not takes_system:
        first = told.pop(0)
        text = joined((text, _own("\n\n"), first["content"]))
        return [{**first, "content": text}, *told]
    return [{"role": _own("system"), "content": text}, *told]


def _plain(messages: Sequence[Message]) -> Iterator[Message]:
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(
                joined((_own("<tool_response>\n"), message["content"], _own("\n</tool_response>")))
            )
            continue
        if results:
            yield _results(results)
            results = []
        calls = [_call(call["function"]) for call in message.get("tool_calls", ())]
        if calls:
            texts = [message["content"], *calls] if message["content"] else calls
            message = {k: v for k, v in message.items() if k != "tool_calls"}
            message["content"] = between(_own("\n"), texts)
        yield message
    if results:
        yield _results(results)


def _results(results: Sequence[str]) -> Message:
    return {"role": _own("user"), "content": between(_own("\n"), results)}


def _call(function: Mapping[str, Any]) -> str:
    name = json.dumps(function["name"], ensure_ascii=False)
    head = f'<tool_call>\n{{"name": {name}, "arguments": '
    return joined((_own("<tool_call>"), head.removeprefix("<tool_call>"), function["arguments"].text,
                   _own("}\n</tool_call>")))  # fmt: skip


def _own(text: str) -> str:
    return traced(text, Origin.TEMPLATE)
