"""One request's mutable state inside the kernel. Owns: `Sequence` and its phases.

Rules:
1. The known tokens are the prompt and what was sampled; there are `length` of them. The first `computed` have
   KV. The rest is computed in chunks, and the chunk that reaches the end of the known tokens samples the
   next. So prefill, decode and computing again after a retraction are one rule, not three.
2. The first `shared` pages of the table are the tree's, protected by `handle`. The other pages are owned by
   this sequence alone.

Example: pages of 16, a prompt of 40 tokens, 32 of them found in the tree. At admission `length` = `target` =
40, `computed` = 32, `shared` = 2. The first chunk computes positions 32 to 39 in an owned page and samples:
`length` = 41, `computed` = 40. From then on each step computes one position.
"""

from __future__ import annotations

from enum import Enum

from hotprefix.errors import ProtocolError
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.cache.node import Match, Node
from hotprefix.kernel.request import Request
from hotprefix.kernel.sources import Taken


# WAITING: in the queue. PARKED: outside the queue, behind its flight's leader. RUNNING: admitted. ENDED: its
# last progress has been made; the kernel forgets it.
class Phase(Enum):
    WAITING = "waiting"
    PARKED = "parked"
    RUNNING = "running"
    ENDED = "ended"


class Sequence:
    """See the module's rules. Times are the driver's clock, in seconds; counts are tokens unless said.

    Identity:
    request: what was submitted.
    serial: grows from submission to submission; the order of arrival.
    arrival: when it was submitted.

    Progress:
    phase: see `Phase`.
    said: the sampled tokens, int32 bytes.
    outputs: how many these are.
    last: the last known token, 4 bytes.
    length: known tokens, the prompt and `said`.
    target: known tokens when it was queued last (the prompt, or more after a retraction); positions below it
    are prefill.
    target_key: what identifies the target in the cache, 4 bytes a token.
    computed: leading positions that have KV in its table, computed or taken from the cache.
    computed_total: positions computed for it so far, those computed again included.
    highest: the most positions it has ever reached.
    recomputed: positions below `highest` that were computed again.
    started: whether a chunk was planned since its last admission.
    executed: whether a prefill step of it has run.
    aborted: an abort came while it was in the step in flight; it ends with that step's commit.

    Cache:
    table: page ids in the order of its positions.
    shared: how many leading pages of the table are the tree's.
    handle: the node that its persistent pin protects; None unless it runs.
    dirty_from: index of the first page of the table that no chunk has told the executor yet.
    windows: for each layer group, the index of the first page that its window holds.
    private: the cache was flushed since its admission, so no further page of it is shared.
    memo: the match that was found last; None before the first lookup.
    usable: (the longest match, the windows' changes then, as much of that match as every layer group can go
    on from); None unless there are layer groups.
    matched_at_enqueue: tokens that L1 held of its prompt when it arrived.
    seen: L1's count of publications when it arrived; pages published later were not part of that hit.
    taken: what it took from the cache since its last prefill chunk was committed.
    cached: tokens reused, each position once (effective reuse).

    Tiers:
    host: the part of `cached` whose final source is L2.
    storage: the part of `cached` whose final source is L3.
    saved: leading pages for which a copy in L2 has been arranged.
    fetch: the number of the L3 fetch that it waits for; None if it waits for none.
    fetch_decided: it need not be decided (again) whether to fetch for it.
    asked: L2's count of publications when it joined a fetch; None if it never did.

    Scheduling:
    row: its row in the batch, -1 unless it runs.
    held: the step since which it waits for pages that other requests' steps compute; None if it does not.
    shut: (match, rooms given back, reserve's share) when it last failed to fit. While all three are unchanged
    it need not be tried again. None if nothing is known.
    overtaken: how often a later request was admitted before it.
    retractions: how often it was retracted.
    failures: how many steps of it have failed since it last got past a failure.
    suspect_until: the position past which a suspect of a failed step is trusted again.
    """

    __slots__ = (
        "aborted",
        "arrival",
        "asked",
        "cached",
        "computed",
        "computed_total",
        "dirty_from",
        "executed",
        "failures",
        "fetch",
        "fetch_decided",
        "handle",
        "held",
        "highest",
        "host",
        "last",
        "length",
        "matched_at_enqueue",
        "memo",
        "outputs",
        "overtaken",
        "phase",
        "private",
        "recomputed",
        "request",
        "retractions",
        "row",
        "said",
        "saved",
        "seen",
        "serial",
        "shared",
        "shut",
        "started",
        "storage",
        "suspect_until",
        "table",
        "taken",
        "target",
        "target_key",
        "usable",
        "windows",
    )  # fmt: skip

    def __init__(self, request: Request, serial: int, arrival: float) -> None:
        self.request = request
        self.serial = serial
        self.arrival = arrival
        self.phase = Phase.WAITING
        self.said = bytearray()
        self.length = request.prompt_len
        self.last = request.tokens[-tk.TOKEN_BYTES :]
        self.target = request.prompt_len
        self.target_key = request.key
        self.computed = 0
        self.outputs = 0
        self.table: list[int] = []
        self.shared = 0
        self.handle: Node | None = None
        self.row = -1
        self.started = False
        self.private = False
        self.dirty_from = 0
        self.memo: Match | None = None
        self.shut: tuple[Match, tuple[int, int], float] | None = None
        self.usable: tuple[Match, int, Match | None] | None = None
        self.windows: list[int] = []
        self.overtaken = 0
        self.retractions = 0
        self.failures = 0
        self.suspect_until = 0
        self.aborted = False
        self.executed = False
        self.taken: list[Taken] = []
        self.cached = 0
        self.computed_total = 0
        self.recomputed = 0
        self.highest = 0
        self.matched_at_enqueue = 0
        self.seen = 0
        self.held: int | None = None
        self.fetch: int | None = None
        self.fetch_decided = False
        self.asked: int | None = None
        self.host = 0
        self.saved = 0
        self.storage = 0

    @property
    def pin(self) -> Node:
        """The node that a running sequence's pin protects. Raises ProtocolError if it has none."""
        if self.handle is None:
            raise ProtocolError(f"request {self.request.id} holds no pin")
        return self.handle

    @property
    def remaining(self) -> int:
        """Known tokens without KV; 1 in the decode phase."""
        return self.length - self.computed

    @property
    def outputs_left(self) -> int:
        return self.request.max_tokens - self.outputs

    @property
    def prefilling(self) -> bool:
        return self.computed < self.target

    @property
    def reuse_limit(self) -> int:
        """Leading tokens that may come from the cache. The last one is always computed, because its logits
        are needed (rule 10)."""
        limits = (self.target - 1, self.request.reuse_limit, self.request.share_limit)
        return min(limit for limit in limits if limit is not None)

    @property
    def publish_limit(self) -> int:
        """Leading computed tokens that may be published."""
        limit = self.share_limit
        return self.computed if limit is None else min(self.computed, limit)

    @property
    def share_limit(self) -> int | None:
        """Leading tokens that may be shared, None = all."""
        return 0 if self.private else self.request.share_limit

    @property
    def owned(self) -> list[int]:
        return self.table[self.shared :]

    def known(self, start: int, stop: int) -> bytes:
        """The tokens of positions [start, stop)."""
        return _cut(self.request.tokens, self.said, start * tk.TOKEN_BYTES, stop * tk.TOKEN_BYTES)

    def key(self, start: int, stop: int) -> bytes:
        """The bytes that identify positions [start, stop) in the cache, 4 a token."""
        return _cut(self.request.key, self.said, start * tk.TOKEN_BYTES, stop * tk.TOKEN_BYTES)

    def key_at(self, start: int, stop: int) -> tuple[bytes, int]:
        """(bytes, begin): the key of positions [start, stop) is found in `bytes` from byte `begin` on. A key
        inside the prompt is not copied: `bytes` is then the whole prompt's."""
        if stop * tk.TOKEN_BYTES <= len(self.request.key):
            return self.request.key, start * tk.TOKEN_BYTES
        return self.key(start, stop), 0

    def append(self, sampled: bytes) -> None:
        """Make sampled tokens known, given as int32 bytes. The last of them has no KV yet (rule 9)."""
        self.said += sampled
        count = len(sampled) // tk.TOKEN_BYTES
        self.length += count
        self.outputs += count
        self.last = sampled if count == 1 else sampled[-tk.TOKEN_BYTES :]

    def restart(self) -> None:
        """Wait again, with everything known so far as the new prefill target."""
        self.phase = Phase.WAITING
        self.target = self.length
        self.target_key = self.request.key + self.said
        self.computed = 0
        self.table = []
        self.shared = 0
        self.handle = None
        self.row = -1
        self.private = False
        self.dirty_from = 0
        self.memo = self.usable = self.shut = None
        self.saved = 0
        self.taken = []
        self.held = None


def _cut(prompt: bytes, said: bytearray, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of `prompt + said`, without building that sum: a prompt may be long."""
    end = len(prompt)
    if stop <= end:
        return prompt[start:stop]
    if start >= end:
        return bytes(said[start - end : stop - end])
    return prompt[start:] + said[: stop - end]
