"""What the kernel hands out and takes back. Owns: the frozen records at the kernel's edge.

Rules:
1. A driver executes a `StepPlan` and answers with one `StepOutcome`. It decides nothing about pages.
2. Chunks appear decodes first.
3. Everything is comparable by value, so two drivers' plans can be compared with `==` (the parity test).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from hotprefix.errors import ProtocolError
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.request import RequestId

UNBOUNDED = 1 << 30  # a number of repeats or passes to which nothing sets an end


class Finish(StrEnum):
    """Why a request ended.

    STOP: a sampled token ended it (end of sequence, or a stop string).
    LENGTH: it has all the outputs that it asked for.
    ABORT: it was aborted.
    ERROR: its steps failed too often, or no token could be sampled for it.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Chunk(NamedTuple):
    """Positions [start, start + n) of one request to compute in this step; n = len(tokens) / 4.

    row: the request's row in the batch, in [0, max_running), while it runs.
    tokens: the tokens of these positions, int32 bytes.
    table_from: index of the first page that `table` tells. The pages before it are as in this row's earlier
    chunks; the first chunk after an admission has 0.
    table: page ids from page index `table_from` on. With the earlier ones they cover exactly the positions
    up to the chunk's end.
    samples: the last position's logits are wanted, and one token is to be sampled from them.
    prefill: the chunk begins below the end of the prompt, or, after a retraction, of the text known then.
    """

    request: RequestId
    row: int
    start: int
    tokens: bytes
    table_from: int
    table: tuple[int, ...]
    samples: bool
    prefill: bool

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens) // 4


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that starts running in this step. cached: leading tokens taken from the cache."""

    request: RequestId
    row: int
    cached: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Nothing could run although requests wait: the numbers that say why, in pages.

    head: the request that is tried first.
    need: what the head will hold at the end of its reserved outputs.
    free, evictable, protected, owned: the pages of L1 by state.
    capacity: their sum.
    """

    head: RequestId
    need: int
    free: int
    evictable: int
    protected: int
    owned: int
    capacity: int


class Hindrance(StrEnum):
    """Why the head of the queue does not start.

    RETRY: the requests of a failed step run alone first.
    ROWS: the running batch is full.
    STORAGE: it waits for its pages from L3.
    STEP: it waits for pages that the step in flight computes.
    PAGES: its pages do not fit.
    FRAMES: its frames in a layer group do not fit.
    BUDGET: it fits, and starts as soon as a step has tokens left for it.
    """

    RETRY = "retry"
    ROWS = "rows"
    STORAGE = "storage"
    STEP = "step"
    PAGES = "pages"
    FRAMES = "frames"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True)
class Head:
    """The waiting request that is tried first, and why it does not start. Counts are pages. It fits if
    need - shared + owed <= free + evictable.

    hindrance: why it does not start.
    waited: seconds since it arrived.
    need: what it will hold at the end of its reserved outputs.
    shared: the part of `need` that is protected already, by other requests or by holds.
    owed: what running requests lack of what they will hold.
    free, evictable, protected, owned: the pages of L1 by state.
    capacity: their sum.
    """

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
    """The waiting requests at a moment.

    oldest: seconds since the first arrival among those that were never admitted; None if there is none.
    head: the request that is tried first; None if none waits.
    """

    oldest: float | None
    head: Head | None


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy one page's KV of every layer from page `source` to page `target`. In `StepPlan.saves` the source
    is in L1 and the target in L2, in `StepPlan.restores` the other way round."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PageFrame:
    """From this step on, layer group `group` has `page` in `frame` of its own pool.

    Chunks' tables name pages. A group reads and writes each page in the frame that the page was given last. A
    page before a chunk's window has no frame that may be read.
    """

    group: int
    page: int
    frame: int


@dataclass(frozen=True, slots=True)
class StorePage:
    """Write one L2 page to L3 in the background. Its bytes must be read out before the plan's copies run,
    because these may give the page to another prefix (rule 35).

    key: the page's name in L3.
    page: the L2 page.
    parent: the key of the page before it; None for the first page of a prefix.
    """

    key: bytes
    page: int
    parent: bytes | None = None


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read pages from L3 in the background, and answer with `Kernel.transfer_done`.

    id: the fetch's number.
    keys: of the pages, in the order of the prefix.
    request: the first request that wants them.
    """

    id: int
    keys: tuple[bytes, ...]
    request: RequestId = ""


class StepPlan(NamedTuple):
    """One step. A driver carries it out in this order:
    1. note `frames`;
    2. start `fetches`, give up `cancels` (fetches by number);
    3. read out `stores` (from L2);
    4. copy `saves` (L1 to L2), then `restores` (L2 to L1);
    5. run `chunks` as one forward pass;
    6. mark each chain of `touches` (page keys, root first) as just used in L3.
    An `empty` plan has nothing to execute and is not committed; its fetches, cancels and touches are to be
    carried out all the same.

    step: the number of the planning pass.
    admissions: the requests that start running with this step.
    retracted: the requests that this pass sent back to the queue.
    stall: why nothing runs although requests wait; None if something runs or none waits.
    repeat: how many times in all the forward pass may run before the next plan. Each further run computes,
    for every request, the position after its last one, with the token that was sampled there. Nothing would
    be decided in between. It is 1 unless every chunk is a decode. A driver may stop after any of the runs.
    """

    step: int
    chunks: tuple[Chunk, ...] = ()
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


@dataclass(frozen=True, slots=True)
class Transcript:
    """Tokens that a driver knows beforehand, or keeps.

    read(request, first, count): returns the request's sampled tokens [first, first + count) as int32 bytes.
    It is called when the kernel needs them.
    """

    read: Callable[[RequestId, int, int], bytes]


Sampled = Mapping[RequestId, int | bytes] | Transcript


def said(sampled: Sampled, request: RequestId, first: int, count: int) -> bytes:
    """The `count` tokens that a step sampled for a request, as int32 bytes. first: how many tokens were
    sampled for the request before. Raises ProtocolError if the transcript lacks any of them."""
    if isinstance(sampled, Transcript):
        words = sampled.read(request, first, count)
        if len(words) != count * tk.TOKEN_BYTES:
            raise ProtocolError(f"request {request}: {count} tokens from {first} on, not {tk.count(words)}")
        return words
    token = sampled[request]
    return token if isinstance(token, bytes) else tk.word(token)


class StepOutcome(NamedTuple):
    """What came of a plan.

    ok: the forward pass ran, `repeats` times; False takes the whole step back.
    sampled: for each chunk with `samples` one token, or, if repeats > 1, as many, as int32 bytes.
    stopped: requests whose last sampled token ended them (end of sequence, stop string).
    error: why the step failed.
    restore_s: seconds that the plan's restores took; 0 if there were none or they were not measured.
    repeats: how often the forward pass ran, at most `StepPlan.repeat`.
    failed: requests whose forward pass ran but for which no token could be sampled, and why. They end with
    that error. Their KV is good, and the other requests of the step keep their tokens.
    """

    ok: bool = True
    sampled: Sampled = MappingProxyType({})
    stopped: frozenset[RequestId] = frozenset()
    error: str | None = None
    restore_s: float = 0.0
    repeats: int = 1
    failed: Mapping[RequestId, str] = MappingProxyType({})


class Progress(NamedTuple):
    """What one request gained from a commit, or from an abort.

    token: the last sampled token; None if the step only prefilled, or the request ended without one.
    finish: why it ended; set exactly once per request, in its last progress.
    cached: tokens that it has reused so far, each once (effective reuse).
    computed: positions computed for it so far.
    error: why it failed; None unless `finish` is ERROR.
    host, storage: the parts of `cached` that came from L2 and from L3; the rest came from L1.
    recomputed: the part of `computed` that was computed a second time.
    outputs: tokens sampled for it so far.
    said: all its sampled tokens, int32 bytes; empty unless `finish` is set.
    """

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
