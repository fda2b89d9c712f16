"""One request's mutable state inside the kernel. Owns: `Sequence` and its phases.

Rules: `known` tokens, `length` of them, are the prompt and what was sampled (`last` is the last of them);
the first `computed` have KV. What remains is computed in chunks; the chunk that reaches the end of `known`
samples. So prefill, decode and re-computation after a retraction are one rule, not three. The first
`shared` pages of the table are the tree's (protected by `handle`), the rest are owned by this sequence
alone.
"""

from __future__ import annotations

from enum import Enum

from hotprefix.errors import ProtocolError
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.cache.node import Match, Node
from hotprefix.kernel.request import Request
from hotprefix.kernel.sources import Taken


class Phase(Enum):
    WAITING = "waiting"
    PARKED = "parked"
    RUNNING = "running"
    ENDED = "ended"


class Sequence:
    """See the module's rules. `target` is the number of known tokens at admission: what lies below it
    is prefill. taken: tokens from the cache since the last commit. cached: effective reuse,
    of positions it had never reached before; host and storage are the parts of it that came from
    L2 and L3. seen: L1's publications when it arrived. held: the step since which it waits for pages that
    others' steps make. saved: leading pages whose copy in L2 was seen to. fetch: the L3 fetch it waits for;
    asked: L2's publications when it began to wait for one. highest: most positions ever reached;
    recomputed: positions below it that were computed again.
    shut: with which match, room given back and reserve it was found not to fit.
    usable: what of `memo` all layer groups can go on from, with what it was derived from. windows: per
    layer group, the first page index its window covers. started: whether a chunk was planned since its last
    admission. place: grows from admission to admission, so that the running batch is in its order. since,
    due: while it cruises (cruise.py), from and to which clock. private: the cache was flushed since its
    admission, so nothing more of it is shared.
    Times are the driver's clock, seconds."""

    __slots__ = (
        "aborted", "arrival", "asked", "cached", "computed", "computed_total", "dirty_from", "due",
        "executed", "failures", "fetch", "fetch_decided", "handle", "held", "highest", "host", "last",
        "length", "matched_at_enqueue", "memo", "outputs", "overtaken", "phase", "place", "private",
        "recomputed", "request", "retractions", "said", "saved", "seen", "serial", "shared", "shut", "since",
        "slot", "started", "storage", "suspect_until", "table", "taken", "target", "target_key", "usable",
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
        self.slot = -1
        self.place = 0
        self.started = False
        self.private = False
        self.since: int | None = None
        self.due = 0
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
        """The handle of a running sequence."""
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
        """Leading tokens that may come from the cache: one is always computed, for its logits."""
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
        """What identifies positions [start, stop) in the cache."""
        return _cut(self.request.key, self.said, start * tk.TOKEN_BYTES, stop * tk.TOKEN_BYTES)

    def key_at(self, start: int, stop: int) -> tuple[bytes, int]:
        """As `key`, but within a longer one, and the byte where it begins there: a prompt's is not copied."""
        if stop * tk.TOKEN_BYTES <= len(self.request.key):
            return self.request.key, start * tk.TOKEN_BYTES
        return self.key(start, stop), 0

    def append(self, sampled: int | bytes) -> int:
        """One sampled token, or several, become known; the last, returned, has no KV yet (rule 9)."""
        words = sampled if isinstance(sampled, bytes) else tk.word(sampled)
        self.said += words
        count = len(words) // tk.TOKEN_BYTES
        self.length += count
        self.outputs += count
        self.last = words if count == 1 else words[-tk.TOKEN_BYTES :]
        return tk.last(self.last)

    def restart(self) -> None:
        """Back to waiting with everything known so far as the new prefill target."""
        self.phase = Phase.WAITING
        self.target = self.length
        self.target_key = self.request.key + self.said
        self.computed = 0
        self.table = []
        self.shared = 0
        self.handle = None
        self.slot = -1
        self.private = False
        self.dirty_from = 0
        self.memo = self.usable = self.shut = None
        self.saved = 0
        self.taken = []
        self.held = None


def _cut(prompt: bytes, said: bytearray, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a prompt and what follows it; a long prompt is never copied to be added to."""
    end = len(prompt)
    if stop <= end:
        return prompt[start:stop]
    if start >= end:
        return bytes(said[start - end : stop - end])
    return prompt[start:] + said[: stop - end]
