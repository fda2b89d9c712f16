"""One answer out of several streams. Owns: `Splice`, which stands between the engines that make a streamed
answer and the client that reads it.

Rules:
1. It does no I/O: bytes of the engine's stream go in, the client's bytes come out.
2. Marks (server/resume.py) are taken out; every other byte goes to the client as it came. An event is passed
   on when it is complete, so none is cut and none is sent twice.
3. After a failure `continuation` says what to ask of another engine. Its stream is fed in like the first one,
   and goes on with the event behind the last that the client has. Id, date, model and counts are the first
   engine's, because the engine that goes on is told them.
4. A stream without marks (of a server of another kind, or of an engine without the internal key) goes the
   way of an answer that one worker makes (passage), and cannot be taken up.
5. Memory is bounded: the request's body, an incomplete event of at most MOST_EVENT_BYTES, and MOST_IDS ids.
   A longer event passes through as it comes. Beyond either limit the answer cannot be taken up.

An answer that is not streamed needs none of this: the client has nothing of it, so its request is repeated as
it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json, to_json

from hotprefix.router.passage import GARBAGE, GAVE_UP, Continuation, Passage, lost_event
from hotprefix.server.resume import LOST, MARK, RESUME_PATH

MOST_EVENT_BYTES = 16 * 1024 * 1024
MOST_IDS = 1 << 20
_END = b"\n\n"
_DONE = b"data: [DONE]\n\n"
_ERROR = b'data: {"error":'


@dataclass(slots=True)
class _Sent:
    """What the client has of one choice; see `resume.SoFar`."""

    ids: array[int] = field(default_factory=lambda: array("q"))
    events: int = 0
    cached: Sequence[int] = (0, 0, 0)
    ended: bool = False


class Splice:
    """One answer, and a `Way`. path, body: the client's request.

    marked: the present stream has marks.
    lost: GAVE_UP, its engine says so; GARBAGE, it makes no sense.
    """

    def __init__(self, path: str, body: bytes) -> None:
        self.marked = False
        self.lost = ""
        self._begun = self._done = False
        self._plain: Passage | None = None  # the way of a first stream without marks
        self._path, self._body = path, body
        self._head: dict[str, Any] | None = None
        self._sent: dict[int, _Sent] = {}
        self._ids = 0
        self._rest = bytearray()
        self._searched = 0
        self._resumed = False  # the present stream goes on with an answer
        self._fresh = True  # it is not known yet whether the present stream has marks
        self._counts = b""  # the event with the counts, until the stream ends
        self._of_choice = False  # a mark says that the event belongs to a choice
        self._inside = False  # the beginning of an incomplete event has been passed on
        self._limits_kept = True

    @property
    def begun(self) -> bool:
        return self._begun if self._plain is None else self._plain.begun

    @property
    def done(self) -> bool:
        return self._done if self._plain is None else self._plain.done

    def feed(self, data: bytes) -> bytes:
        """Bytes of the present stream, cut anywhere. Returns the client's."""
        if self._plain is not None:
            return self._plain.feed(data)
        if self.lost or self._done:
            return b""
        self._rest += data
        return self._taken()

    def ended(self) -> bytes | None:
        if self._plain is not None:
            return self._plain.ended()
        return b"" if self._done else None

    def continuation(self) -> Continuation | None:
        if self._done or self._head is None or not self._limits_kept:
            return None
        self.marked = self._begun = False
        self.lost = ""
        self._fresh, self._searched = True, 0
        self._rest.clear()
        self._counts, self._resumed = b"", True
        choices = [
            {"index": index, "ids": one.ids.tolist(), "events": one.events, "cached": one.cached,
             "ended": one.ended}
            for index, one in sorted(self._sent.items())
        ]  # fmt: skip
        told = to_json({"path": self._path, "head": self._head, "choices": choices})
        return Continuation(RESUME_PATH, told[:-1] + b',"body":' + self._body + b"}", self._ids)

    def broken(self, why: str) -> bytes | None:
        if self._plain is not None:
            return self._plain.broken(why)
        self._done = True
        return lost_event(why, inside=self._inside)

    # -- events -----------------------------------------------------------------------------------

    def _taken(self) -> bytes:
        """The client's part of what was read, as far as it is complete."""
        if self._fresh and not self._known():
            return b""
        if self._plain is not None:
            return self._plain.feed(self._all_but(0))
        found: list[bytes] = []
        start = 0
        while not (self.lost or self._done):
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
        if not self.marked and self._head is None:
            self._plain = Passage(events=True, must_end=True)
        elif not self.marked:
            self.lost = GARBAGE  # no answer of an engine that goes on
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
        error = shown.startswith(_ERROR)
        if error and self._resumed and not self._begun:
            self.lost = GAVE_UP  # it cannot go on, and another engine may
            return b""
        self._done = error or shown == _DONE
        if self._done:
            return self._counts + shown
        if self._of_choice or shown.startswith(b":"):
            return shown
        if self._counts or not shown.startswith(b"data:"):
            self.lost = GARBAGE
        self._counts = shown
        return b""

    def _unmarked(self, data: bytes) -> bytes:
        """Note the marks with which the bytes begin. Returns the bytes behind them."""
        while data.startswith(MARK):
            line, _, data = data.partition(b"\n")
            try:
                self._note(from_json(line[len(MARK) :]))
            except (ValueError, TypeError, OverflowError):
                self.lost = GARBAGE
        return data

    def _note(self, mark: Any) -> None:
        """Raises ValueError, TypeError or OverflowError for what is no mark."""
        if mark == LOST:
            self.lost = GAVE_UP
            return
        if isinstance(mark, dict):
            self._head = self._head or mark
            return
        self._of_choice = self._begun = True
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
