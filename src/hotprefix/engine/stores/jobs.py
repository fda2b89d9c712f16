"""What the writing thread still has to do. Owns: `JobQueue`, its kinds of jobs and its bounds.

Rules: no threads in here; the owner holds a lock around every call. Jobs are done in the order in which they
were queued, whatever their kind: a chain's touch after the puts of its pages, a removal after the puts before
it. Puts are bounded in bytes, the other kinds in number, and a job that does not fit is refused. A page is
queued or being written at most once at a time. Payloads are immutable bytes, so what is written is what was
given, whatever happens later to the page that it was copied from (rule 35).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hotprefix.engine.stores.errors import Reason

MAX_CHORES = 1024


@dataclass(frozen=True, slots=True)
class Put:
    """Store a page. parent: the key of the page before it; None for a prefix's first page."""

    key: bytes
    parent: bytes | None
    payload: bytes


@dataclass(frozen=True, slots=True)
class Touch:
    """Mark a chain as just used."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove a page that proved unusable when it was read, if it is still unusable."""

    key: bytes


Job = Put | Touch | Discard


class JobQueue:
    """size: bytes of pages queued or being written."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._waiting: deque[Job] = deque()
        self._keys: set[bytes] = set()
        self._chores = 0
        self._running: Job | None = None
        self.size = 0

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def idle(self) -> bool:
        return not self._waiting and self._running is None

    @property
    def puts(self) -> int:
        """Pages queued or being written."""
        return len(self._keys)

    def holds(self, key: bytes) -> bool:
        return key in self._keys

    def offer(self, job: Job) -> Reason | None:
        """Queue a job. Returns None, or the reason why there is no room. A put must be of a page that is
        neither queued nor being written (see `holds`)."""
        if isinstance(job, Put):
            if self.size + len(job.payload) > self._limit:
                return Reason.BUSY
            self._keys.add(job.key)
            self.size += len(job.payload)
        elif self._chores >= MAX_CHORES:
            return Reason.BUSY
        else:
            self._chores += 1
        self._waiting.append(job)
        return None

    def take(self) -> Job:
        """Take the oldest job; it is in progress until `done` is called."""
        self._running = self._waiting.popleft()
        return self._running

    def done(self) -> None:
        """The job in progress has ended."""
        if self._running is not None:
            self._forget(self._running)
            self._running = None

    def clear(self) -> list[Job]:
        """Drop all queued jobs and return them."""
        dropped = list(self._waiting)
        self._waiting.clear()
        for job in dropped:
            self._forget(job)
        return dropped

    def _forget(self, job: Job) -> None:
        if isinstance(job, Put):
            self._keys.discard(job.key)
            self.size -= len(job.payload)
        else:
            self._chores -= 1
