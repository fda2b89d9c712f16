"""Writing the event log. Owns: `EventLog`, its queue, its thread and its parts.

Rules:
1. `put` never waits, neither for the disk nor for anything else. If the queue is full, the record is dropped
   and counted, and a `dropped` record tells where.
2. One thread turns records into lines and writes them.
3. A part that has grown to the limit is closed and the next one begun; each begins with a header. A part that
   exists is never written to again, so a restarted engine continues beside the parts of the one before it.
4. A disk that fails ends the log, not the engine.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hotprefix.kernel.events import Event
from hotprefix.records.of_event import of_event
from hotprefix.records.parts import Part, next_number, open_part, part_path
from hotprefix.records.schema import Dropped, Opening, Record

log = logging.getLogger(__name__)

QUEUE = 65536
FLUSH_S = 0.25
BATCH = 4096
PART_BYTES = 256 * 2**20
Item = Record | Event | Callable[[], Record]


class EventLog:
    """A log being written. Its items are records, kernel events, or functions that make a record; the latter
    two become records on the log's thread. Raises ConfigError if no part can be opened.

    path: ends with .jsonl or .parquet.
    header: the header of every part; `part` is filled in here.
    part_bytes: the size at which the next part begins.
    queue: how many items may wait to be written.
    written, dropped: how many records were written, and dropped.
    failed: why the log has ended; None if it has not.
    """

    def __init__(
        self, path: Path, header: Opening, *, part_bytes: int = PART_BYTES, queue: int = QUEUE
    ) -> None:
        self._path, self._header, self._part_bytes = path, header, part_bytes
        self._limit = queue
        self._items: deque[Item] = deque()
        self._number = next_number(path)
        self._part: Part | None = self._open()
        self._wake = threading.Event()
        self._closing = False
        self._missing = 0
        self.written = 0
        self.dropped = 0
        self.failed: str | None = None
        self._thread = threading.Thread(target=self._run, name="hotprefix-events", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Queue an item to be written, or drop it if the queue is full or the log has ended."""
        if len(self._items) >= self._limit or self.failed is not None:
            self.dropped += 1
            self._missing += 1
            return
        if self._missing and isinstance(item, Event | Record):
            missing, self._missing = self._missing, 0
            at = item.now if isinstance(item, Event) else item.t
            self._items.append(Dropped(t=at, count=missing))
        self._items.append(item)
        if len(self._items) == BATCH:
            self._wake.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued and end the thread. Waits for that at most `timeout_s`."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._closing and not self._items):
                self._wake.wait(FLUSH_S)
                self._wake.clear()
                while self._items:
                    self._write(self._take())
        except OSError as error:
            self.failed = f"{self._path}: {error}"
            self.dropped += len(self._items)
            self._items.clear()
            log.error("the event log ends: %s", self.failed)
        finally:
            if self._part is not None:
                self._part.close()

    def _take(self) -> list[Record]:
        found: list[Record] = []
        while self._items and len(found) < BATCH:
            item = self._items.popleft()
            if isinstance(item, Event):
                found.append(of_event(item))
            else:
                found.append(item if isinstance(item, Record) else item())
        return found

    def _write(self, records: Sequence[Record]) -> None:
        assert self._part is not None
        if self._part.bytes >= self._part_bytes:
            self._part.close()
            self._number += 1
            self._part = self._open()
        self._part.write(records)
        self.written += len(records)

    def _open(self) -> Part:
        header = replace(self._header, part=self._number)
        return open_part(part_path(self._path, self._number), header)
