"""Where each token of a request came from. Owns: `Source`, `Taken`, `Use`, and `used`, the one function that
counts reuse, computation and retention.

Rules:
- A position counts once per request: when a step that ran reaches it for the first time, as reused or as
  computed. What a retracted request takes or computes again below that is work done again, never reuse.
- A reused token has one final source, by where its page was when the step was planned in which the request
  took it. In L1, or computed by another request of that very step: the device. Copied to L1 in that step, for
  this request or for another (or in one whose end the request had to wait for): the host; and storage, if
  the page came to the host from there while this request waited for a fetch, its own or a shared one.
- The arrival's hit is what L1 held of a prompt when its request arrived: the first `hit` tokens. Those whose
  very pages (the page and its publication) are still there at first use are retained, the others were lost:
  regained (in L1 again, because others computed or restored them meanwhile), restored from host or storage,
  or recomputed by the request itself. The five parts of a hit add up to what of it has been reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class Source(StrEnum):
    """L1, L2, L3."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class Taken(NamedTuple):
    """Tokens [start, stop) that a request takes from the cache. same: from the very pages that L1 held of its
    prompt when it arrived."""

    start: int
    stop: int
    source: Source
    same: bool = False


class Use(NamedTuple):
    """What one chunk of prefill, and what was taken before it, came to; tokens, each once.

    device, host, storage: reused, by final source. prompt, outputs: positions computed, of the prompt and of
    what was sampled before a retraction; again_prompt, again_outputs: those of them that the request had had
    before. retained, regained, restored_host, restored_storage, recomputed: parts of the arrival's hit.
    """

    device: int = 0
    host: int = 0
    storage: int = 0
    prompt: int = 0
    outputs: int = 0
    again_prompt: int = 0
    again_outputs: int = 0
    retained: int = 0
    regained: int = 0
    restored_host: int = 0
    restored_storage: int = 0
    recomputed: int = 0

    @property
    def reused(self) -> int:
        return self.device + self.host + self.storage

    @property
    def again(self) -> int:
        return self.again_prompt + self.again_outputs

    @property
    def lost(self) -> int:
        """Of the arrival's hit, what L1 did not keep."""
        return self.regained + self.restored_host + self.restored_storage + self.recomputed


def used(taken: Iterable[Taken], start: int, stop: int, reached: int, prompt: int, hit: int) -> Use:
    """A chunk computes positions [start, stop), behind what was `taken` since the request's last chunk.
    reached: positions that it has had before; prompt: its length; hit: of the arrival."""
    device = host = storage = retained = regained = lost_host = lost_storage = 0
    for part in taken:
        first = max(part.start, reached)
        tokens = max(0, part.stop - first)
        of_hit = max(0, min(part.stop, hit) - first)
        if part.source is Source.STORAGE:
            storage += tokens
            lost_storage += of_hit
        elif part.source is Source.HOST:
            host += tokens
            lost_host += of_hit
        else:
            device += tokens
            if part.same:
                retained += of_hit
            else:
                regained += of_hit
    inside = max(0, min(stop, prompt) - start)
    again = max(0, min(stop, reached) - start)
    again_inside = max(0, min(stop, reached, prompt) - start)
    recomputed = max(0, min(stop, hit) - max(start, reached))
    return Use(
        device, host, storage, inside, stop - start - inside, again_inside, again - again_inside, retained,
        regained, lost_host, lost_storage, recomputed,
    )  # fmt: skip
