"""What an answer is made of. Owns: the parts that chat and text completions share, and the token counts.

Rules: one `Choice` object turns the deltas of one generation into pieces. A stream sends the pieces, and a
whole answer joins the same pieces, so the two cannot differ. A prompt is counted once, however many choices
it has. A delta without text makes no piece of its own; its log-probabilities and token ids go with the next
piece.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from hotprefix import __version__
from hotprefix.engine.messages import Delta, Generate, Usage
from hotprefix.kernel.plan import Finish
from hotprefix.server.errors import ApiError
from hotprefix.server.resume import Mark, Resume, Seam, fitting, prompts_digest

FINGERPRINT = f"hotprefix-{__version__}"


class Choice(Protocol):
    """One generation's answer in the making."""

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """The pieces that a stream sends for this delta; each becomes the only choice of one chunk."""
        ...

    def whole(self) -> dict[str, Any]:
        """The choice of a whole answer. Called when `pieces` has been given the terminal delta."""
        ...


class Chunk(NamedTuple):
    """One event of a stream, and what a router is told with it."""

    body: dict[str, Any]
    mark: Mark


@dataclass(slots=True)
class Answer:
    """One HTTP answer.

    requests[i]: the generation of choice i. The `n` choices of one prompt stand side by side.
    grammar_field: the field of the request that gave its grammar.
    token_ids: the ids of prompts and outputs are shown, too, in vLLM's form.
    ids_in_choice: a prompt's ids stand in each of its choices, otherwise beside them.
    marked: a router is told what it needs to have the answer taken up elsewhere (resume.py).
    seams: the choices of which the client has something already.
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
    token_ids: bool = False
    ids_in_choice: bool = False
    marked: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    fingerprint: str = FINGERPRINT
    seams: Mapping[int, Seam] = field(init=False, default_factory=dict)
    _index: dict[str, int] = field(init=False)
    _usage: list[Usage] = field(init=False)
    _untold: list[list[int]] = field(init=False)
    _ids: list[list[int]] = field(init=False)
    _begun: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._index = {request.id: number for number, request in enumerate(self.requests)}
        self._usage = [Usage(len(request.prompt), 0) for request in self.requests]
        self._untold = [[] for _ in self.requests]  # tokens that no piece has had
        self._ids = [[] for _ in self.requests]

    def take_up(self, wanted: Resume) -> None:
        """Go on with an answer of which the client has a part. Raises ApiError 400 (its choices) or 409 (its
        prompts are not these)."""
        head = wanted.head
        if head.prompts != self.prompts():
            message = "the prompt has other token ids here: another model, tokenizer or template is served"
            raise ApiError(409, message, code="resume_mismatch")
        self.created, self.model, self.fingerprint = head.created, head.model, head.system_fingerprint
        self.seams = fitting(wanted.choices, len(self.requests))
        requests = list(self.requests)
        for one in wanted.choices:
            request = requests[one.index]
            requests[one.index] = request._replace(outputs=tuple(one.ids))
            self._usage[one.index] = Usage(len(request.prompt), len(one.ids), *one.cached)
        self.requests = requests

    @property
    def open_requests(self) -> list[Generate]:
        """The generations that are to run."""
        ended = {number for number, seam in self.seams.items() if seam.ended}
        return [request for number, request in enumerate(self.requests) if number not in ended]

    def replays(self, delta: Delta) -> bool:
        """Whether the delta, which comes next, repeats a token that the client has."""
        seam = self.seams.get(self._index[delta.id])
        return seam is not None and seam.replaying

    def made_here(self, delta: Delta) -> Delta:
        """The delta, which comes next, less what it repeats: what is to be measured of it."""
        seam = self.seams.get(self._index[delta.id])
        if seam is None:
            return delta
        made = delta.usage.completion_tokens - seam.given
        tokens = () if seam.replaying else delta.tokens
        return delta._replace(tokens=tokens, usage=delta.usage._replace(completion_tokens=max(0, made)))

    def chunks(self, delta: Delta) -> list[Chunk]:
        """Stream chunks of one delta. Raises ApiError 409 if what the client has does not fit."""
        number = self._index[delta.id]
        usage, seam = delta.usage, self.seams.get(number)
        if seam is not None:
            usage = Usage(usage.prompt_tokens, usage.completion_tokens, *seam.cached)
        self._usage[number] = usage
        self._untold[number] += delta.tokens
        if self.token_ids:
            self._ids[number] += delta.tokens
        chunks = self._chunks(number, self.choices[number].pieces(delta), ended=delta.finish is not None)
        return chunks if seam is None else list(seam.rest(len(delta.tokens), chunks))

    def _chunks(self, number: int, pieces: list[dict[str, Any]], *, ended: bool) -> list[Chunk]:
        """The pieces as chunks. The first of them has the tokens of which nothing was told yet, as it has
        their log-probabilities. A piece that only opens a choice has none."""
        chunks = []
        for left in range(len(pieces) - 1, -1, -1):
            piece = pieces[-1 - left]
            tokens: list[int] = []
            if "role" not in piece.get("delta", ()):
                tokens, self._untold[number] = self._untold[number], []
            chunk = self._chunk([piece])
            if self.token_ids:
                piece["token_ids"] = tokens
                if number not in self._begun:
                    self._begun.add(number)
                    place = piece if self.ids_in_choice else chunk
                    place["prompt_token_ids"] = self.requests[number].prompt
            mark = Mark(number, ended and not left, tokens, self._usage[number][2:])
            chunks.append(Chunk(chunk, mark))
        return chunks

    def last_chunk(self) -> dict[str, Any] | None:
        """The chunk that carries the usage; None if the request did not ask for it."""
        if not self.usage_in_stream:
            return None
        return {**self._chunk([]), "usage": self.usage()}

    def whole(self) -> dict[str, Any]:
        choices = [choice.whole() for choice in self.choices]
        whole = {**self._head(self.whole_object), "choices": choices, "usage": self.usage()}
        if self.token_ids:
            for choice, request, ids in zip(choices, self.requests, self._ids, strict=True):
                choice["token_ids"] = ids
                (choice if self.ids_in_choice else whole)["prompt_token_ids"] = request.prompt
        return whole

    def head(self) -> dict[str, Any]:
        """What a router is told before anything else (`resume.Head`)."""
        head = self._head(self.chunk_object)
        del head["object"]
        return {**head, "prompts": self.prompts()}

    def prompts(self) -> str:
        return prompts_digest(request.prompt for request in self.requests[:: self.n])

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
            "system_fingerprint": self.fingerprint,
        }


FINISH_REASON = {Finish.STOP: "stop", Finish.LENGTH: "length"}


def finish_reason(finish: Finish) -> str:
    """OpenAI's word for an end. Raises KeyError for an end that is a failure, because those never become a
    choice."""
    return FINISH_REASON[finish]
