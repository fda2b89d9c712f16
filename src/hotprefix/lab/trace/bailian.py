"""Alibaba's Qwen-Bailian usage traces. Owns: the importer for `chat_id`, `parent_chat_id`, `timestamp`,
`input_length`, `output_length`, `hash_ids` lines.

Rules (KVCache in the Wild, ATC'25): timestamps are in seconds. Blocks have 16 tokens and are hashed each on
its own, so a block of ours is named by (the block before it, its hash). Closed loop: a chat follows the one
that it names as its parent; if the parent is -1 or is not in the file, the chat begins a session.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import numpy as np
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from hotprefix.lab.trace.line_fields import MAX_BLOCK, STRICT, Outputs, Stamp, Tokens, check_blocks
from hotprefix.lab.trace.timestamps import Clock
from hotprefix.lab.trace.trace_request import Blocks, TraceRequest

BLOCK_SIZE: Final = 16
ROOT: Final = -1
NOTES: Final = (
    "blocks: the file's hash_ids, each together with all before it, numbered anew",
    "answers: their blocks are not recorded, so nothing of an answer is reused before it was a prompt",
    "sessions: by parent_chat_id; a chat whose parent is not in the file begins one",
    "think times: from the parent's arrival, as its end is not recorded; so they hold its service time too",
)


@dataclass(config=STRICT, slots=True)
class _Line:
    chat_id: Annotated[int, Field(ge=0)]
    parent_chat_id: Annotated[int, Field(ge=ROOT)]
    timestamp: Stamp
    input_length: Tokens
    output_length: Outputs
    hash_ids: list[Annotated[int, Field(ge=0)]]


_LINE: Final = TypeAdapter(_Line)


class Bailian:
    """Importer for one reading. block_size: tokens."""

    def __init__(self, block_size: int, clock: Clock) -> None:
        self._block_size, self._clock = block_size, clock
        self._chats: dict[int, tuple[str, float]] = {}
        self._unseen: set[int] = set()
        self._blocks: dict[tuple[int, int], int] = {}

    def take(self, line: int, raw: bytes) -> Sequence[TraceRequest]:
        row = _LINE.validate_json(raw)
        check_blocks("hash_ids", len(row.hash_ids), row.input_length, self._block_size)
        if row.chat_id in self._chats:
            raise ValueError(f"chat_id: {row.chat_id} stands twice")
        if row.chat_id in self._unseen:
            raise ValueError(
                f"chat_id: {row.chat_id} was named as a parent by an earlier line; sort the file by timestamp"
            )
        arrival = self._clock.seconds(row.timestamp, "timestamp")
        parent = self._chats.get(row.parent_chat_id)
        if parent is not None and arrival < parent[1]:
            raise ValueError(f"timestamp: {row.timestamp} is before that of chat {row.parent_chat_id}")
        if parent is None and row.parent_chat_id != ROOT:
            self._unseen.add(row.parent_chat_id)
        begun_by = row.chat_id if row.parent_chat_id == ROOT else row.parent_chat_id
        session = str(begun_by) if parent is None else parent[0]
        blocks = self._chained(row.hash_ids)
        self._chats[row.chat_id] = session, arrival
        request = TraceRequest(
            id=str(row.chat_id),
            input_length=row.input_length,
            output_length=row.output_length,
            blocks=blocks,
            arrival_s=arrival,
            session=session,
            parent=None if parent is None else str(row.parent_chat_id),
            think_s=None if parent is None else arrival - parent[1],
        )
        return (request,)

    def _chained(self, hashes: list[int]) -> Blocks:
        ids, known, last = [], self._blocks, -1
        for name in hashes:
            last = known.setdefault((last, name), len(known))
            ids.append(last)
        if len(known) > MAX_BLOCK:
            raise ValueError("hash_ids: more than 2^30 distinct blocks")
        return np.array(ids, dtype=np.int32)
