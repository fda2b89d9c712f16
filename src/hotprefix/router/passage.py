"""The way of an answer's bytes. Owns: `Passage`: which bytes the client gets, and how a broken stream ends.

Rules:
1. Bytes are passed on as they are. Of a stream of events only the last, if it is not complete, waits for its
   end; so a stream that breaks never leaves half an event before the error.
2. A stream never ends in silence: if it breaks, or ends without `[DONE]` where that belongs, an error event
   is its last one.

Sans-I/O. `splice` has the same methods and goes on elsewhere instead.
"""

from __future__ import annotations

from typing import Final

from pydantic_core import to_json

from hotprefix.server.errors import ApiError

MOST_HELD: Final = 1 << 20
ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
TAIL: Final = 256


class Passage:
    """One answer. events: it is a stream of events. done: which ends with `[DONE]`.

    begun: a first event with data has come; of another answer, a first byte.
    """

    def __init__(self, *, events: bool, done: bool) -> None:
        self._events, self._done = events, events and done
        self._held = b""
        self._tail = b""
        self.begun = False

    def feed(self, data: bytes) -> bytes:
        """Bytes from the worker. Returns those for the client."""
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

    def ended(self) -> bytes:
        """The worker's answer has ended. Returns what the client gets as its end."""
        rest, self._held = self._held, b""
        tail = self._tail + rest
        if not self._done or b"[DONE]" in tail or b'"error"' in tail:
            return rest
        return rest + (b"\n\n" if rest else b"") + self._error("the worker ended the stream before its end")

    def broken(self, why: str) -> bytes | None:
        """The answer broke off. Returns its last event; None: it is no stream of events, and only cutting the
        connection can tell the client."""
        return self._error(why) if self._events else None

    def _error(self, why: str) -> bytes:
        error = ApiError(502, f"{why}; the answer is not complete", code="worker_lost")
        return b"data: " + to_json(error.body()) + b"\n\n"
