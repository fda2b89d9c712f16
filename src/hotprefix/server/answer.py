"""What an answer is made of. Owns: the parts that chat and text completions share, and the token counts.

Rules: one `Choice` object turns the deltas of one generation into pieces. A stream sends the pieces, and a
whole answer joins the same pieces, so the two cannot differ. A prompt is counted once, however many choices
it has. A delta without text makes no piece of its own; its log-probabilities go with the next piece.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hotprefix import __version__
from hotprefix.engine.messages import Delta, Generate, Usage
from hotprefix.kernel.plan import Finish

FINGERPRINT = f"hotprefix-{__version__}"


class Choice(Protocol):
    """One generation's answer in the making."""

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """The pieces that a stream sends for this delta; each becomes the only choice of one chunk."""
        ...

    def whole(self) -> dict[str, Any]:
        """The choice of a whole answer. Called when `pieces` has been given the terminal delta."""
        ...


@dataclass(slots=True)
class Answer:
    """One HTTP answer.

    requests[i]: the generation of choice i. The `n` choices of one prompt stand side by side.
    grammar_field: the field of the request that gave its grammar.
    """

    id: str
    model: str
    whole_object: str
    chunk_object: str
    requests: Sequence[Generate]
    choices: Sequence[Choice]
    n: int
    usage_in_stream: bool = False
    usage_in_chunks: bool = False
    by_source: bool = False
    grammar_field: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _index: dict[str, int] = field(init=False)
    _usage: list[Usage] = field(init=False)

    def __post_init__(self) -> None:
        self._index = {request.id: number for number, request in enumerate(self.requests)}
        self._usage = [Usage(len(request.prompt), 0) for request in self.requests]

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """Stream chunks of one delta."""
        number = self._index[delta.id]
        self._usage[number] = delta.usage
        return [self._chunk([piece]) for piece in self.choices[number].pieces(delta)]

    def last_chunk(self) -> dict[str, Any] | None:
        """The chunk that carries the usage; None if the request did not ask for it."""
        if not self.usage_in_stream:
            return None
        return {**self._chunk([]), "usage": self.usage()}

    def whole(self) -> dict[str, Any]:
        head = self._head(self.whole_object)
        return {**head, "choices": [choice.whole() for choice in self.choices], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Counts so far. cached_tokens are those of the first choice of each prompt."""
        firsts = self._usage[:: self.n]
        prompt = sum(usage.prompt_tokens for usage in firsts)
        output = sum(usage.completion_tokens for usage in self._usage)
        details: dict[str, Any] = {"cached_tokens": sum(usage.cached_tokens for usage in firsts)}
        if self.by_source:
            details["cached_tokens_by_source"] = {
                "device": sum(usage.cached_device for usage in firsts),
                "host": sum(usage.cached_host for usage in firsts),
                "storage": sum(usage.cached_storage for usage in firsts),
            }
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": details,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head(self.chunk_object), "choices": choices}
        if self.usage_in_chunks:
            chunk["usage"] = self.usage()
        elif self.usage_in_stream:
            chunk["usage"] = None
        return chunk

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


FINISH_REASON = {Finish.STOP: "stop", Finish.LENGTH: "length"}


def finish_reason(finish: Finish) -> str:
    """OpenAI's word for an end. Raises KeyError for an end that is a failure, because those never become a
    choice."""
    return FINISH_REASON[finish]
