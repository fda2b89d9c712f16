"""Prompts without a tokenizer. Owns: `TextMatcher`, which cuts the text into pieces and chains their hashes.

Rules:
1. Equal keys at one place mean equal texts up to there, for one model and one salt. Keys of a text and of
   token ids never meet.
2. A token is taken to be `TOKEN_BYTES` bytes of text. It is a guess, and `Prompt.exact` says so.
3. Long bodies are read in a thread, so that streams go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic_core import from_json
from xxhash import xxh3_64_intdigest

from hotprefix.router.body_fields import choices, outputs, session, text_or_none
from hotprefix.router.prompt import Prompt

TOKEN_BYTES = 4
INLINE_BYTES = 64 * 1024


class TextMatcher:
    """page_size: tokens of a page in the pool of a model, by the name that the client gave."""

    def __init__(self, page_size: Callable[[str | None], int]) -> None:
        self._page_size = page_size

    async def read(self, path: str, body: bytes, headers: Mapping[str, str], tenant: str | None) -> Prompt:
        """See `Matcher`."""
        if len(body) <= INLINE_BYTES:
            return self._read(body, headers, tenant)
        return await asyncio.to_thread(self._read, body, headers, tenant)

    def _read(self, body: bytes, headers: Mapping[str, str], tenant: str | None) -> Prompt:
        try:
            value = from_json(body)
        except ValueError:
            return Prompt()
        if not isinstance(value, dict):
            return Prompt()
        model = text_or_none(value.get("model"))
        data = b"".join(_pieces(value))
        salt = f"{model!r} {tenant!r} {text_or_none(value.get('cache_salt'))!r}".encode(errors="replace")
        size = self._page_size(model) * TOKEN_BYTES
        return Prompt(
            keys=_chain(data, size, xxh3_64_intdigest(salt)),
            tokens=max(1, len(data) // TOKEN_BYTES),
            outputs=outputs(value),
            model=model,
            session=session(value, headers),
            stream=value.get("stream") is True,
            choices=choices(value),
        )


def _chain(data: bytes, size: int, seed: int) -> tuple[int, ...]:
    """A key for each complete piece; it covers the piece and all before it."""
    keys = []
    view = memoryview(data)
    for at in range(0, len(data) - size + 1, size):
        seed = xxh3_64_intdigest(view[at : at + size], seed)
        keys.append(seed)
    return tuple(keys)


def _pieces(value: Mapping[str, Any]) -> Iterator[bytes]:
    """The text that is the prompt, in an order that puts what comes first in the prompt first. Token ids
    become four bytes each, so that they count as tokens."""
    tools = value.get("tools")
    if isinstance(tools, list):
        yield repr(tools).encode(errors="replace")
    messages = value.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            content = message.get("content")
            text = content if isinstance(content, str) else repr(content)
            yield f"\x00{message.get('role')}\x00{text}".encode(errors="replace")
    for name in ("prompt", "input"):
        given = value.get(name)
        if isinstance(given, str):
            yield given.encode(errors="replace")
        elif isinstance(given, list):
            yield from _listed(given)


def _listed(given: list[Any]) -> Iterator[bytes]:
    """A list of prompts: the first, since it is the first that is computed; or token ids."""
    first = given[0] if given else None
    if isinstance(first, int):
        yield b"\xff" * TOKEN_BYTES
        yield b"".join((each & 0xFFFFFFFF).to_bytes(4, "little") for each in given if isinstance(each, int))
    elif isinstance(first, list):
        yield from _listed(first)
    elif isinstance(first, str):
        yield first.encode(errors="replace")
    elif given:
        yield repr(given).encode(errors="replace")
