"""Pages on their way to the store. Owns: `PutQueue`, bounded in bytes.

Rules: no threads in here; its owner holds a lock around every call. A page is queued or being written
at most once at a time. The queue holds the only reference that counts: payloads are immutable bytes, so
what is written is what was given, whatever happens to the page it came from (handed case 107).
"""

from __future__ import annotations

from hotprefix.engine.stores.errors import Reason


class PutQueue:
    """First in, first out. size: bytes queued or being written."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._waiting: dict[bytes, bytes] = {}
        self._writing: dict[bytes, bytes] = {}
        self.size = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._writing)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def holds(self, key: bytes) -> bool:
        return key in self._waiting or key in self._writing

    def offer(self, key: bytes, payload: bytes) -> Reason | None:
        """Queue a page that is not held yet; the reason where there is no room."""
        if self.size + len(payload) > self._limit:
            return Reason.BUSY
        self._waiting[key] = payload
        self.size += len(payload)
        return None

    def take(self) -> tuple[bytes, bytes]:
        """The oldest waiting page, now being written, until `done`."""
        key = next(iter(self._waiting))
        payload = self._writing[key] = self._waiting.pop(key)
        return key, payload

    def done(self, key: bytes) -> None:
        self.size -= len(self._writing.pop(key))

    def clear(self) -> int:
        """Drop what waits; how many pages that were."""
        dropped = len(self._waiting)
        self.size -= sum(map(len, self._waiting.values()))
        self._waiting.clear()
        return dropped
