"""The way of an answer's bytes. Owns: `Way`, what an exchange needs of one, and `Passage`, the way of an
answer that one worker makes.

Rules:
1. Bytes are passed on as they are. Of a stream of events only the last, if it is not complete, waits for its
   end; so a stream that breaks never leaves half an event before the error.
2. A stream never ends in silence: if it breaks, or ends without `[DONE]` where that belongs, an error event
   is its last one.

Sans-I/O. `splice` is the way of an answer that several workers make.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple, Protocol

from pydantic_core import to_json

from hotprefix.server.errors import ApiError

MOST_HELD: Final = 1 << 20
ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
GAVE_UP, GARBAGE = "gave_up", "garbage"
WHY_LOST: Final = {GAVE_UP: "it cannot complete it", GARBAGE: "what it sent makes no sense"}
DONE: Final = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]")
TAIL: Final = 256


class Continuation(NamedTuple):
    """What to ask of the engine that goes on: POST `body` to `path`, as JSON, with the internal key and the
    headers of the client's request that the first engine got. outputs: tokens that the client has."""

    path: str
    body: bytes
    outputs: int


class Way(Protocol):
    """What happens to an answer's bytes.

    begun: a first event with data of the present stream has come; of another answer, a first byte.
    done: the answer is complete, or has ended with an error that the client was given.
    lost: nothing good comes of the present stream any more, and why (`WHY_LOST`); "" = it may.
    """

    @property
    def begun(self) -> bool: ...
    @property
    def done(self) -> bool: ...
    @property
    def lost(self) -> str: ...

    def feed(self, data: bytes) -> bytes:
        """Bytes from the worker. Returns those for the client."""
        ...

    def ended(self) -> bytes | None:
        """The worker has ended the answer. Returns the client's last bytes; None: it is not complete."""
        ...

    def continuation(self) -> Continuation | None:
        """The present stream has failed: it broke off, ended too early, or is `lost`. Returns what to ask of
        another engine, whose stream is to be fed in next; None if there is no such thing."""
        ...

    def broken(self, why: str) -> bytes | None:
        """The answer cannot be completed. Returns its last event; None: it is no stream of events, and only
        cutting the connection can tell the client."""
        ...


class Passage:
    """See the module's rules and `Way`. events: it is a stream of events. must_end: with `[DONE]`."""

    lost = ""

    def __init__(self, *, events: bool, must_end: bool) -> None:
        self._events, self._must_end = events, events and must_end
        self._held = b""
        self._tail = b""
        self.begun = False

    @property
    def done(self) -> bool:
        return self._must_end and _complete(self._tail)

    def feed(self, data: bytes) -> bytes:
        if not self._events:
            self.begun = True
            return data
        if self._held:
            data, self._held = self._held + data, b""
        if not data.endswith(ENDS):
            cut = max(data.rfind(end) + len(end) if end in data else 0 for end in ENDS)
            if len(data) - cut <= MOST_HELD:
                data, self._held = data[:cut], data[cut:]
        if data:
            self._tail = data[-TAIL:]
            if not self.begun:  # comments keep a connection alive and are no answer
                self.begun = data.startswith(b"data") or b"\ndata" in data
        return data

    def ended(self) -> bytes | None:
        rest, self._held = self._held, b""
        if self._must_end and not _complete(self._tail + rest):
            return None
        self._tail += rest
        return rest

    def continuation(self) -> None:
        return None

    def broken(self, why: str) -> bytes | None:
        inside = self._tail != b"" and not self._tail.endswith(ENDS)
        return lost_event(why, inside=inside) if self._events else None


def _complete(tail: bytes) -> bool:
    """Whether a stream that ends so is complete, or has ended with an error."""
    return DONE.search(tail) is not None or b'"error"' in tail


def lost_event(why: str, *, inside: bool) -> bytes:
    """The error event that ends an answer which cannot be completed. inside: the client has a part of an
    event, which ends here."""
    error = ApiError(502, f"{why}; the answer is not complete", code="worker_lost")
    return (b"\n\n" if inside else b"") + b"data: " + to_json(error.body()) + b"\n\n"
