"""Taking an answer up that another engine began. Owns: what a router learns of a stream beside its events,
what it sends to the engine that goes on, and which pieces of the answer the client has already.

Rules:
1. Marks are lines of a stream that only a request with the internal key gets. Each begins with `MARK`, which
   makes it a comment to any reader of events, and holds JSON. A router takes these lines out; what is left is
   the stream that a client gets, byte for byte.
2. The first line of a stream is its head: an object (`Head`).
3. The line before an event of a choice is a list: the choice's number, whether the choice ends with this
   event, the ids of the tokens that were sampled since its last event, and its cached tokens by source. So
   the ids that a router has at any moment are those of the text that the client has; a token whose text is
   held back belongs to the next event.
4. The line before an error event is the text "lost" if another engine may take the answer up.
5. The engine that goes on makes every piece of the answer again from the ids, and leaves out as many as the
   client has. Pieces follow from ids alone, one delta for each id, so they come out equal. If they do not
   fit, the answer is refused: it is never sent twice or with a gap.

Example (one choice; the second event has the text of two tokens):

    :hp {"id":"cmpl-1","created":1,"model":"m","system_fingerprint":"f","prompts":"93ab"}
    :hp [0,false,[12],[16,0,0]]
    data: {...}

    :hp [0,false,[13,14],[16,0,0]]
    data: {...}
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from pydantic_core import to_json

from hotprefix.kernel import tokens as tk
from hotprefix.server.errors import ApiError
from hotprefix.server.schemas import Body

MARK = b":hp "
LOST = "lost"
CHAT_PATH = "/v1/chat/completions"
RESUME_PATH = "/internal/resume"

Count = Annotated[int, Field(ge=0)]
Cached = tuple[int, int, int]


class Head(Body):
    """What all events of a stream have in common. prompts: digest of the prompts' ids."""

    id: str = Field(min_length=1, max_length=200)
    created: int
    model: str
    system_fingerprint: str
    prompts: str


class SoFar(Body):
    """What the client has of one choice.

    ids: the tokens of the events that it has.
    events: how many those are.
    cached: cached tokens of the prompt from the device, the host and the storage.
    ended: the last of the events ended the choice.
    """

    index: Count
    ids: list[int]
    events: Count
    cached: Annotated[list[Count], Field(min_length=3, max_length=3)]
    ended: bool


class Resume(Body):
    """POST /internal/resume. path, body: the request as the client made it. choices: those of which the
    client has anything."""

    path: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]
    head: Head
    choices: list[SoFar]


class Mark(NamedTuple):
    """The line before an event. tokens: sampled since the choice's last event."""

    choice: int
    ended: bool
    tokens: Sequence[int]
    cached: Cached


def mark_line(value: Any) -> bytes:
    """A mark: a `Mark`, the head, or LOST."""
    return MARK + to_json(value) + b"\n"


def prompts_digest(prompts: Iterable[Sequence[int]]) -> str:
    """A name for prompts: equal only if all their ids are."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(len(prompt).to_bytes(8, "little") + tk.encode(prompt))
    return digest.hexdigest()


@dataclass(slots=True)
class Seam:
    """Where one choice is taken up.

    given: how many tokens the client has.
    events: how many events it has; those are left out.
    cached: see `SoFar`.
    ended: nothing of this choice is left to be made.
    """

    given: int
    events: int
    cached: Cached
    ended: bool
    _fed: int = 0
    _left_out: int = 0

    @classmethod
    def of(cls, so_far: SoFar) -> Seam:
        device, host, storage = so_far.cached
        return cls(len(so_far.ids), so_far.events, (device, host, storage), so_far.ended)

    @property
    def replaying(self) -> bool:
        """Whether given tokens are yet to come again."""
        return self._fed < self.given

    def rest(self, tokens: int, pieces: Sequence[Any]) -> Sequence[Any]:
        """The pieces of the next delta that the client has not got. tokens: of that delta. Raises ApiError
        409 if pieces and events do not fit together."""
        replayed, before = self.replaying, self._left_out
        self._fed += tokens
        self._left_out += min(self.events - before, len(pieces))
        new = pieces[self._left_out - before :]
        if replayed and self.replaying:
            fits = not new  # events with later tokens were sent
        elif replayed:
            fits = before < self._left_out == self.events  # the last token came with an event
        else:
            fits = self._left_out == self.events or not self._fed
        if not fits:
            raise ApiError(
                409,
                f"the {self.events} events that were sent do not fit the {self.given} tokens that came with "
                "them: the answer cannot be taken up here",
                code="resume_mismatch",
            )
        return new


def fitting(seams: Sequence[SoFar], choices: int) -> dict[int, Seam]:
    """The seam of each choice. choices: how many the answer has. Raises ApiError 400 for a choice that does
    not exist, comes twice, or has tokens without events or the other way round."""
    found: dict[int, Seam] = {}
    for one in seams:
        wrong = ""
        if one.index >= choices or one.index in found:
            wrong = f"it comes twice, or the answer has only {choices}"
        elif one.ids and not one.events:
            wrong = f"{len(one.ids)} ids came with no event"
        elif one.events > 1 and not one.ids and not one.ended:
            wrong = f"{one.events} events came with no ids"
        if wrong:
            raise ApiError(400, f"choice {one.index}: {wrong}", param="choices", code="invalid_value")
        found[one.index] = Seam.of(one)
    return found
