"""Tools for a model whose template knows none. Owns: `inlined`, tools and calls told in plain messages.

Rules: the format is `hermes`, which `tools.py` reads back; text is a function of the request alone, and
the description comes first, so that requests with the same tools share a prefix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

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


def inlined(messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Normalised messages with the tools in the system message, calls and results as text."""
    text = _HEAD + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _TAIL
    rest = list(messages)
    if rest[0]["role"] == "system":
        text += "\n\n" + rest.pop(0)["content"]
    return [{"role": "system", "content": text}, *map(_plain, rest)]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    told = [_call(call["function"]) for call in calls]
    return {"role": message["role"], "content": "\n".join([t for t in [message["content"]] if t] + told)}


def _call(function: Mapping[str, Any]) -> str:
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {function["arguments"].raw}}}\n</tool_call>'
