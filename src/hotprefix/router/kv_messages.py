"""Messages of KV events, read with suspicion. Owns: from a message's frames to a numbered batch, checked so
far that nothing behind it can fail.

Rules: a message that is not right is refused as a whole, with a `BadMessage` that says why. Its number is
missing then, which is a gap like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hotprefix.errors import InputError
from hotprefix.records.kvevents import END
from hotprefix.records.kvwire import Batch, PageEvent, Removed, Stored, from_wire

MESSAGE_BYTES = 32 * 1024 * 1024
MOST_PAGE = 1 << 20
MOST_GROUP = 64
HASH_BYTES = 64
NUMBER_BYTES = 8
_WRONG = (InputError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)

_decode = msgspec.msgpack.Decoder().decode


class BadMessage(Exception):
    """A message that is no batch of KV events. kind: one of a few words. detail: what was wrong."""

    def __init__(self, kind: str, detail: object) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


class Message(NamedTuple):
    """A batch and its number."""

    number: int
    batch: Batch

    @property
    def weight(self) -> int:
        """Token ids and hashes in it, for bounds on memory."""
        sizes = (len(e.hashes) + (len(e.tokens) if isinstance(e, Stored) else 0) for e in self._told())
        return sum(sizes)

    def _told(self) -> Iterator[Stored | Removed]:
        return (event for event in self.batch.events if isinstance(event, Stored | Removed))


def read_live(frames: Sequence[bytes]) -> Message:
    """A published message: topic, number, batch. Raises BadMessage."""
    if len(frames) != 3:
        raise BadMessage("frames", f"{len(frames)} frames, not topic, number and batch")
    return _message(frames[1], frames[2])


def read_replayed(frames: Sequence[bytes]) -> Message | None:
    """One message of a replay's answer; None = its end. Raises BadMessage. Earlier engines left the topic
    out."""
    if len(frames) not in (3, 4) or frames[0] != b"":
        raise BadMessage("frames", f"{len(frames)} frames, not an empty one, topic, number and batch")
    return None if frames[-2] == END else _message(frames[-2], frames[-1])


def _message(number: bytes, payload: bytes) -> Message:
    if len(number) != NUMBER_BYTES:
        raise BadMessage("number", f"a number of {len(number)} bytes, not {NUMBER_BYTES}")
    if len(payload) > MESSAGE_BYTES:
        raise BadMessage("size", f"{len(payload)} bytes, at most {MESSAGE_BYTES} are read")
    try:
        batch = from_wire(_decode(payload))
    except msgspec.DecodeError as error:
        raise BadMessage("msgpack", error) from None
    except _WRONG as error:
        raise BadMessage("batch", error) from None
    if not math.isfinite(batch.ts):
        raise BadMessage("batch", f"its time is {batch.ts}")
    for event in batch.events:
        _check(event)
    return Message(int.from_bytes(number, "big"), batch)


def _check(event: PageEvent) -> None:
    if not isinstance(event, Stored | Removed):
        return
    hashes = event.hashes
    if not all(map(_is_hash, hashes)):
        raise BadMessage("event", f"block hashes {hashes[:3]}: numbers or bytes are expected")
    if event.medium is not None and not isinstance(event.medium, str):
        raise BadMessage("event", f"medium {event.medium!r}: a name is expected")
    if type(event.group) is not int or not 0 <= event.group < MOST_GROUP:
        raise BadMessage("event", f"group {event.group!r}: 0 to {MOST_GROUP - 1} are expected")
    if isinstance(event, Stored):
        _check_stored(event)


def _check_stored(event: Stored) -> None:
    if not (event.parent is None or _is_hash(event.parent)):
        raise BadMessage("event", f"parent hash {event.parent!r}: a number or bytes are expected")
    if not (event.adapter is None or isinstance(event.adapter, str)):
        raise BadMessage("event", f"adapter {event.adapter!r}: a name is expected")
    if not (event.adapter_id is None or type(event.adapter_id) is int):
        raise BadMessage("event", f"adapter number {event.adapter_id!r}: a number is expected")
    if event.extra and len(event.extra) != len(event.hashes):
        raise BadMessage("event", f"{len(event.extra)} extra keys for {len(event.hashes)} blocks")
    if type(event.page_size) is not int or not 0 <= event.page_size <= MOST_PAGE:
        raise BadMessage("event", f"a block size of {event.page_size!r}")
    if not event.tokens:
        return
    if len(event.tokens) != len(event.hashes) * event.page_size:
        count, size = len(event.hashes), event.page_size
        raise BadMessage("event", f"{len(event.tokens)} token ids in {count} blocks of {size}")
    if not _are_ids(event.tokens):
        raise BadMessage("event", "token ids are whole numbers from 0 to 4294967295")


def _is_hash(value: Any) -> bool:
    return type(value) is int or (isinstance(value, bytes) and len(value) <= HASH_BYTES)


def _are_ids(tokens: tuple[Any, ...]) -> bool:
    try:
        ids = np.asarray(tokens)
    except _WRONG:
        return False
    return ids.ndim == 1 and ids.dtype.kind in "iu" and int(ids.min()) >= 0 and int(ids.max()) < 1 << 32
