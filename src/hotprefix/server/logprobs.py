"""Log-probabilities on the wire. Owns: their three shapes (chat, completions, prompt_logprobs).

Rules: a token that is not UTF-8 by itself is written `bytes:\\xHH...`, so two of them never share a name.
JSON has no infinity, so the log-probability of what is impossible is `FLOOR` (rule 49). Offsets count
characters of the text; a character belongs to the token that completes it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from hotprefix.engine.executor import TokenLogprob
from hotprefix.server.text import Text

FLOOR = -9999.0


def finite(logprob: float) -> float:
    """The value, or FLOOR if it is below that or not a number."""
    return logprob if logprob > FLOOR else FLOOR


def token_name(text: Text, token: int) -> str:
    raw = text.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_content(text: Text, entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat choice."""
    return [
        {
            **_chat_token(text, entry.token, entry.logprob),
            "top_logprobs": [_chat_token(text, token, logprob) for token, logprob in entry.top],
        }
        for entry in entries
    ]


def _chat_token(text: Text, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_name(text, token),
        "logprob": finite(logprob),
        "bytes": list(text.token_bytes(token)),
    }


class Offsets:
    """Where each next token's characters begin."""

    def __init__(self, start: int = 0) -> None:
        self._next = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, raw: bytes) -> int:
        """Offset of the token with these bytes, which follows the last one given."""
        here = self._next
        self._next += len(self._decoder.decode(raw))
        return here


def completion_part(
    text: Text, entries: Iterable[tuple[int, TokenLogprob | None]], offsets: Offsets, top: int
) -> dict[str, list[Any]]:
    """`logprobs` of a completions choice for these pairs of a token and its entry, None if it has none. top:
    how many alternatives were asked for; the sampled token is always among them."""
    part: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, entry in entries:
        part["tokens"].append(token_name(text, token))
        part["text_offset"].append(offsets.of(text.token_bytes(token)))
        part["token_logprobs"].append(None if entry is None else finite(entry.logprob))
        named = None
        if entry is not None and top:
            named = {token_name(text, other): finite(logprob) for other, logprob in entry.top[:top]}
            named.setdefault(token_name(text, token), finite(entry.logprob))
        part["top_logprobs"].append(named)
    return part


def joined(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """The parts of one choice, one after the other."""
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {key: [value for part in parts for value in part[key]] for key in keys}


def prompt_entries(text: Text, entries: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: one entry for each prompt token; null for the first, which nothing predicts."""
    whole: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)}
        ranked[entry.token] = (entry.logprob, entry.rank)
        whole.append(
            {
                str(token): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": token_name(text, token),
                }
                for token, (logprob, rank) in ranked.items()
            }
        )
    return whole
