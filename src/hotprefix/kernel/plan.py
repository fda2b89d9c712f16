"""What the kernel hands out and takes back. Owns: the frozen records at the kernel's edge.

Rules: a driver executes a `StepPlan` and answers with one `StepOutcome`; it decides nothing about
pages. Chunks appear decodes first. Everything is comparable by value, so two drivers' plans can be
compared with `==` (the parity test). A decode about which nothing is to be decided costs nothing but its
place in a count, until a driver asks for its chunk (`Chunks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, overload

from hotprefix.errors import ProtocolError
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.request import RequestId

UNBOUNDED = 1 << 30  # repeats of a plan, where nothing sets an end to them


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Chunk(NamedTuple):
    """Positions [start, start + n) of one request to compute in this step; n = len(tokens) / 4.

    slot: row in [0, max_running) that is this request's while it runs. table: page ids from page
    index `table_from` on; entries before it are as in this slot's earlier chunks (an admission has
    table_from 0). The table covers exactly the positions up to the chunk's end. samples: the last
    position's logits are wanted and one token is to be sampled. prefill: positions below the prompt's
    (or, after a retraction, the known text's) end.
    """

    request: RequestId
    slot: int
    start: int
    tokens: bytes
    table_from: int
    table: tuple[int, ...]
    samples: bool
    prefill: bool

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens) // 4


class Chunks(Sequence[Chunk]):
    """A step's chunks, decodes first. written: those that the kernel wrote out, the first
    `leading` of them among the decodes. inside: how many more there
    are, all decodes that neither need nor complete a page; `reach` is the sum of their starts. A driver that
    looks at each chunk has them all written then, once; they stay what they were planned to be."""

    __slots__ = ("_all", "_merge", "inside", "leading", "reach", "written")

    def __init__(
        self,
        written: tuple[Chunk, ...] = (),
        inside: int = 0,
        reach: int = 0,
        leading: int = 0,
        merge: Callable[[], tuple[Chunk, ...]] | None = None,
    ) -> None:
        """merge: writes all chunks out, in order; None where `written` is all."""
        self.written, self.inside, self.reach, self.leading = written, inside, reach, leading
        self._merge = merge
        self._all = written if merge is None else None

    @property
    def all(self) -> tuple[Chunk, ...]:
        if self._all is None and self._merge is not None:
            self._all, self._merge = self._merge(), None
        return self._all or ()

    def __len__(self) -> int:
        return len(self.written) + self.inside

    def __bool__(self) -> bool:
        return self.inside > 0 or bool(self.written)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.all)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, index: int | slice) -> Chunk | tuple[Chunk, ...]:
        return self.all[index]

    def __eq__(self, other: object) -> bool:
        return self.all == tuple(other) if isinstance(other, Chunks | tuple) else NotImplemented

    def __repr__(self) -> str:
        return repr(self.all)


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that starts running in this step. cached: leading tokens taken from the cache."""

    request: RequestId
    slot: int
    cached: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Nothing could run though requests wait: the numbers that say why (pages)."""

    head: RequestId
    need: int
    free: int
    evictable: int
    protected: int
    owned: int
    capacity: int


class Hindrance(StrEnum):
    """Why the head of the queue does not start. retry: the requests of a failed step run alone first. rows:
    the running batch is full. storage: it waits for its pages from L3. step: it waits for pages that the
    step in flight computes. pages, frames: it does not fit. budget: it fits, and starts as soon as a step
    has tokens left for it."""

    RETRY = "retry"
    ROWS = "rows"
    STORAGE = "storage"
    STEP = "step"
    PAGES = "pages"
    FRAMES = "frames"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True)
class Head:
    """The waiting request that is tried first, and why it does not start though others may; pages. It fits if
    need - shared + owed <= free + evictable. need: what it will hold at the end of its reserved outputs.
    shared: the part of that which others protect already. owed: what running requests lack of theirs.
    waited: seconds since it arrived."""

    request: RequestId
    hindrance: Hindrance
    waited: float
    need: int
    shared: int
    owed: int
    free: int
    evictable: int
    protected: int
    owned: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Queue:
    """The waiting requests at a moment. oldest: seconds since the arrival of the first of those that were
    never admitted; head: the one that is tried first; both None where there is none."""

    oldest: float | None
    head: Head | None


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy one page's KV of every layer between L1 and L2 (which way: by the field it stands in)."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PageFrame:
    """From this step on, layer group `group` has `page` in `frame` of its own pool. Chunks' tables name
    pages; a group reads and writes each in the frame it was given last. Pages before a chunk's window
    have none that may be read."""

    group: int
    page: int
    frame: int


@dataclass(frozen=True, slots=True)
class StorePage:
    """Write one L2 page to L3 under its key, in the background. Its bytes are to be read out before the
    plan's copies run: the page may be given to another prefix by then (rule 35). parent: the key of
    the page before it, None for the first page of a prefix."""

    key: bytes
    page: int
    parent: bytes | None = None


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read pages from L3 in the background; answer with `Kernel.transfer_done`. request: the first that
    wants them."""

    id: int
    keys: tuple[bytes, ...]
    request: RequestId = ""


class StepPlan(NamedTuple):
    """One step. In this order: note `frames`, start `fetches`, give up `cancels`, read out `stores` (from
    L2), copy `saves` (L1 to L2), copy `restores` (L2 to L1), run `chunks` as one forward pass, mark each
    chain of `touches` (page keys, root first) as just used in L3. An `empty` plan has nothing to execute and
    is not committed; its fetches, cancels and touches are to be carried out all the same.

    repeat: how many times in all the forward pass may be run before the next plan, each time for the position
    after the last and the token sampled there: so long nothing would be decided in between. 1 unless
    every chunk is a decode. A driver may stop after any number of times; one that runs once is right."""

    step: int
    chunks: Chunks = Chunks()
    admissions: tuple[Admission, ...] = ()
    retracted: tuple[RequestId, ...] = ()
    stall: Stall | None = None
    fetches: tuple[Fetch, ...] = ()
    cancels: tuple[int, ...] = ()
    stores: tuple[StorePage, ...] = ()
    saves: tuple[Copy, ...] = ()
    restores: tuple[Copy, ...] = ()
    touches: tuple[tuple[bytes, ...], ...] = ()
    repeat: int = 1
    frames: tuple[PageFrame, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.chunks or self.stores or self.saves or self.restores)

    @property
    def batched_tokens(self) -> int:
        return sum(len(c.tokens) for c in self.chunks.written) // 4 + self.chunks.inside


@dataclass(frozen=True, slots=True)
class Transcript:
    """Tokens that a driver knows beforehand, or keeps. read(request, first, count): the request's sampled
    tokens [first, first + count), int32 bytes; asked for when the kernel needs them."""

    read: Callable[[RequestId, int, int], bytes]


Sampled = Mapping[RequestId, int | bytes] | Transcript


def said(sampled: Sampled, request: RequestId, first: int, count: int) -> bytes:
    """The `count` tokens that a step sampled for a request that had said `first` before. Raises ProtocolError
    where a transcript has them not."""
    if isinstance(sampled, Transcript):
        words = sampled.read(request, first, count)
        if len(words) != count * tk.TOKEN_BYTES:
            raise ProtocolError(f"request {request}: {count} tokens from {first} on, not {tk.count(words)}")
        return words
    token = sampled[request]
    return token if isinstance(token, bytes) else tk.word(token)


class StepOutcome(NamedTuple):
    """What came of a plan. ok: the forward pass ran, `repeats` times. sampled: for each chunk with
    `samples` one token, or where repeats > 1 that many, int32 bytes. stopped: requests whose last
    sampled token ended them (end of sequence, stop string).
    restore_s: seconds the plan's restores took, 0 where there were none or nobody measured.
    failed: requests whose forward pass ran but for which no token could be sampled, and why. They end
    with that error; their KV is good, and the others of the step keep their tokens."""

    ok: bool = True
    sampled: Sampled = MappingProxyType({})
    stopped: frozenset[RequestId] = frozenset()
    error: str | None = None
    restore_s: float = 0.0
    repeats: int = 1
    failed: Mapping[RequestId, str] = MappingProxyType({})


class Progress(NamedTuple):
    """What one request gained from a commit (or an abort). token: the last sampled token, None where the
    step only prefilled or the request ended without one. cached: prompt tokens first reused
    (effective reuse, counted once), of which host and storage came from L2 and L3 (the rest from L1).
    computed: positions computed for it so far, of which recomputed a second time. outputs: tokens sampled for
    it so far. finish: set exactly once per request. said: all sampled tokens, int32 bytes, with `finish`."""

    request: RequestId
    token: int | None
    finish: Finish | None
    cached: int
    computed: int
    error: str | None = None
    host: int = 0
    storage: int = 0
    recomputed: int = 0
    outputs: int = 0
    said: bytes = b""
