"""Which fetch waits for which page of the store. Owns: `FetchBook`, the bookkeeping behind the worker's
reads.

Rules: no threads, no clock and no store in here; the owner holds a lock around every call.
1. A page is read once for all the fetches that want it (single flight). The end of one fetch never takes a
   page from another.
2. A fetch ends exactly once, with the leading run of its pages that arrived. `take` gives it out, unless it
   was cancelled.
3. Host memory is bounded. A read reserves one page from its creation until no fetch holds it, and for as long
   as a thread may still be filling it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from hotprefix.engine.stores.errors import Reason
from hotprefix.errors import ProtocolError

FetchId = int | str


@dataclass(frozen=True, slots=True)
class Fetched:
    """How one fetch ended.

    payloads: the pages of its leading run of keys that arrived, verified.
    reason: why the run ended before the last key; None if all keys arrived.
    seconds: from submission to the end.
    """

    id: FetchId
    payloads: tuple[bytes, ...]
    reason: Reason | None
    seconds: float

    @property
    def bytes(self) -> int:
        return sum(map(len, self.payloads))


class _State(Enum):
    QUEUED = auto()
    READING = auto()
    DONE = auto()
    FAILED = auto()


class Read:
    """One page that is queued or being read. owner: the fetch that asked for it first."""

    __slots__ = ("key", "owner", "payload", "reason", "state", "waiters")

    def __init__(self, key: bytes, owner: FetchId) -> None:
        self.key = key
        self.owner = owner
        self.state = _State.QUEUED
        self.payload = b""
        self.reason: Reason | None = None
        self.waiters: dict[FetchId, _Fetch] = {}


class _Fetch:
    """A fetch that has not ended.

    ready: how many of its leading reads have arrived.
    limit: why `reads` is shorter than what was asked for; None if it is not.
    """

    __slots__ = ("deadline", "ended", "id", "limit", "reads", "ready", "reason", "started")

    def __init__(self, fetch_id: FetchId, now: float, timeout_s: float) -> None:
        self.id = fetch_id
        self.started = now
        self.deadline = now + timeout_s
        self.reads: list[Read] = []
        self.ready = 0
        self.limit: Reason | None = None
        self.reason: Reason | None = None
        self.ended = now


class FetchBook:
    """See the module's rules. room: how many pages may be reserved. shared, late: as in `StoreStats`."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._active: dict[FetchId, _Fetch] = {}
        self._ended: dict[FetchId, _Fetch] = {}
        self._reads: dict[bytes, Read] = {}
        self._queue: OrderedDict[Read, None] = OrderedDict()
        self.reserved = 0
        self.shared = 0
        self.late = 0

    @property
    def queued(self) -> int:
        """How many pages wait for a thread."""
        return len(self._queue)

    @property
    def active(self) -> int:
        """How many fetches have not ended."""
        return len(self._active)

    @property
    def has_ended(self) -> bool:
        return bool(self._ended)

    def next_deadline(self) -> float | None:
        """The earliest time at which a fetch runs out of time; None if no fetch is active."""
        return min((fetch.deadline for fetch in self._active.values()), default=None)

    # -- fetches ----------------------------------------------------------------------------------

    def add(
        self, fetch_id: FetchId, keys: Sequence[bytes], now: float, timeout_s: float, refused: Reason | None
    ) -> None:
        """Begin a fetch. It takes as many leading keys as there is room for; if that is not all of them, it
        ends behind those with the reason busy. refused: take no key, for this reason. Raises ProtocolError if
        the id is in use."""
        if fetch_id in self._active or fetch_id in self._ended:
            raise ProtocolError(f"fetch {fetch_id!r} is in use: poll or cancel it first")
        fetch = self._active[fetch_id] = _Fetch(fetch_id, now, timeout_s)
        fetch.limit = refused
        for key in keys if refused is None else ():
            read = self._join(key, fetch_id)
            if read is None:
                fetch.limit = Reason.BUSY
                break
            read.waiters[fetch_id] = fetch
            fetch.reads.append(read)
        self._advance(fetch, now)

    def _join(self, key: bytes, fetch_id: FetchId) -> Read | None:
        read = self._reads.get(key)
        if read is not None:
            self.shared += fetch_id not in read.waiters
            return read
        if self.reserved >= self._room:
            return None
        self.reserved += 1
        read = self._reads[key] = Read(key, fetch_id)
        self._queue[read] = None
        return read

    def stop(self, fetch_id: FetchId, now: float) -> None:
        """End a fetch with the pages that have arrived by now. Unknown or ended ids are ignored."""
        if (fetch := self._active.get(fetch_id)) is not None:
            self._end(fetch, Reason.STOPPED, now)

    def cancel(self, fetch_id: FetchId) -> bool:
        """Forget a fetch: `take` will never return it. False: the id is unknown."""
        fetch = self._active.pop(fetch_id, None) or self._ended.pop(fetch_id, None)
        if fetch is None:
            return False
        self._leave(fetch, fetch.reads)
        return True

    def expire(self, now: float) -> None:
        """End every fetch whose time is up."""
        for fetch in [q for q in self._active.values() if now >= q.deadline]:
            self._end(fetch, Reason.TIMEOUT, now)

    def end_all(self, reason: Reason, now: float) -> None:
        """End every fetch with the pages that have arrived by now."""
        for fetch in list(self._active.values()):
            self._end(fetch, reason, now)

    def take(self) -> list[tuple[Fetched, tuple[bytes, ...]]]:
        """The fetches that ended since the last call, each with the keys of its payloads."""
        taken = []
        for fetch in self._ended.values():
            payloads = tuple(read.payload for read in fetch.reads)
            keys = tuple(read.key for read in fetch.reads)
            taken.append((Fetched(fetch.id, payloads, fetch.reason, fetch.ended - fetch.started), keys))
            self._leave(fetch, fetch.reads)
        self._ended.clear()
        return taken

    def _advance(self, fetch: _Fetch, now: float) -> None:
        while fetch.ready < len(fetch.reads):
            read = fetch.reads[fetch.ready]
            if read.state is _State.FAILED:
                self._end(fetch, read.reason, now)
                return
            if read.state is not _State.DONE:
                return
            fetch.ready += 1
        self._end(fetch, fetch.limit, now)

    def _end(self, fetch: _Fetch, reason: Reason | None, now: float) -> None:
        del self._active[fetch.id]
        self._ended[fetch.id] = fetch
        fetch.reason, fetch.ended = reason, now
        rest = fetch.reads[fetch.ready :]
        del fetch.reads[fetch.ready :]
        self._leave(fetch, rest)

    def _leave(self, fetch: _Fetch, reads: Iterable[Read]) -> None:
        for read in reads:
            if read.waiters.pop(fetch.id, None) is None or read.waiters:
                continue
            if read.state is not _State.READING:
                self._release(read)

    def _release(self, read: Read) -> None:
        self.reserved -= 1
        self._queue.pop(read, None)
        self.orphan(read)

    # -- reads ------------------------------------------------------------------------------------

    def next_batch(self, limit: int) -> list[Read]:
        """Take up to `limit` queued pages that one fetch asked for. They count as being read until `settle`
        or `requeue` is called for them."""
        batch: list[Read] = []
        while self._queue and len(batch) < limit:
            read = next(iter(self._queue))
            if batch and read.owner != batch[0].owner:
                break
            del self._queue[read]
            read.state = _State.READING
            batch.append(read)
        return batch

    def settle(self, read: Read, result: bytes | Reason, now: float) -> None:
        """A read ended: with its payload, or with the reason why there is none."""
        if isinstance(result, Reason):
            read.state, read.reason = _State.FAILED, result
            self.orphan(read)
        else:
            read.state, read.payload = _State.DONE, result
            self.late += not read.waiters
        if not read.waiters:
            self._release(read)
            return
        for fetch in list(read.waiters.values()):
            if fetch.id in self._active:
                self._advance(fetch, now)

    def requeue(self, reads: Sequence[Read]) -> None:
        """These pages were not read after all: they go back to the head of the queue, or are dropped if no
        fetch waits for them."""
        for read in reversed(reads):
            read.state = _State.QUEUED
            if read.waiters:
                self._queue[read] = None
                self._queue.move_to_end(read, last=False)
            else:
                self._release(read)

    def orphan(self, read: Read) -> None:
        """Let no new fetch join this read. The fetches that wait for it go on waiting."""
        if self._reads.get(read.key) is read:
            del self._reads[read.key]
