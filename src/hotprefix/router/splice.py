"""One answer out of several streams. Owns: `Splice`, which stands between the engines that make a streamed
answer and the client that reads it.

Rules:
1. It does no I/O: bytes of the engine's stream go in, the client's bytes come out.
2. Marks (server/resume.py) are taken out; every other byte goes to the client as it came. An event is passed
   on when it is complete, so none is cut and none is sent twice.
3. After a failure `continuation` says what to ask of another engine. Its stream is fed in like the first one,
   and goes on with the event behind the last that the client has. Id, date, model and counts are the first
   engine's, because the engine that goes on is told them.
4. A stream without marks (of a server of another kind, or of an engine without the internal key) passes
   through byte for byte, complete events or not, and cannot be taken up.
5. Memory is bounded: the request's body, an incomplete event of at most MOST_EVENT_BYTES, and MOST_IDS ids.
   A longer event passes through as it comes. Beyond either limit the answer cannot be taken up.

An answer that is not streamed needs none of this: the client has nothing of it, so its request is repeated as
it is. The same holds as long as `begun` is false.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from hotprefix.server.errors import ApiError
from hotprefix.server.resume import LOST, MARK, RESUME_PATH

MOST_EVENT_BYTES = 16 * 1024 * 1024
MOST_IDS = 1 << 20
_END = b"\n\n"
_DONE = b"data: [DONE]\n\n"
_ERROR = b'data: {"error":'


class Continuation(NamedTuple):
    """What to ask of the engine that goes on: POST `body` to `path`, as JSON, with the internal key and the
    headers of the client's request that the first engine got."""

    path: str
    body: bytes


@dataclass(slots=True)
class _Sent:
    """What the client has of one choice; see `resume.SoFar`."""

    ids: array[int] = field(default_factory=lambda: array("q"))
    events: int = 0
    cached: Sequence[int] = (0, 0, 0)
    ended: bool = False


class Splice:
    """One answer. path, body: the client's request.

    begun: the client was given bytes.
    marked: the current stream has marks. Its end is complete only if `done`; of another stream, HTTP tells.
    lost: nothing good comes of the current stream any more: its engine says so, or it makes no sense.
    done: the answer is complete, or has ended with an error that the client was given.
    """

    def __init__(self, path: str, body: bytes) -> None:
        self.begun = self.marked = self.lost = self.done = False
        self._path, self._body = path, body
        self._head: dict[str, Any] | None = None
        self._sent: dict[int, _Sent] = {}
        self._ids = 0
        self._rest = bytearray()
        self._searched = 0
        self._fresh = True  # it is not known yet whether the current stream has marks
        self._counts = b""  # the event with the counts, until the stream ends
        self._of_choice = False  # a mark says that the event belongs to a choice
        self._inside = False  # the beginning of an incomplete event has been passed on
        self._limits_kept = True

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the current stream, cut anywhere. Returns the client's bytes."""
        if self.lost or self.done:
            return b""
        if self._fresh or self.marked:
            self._rest += data
            data = self._taken()
        self.begun = self.begun or bool(data)
        return data

    def continuation(self) -> Continuation | None:
        """The current stream has failed: it broke off, or is `lost`. Returns what to ask of another engine,
        whose stream is to be fed in next; None if the answer is complete or cannot be taken up."""
        if self.done or self._head is None or not self._limits_kept:
            return None
        self.marked = self.lost = False
        self._fresh, self._searched = True, 0
        self._rest.clear()
        choices = [
            {"index": index, "ids": one.ids.tolist(), "events": one.events, "cached": one.cached,
             "ended": one.ended}
            for index, one in sorted(self._sent.items())
        ]  # fmt: skip
        told = to_json({"path": self._path, "head": self._head, "choices": choices})
        return Continuation(RESUME_PATH, told[:-1] + b',"body":' + self._body + b"}")

    def give_up(self, message: str, code: str = "worker_lost") -> bytes:
        """The answer cannot be completed. Returns the error event that ends it."""
        cut = self.begun and (self._inside or not (self.marked or self._fresh))
        self.done = self.begun = True
        event = b"data: " + to_json(ApiError(502, message, code=code).body()) + _END
        return _END + event if cut else event

    # -- events -----------------------------------------------------------------------------------

    def _taken(self) -> bytes:
        """The client's part of what was read, as far as it is complete."""
        if self._fresh and not self._known():
            return b""
        if not self.marked:
            return self._all_but(0)
        found: list[bytes] = []
        start = 0
        while not (self.lost or self.done):
            end = self._rest.find(_END, max(start, self._searched))
            if end < 0:
                break
            end += len(_END)
            event = bytes(self._rest[start:end])
            found.append(event if self._inside else self._event(event))
            self._inside, start = False, end
        del self._rest[:start]
        self._searched = max(0, len(self._rest) - 1)  # the end's first byte may have come
        if self._inside:
            found.append(self._all_but(1))  # it may be the first byte of the event's end
        elif len(self._rest) > MOST_EVENT_BYTES:
            found.append(self._unmarked(self._all_but(1)))
            self._inside, self._limits_kept = True, False
        return b"".join(found)

    def _known(self) -> bool:
        """Whether the first bytes of a stream tell that it has marks, or that it has none."""
        start = bytes(self._rest[: len(MARK)])
        if len(start) < len(MARK) and MARK.startswith(start):
            return False
        self._fresh, self.marked = False, start == MARK
        self.lost = not self.marked and self._head is not None  # no answer of an engine that goes on
        return not self.lost

    def _all_but(self, last: int) -> bytes:
        """Take what was read, except for the last bytes."""
        cut = max(0, len(self._rest) - last)
        self._searched = 0
        data = bytes(self._rest[:cut])
        del self._rest[:cut]
        return data

    def _event(self, event: bytes) -> bytes:
        """A complete event, or comment, with its marks. Returns the client's part; nothing if it is lost. The
        event with the counts belongs to no choice, so it waits for the one that ends the stream."""
        self._of_choice = False
        shown = self._unmarked(event)
        if self.lost:
            return b""
        self.done = shown == _DONE or shown.startswith(_ERROR)
        if self.done:
            return self._counts + shown
        if not self._of_choice and shown.startswith(b"data:"):
            self._counts = shown
            return b""
        return shown

    def _unmarked(self, data: bytes) -> bytes:
        """Note the marks with which the bytes begin. Returns the bytes behind them."""
        while data.startswith(MARK):
            line, _, data = data.partition(b"\n")
            try:
                self._note(from_json(line[len(MARK) :]))
            except (ValueError, TypeError, OverflowError):
                self.lost = True
        return data

    def _note(self, mark: Any) -> None:
        """Raises ValueError, TypeError or OverflowError for what is no mark."""
        if mark == LOST:
            self.lost = True
            return
        if isinstance(mark, dict):
            self._head = self._head or mark
            return
        self._of_choice = True
        if self._limits_kept:
            index, ended, ids, cached = mark
            new = array("q", ids)
            sent = self._sent.setdefault(index, _Sent())
            sent.ids += new
            sent.events += 1
            sent.cached, sent.ended = cached, ended
            self._ids += len(new)
            if self._ids + len(self._sent) > MOST_IDS:
                self._limits_kept = False
                self._sent.clear()
