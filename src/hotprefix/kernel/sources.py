"""Where each token of a request came from. Owns: `Source`, `Taken`, `Use`, and `used`, the one function that
counts reuse, computation and retention.

Rules:
1. A position counts once per request: as reused or as computed, when a step that ran reaches it for the first
   time. What a retracted request takes or computes again below that is work done again, never reuse.
2. A reused token has one final source. It depends on where its page was when the step was planned in which
   the request took it:
   - the device, if the page was in L1 or was computed by another request of that very step;
   - the host, if the page was copied to L1 in that step (or in one for whose end the request had to wait),
     for this request or for another;
   - storage, if it was copied so, and had come to the host from L3 while this request waited for a fetch, its
     own or a shared one.
3. The arrival's hit is what L1 held of a prompt when its request arrived: the first `hit` tokens. At first
   use they are split. *Retained* are those whose very pages (the same page and publication) are still there.
   The others were lost: they are *regained* (in L1 again, computed or restored for other requests),
   *restored*
   from host or storage, or *recomputed* by the request itself. These five parts add up to the part of the hit
   that the request has reached.

Example: L1 held 64 tokens when the request arrived. When it starts, 32 of them are still there, 16 come from
L2 and 16 are computed: retained 32, restored_host 16, recomputed 16.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class Source(StrEnum):
    """DEVICE: L1. HOST: L2. STORAGE: L3."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class Taken(NamedTuple):
    """Tokens [start, stop) that a request takes from the cache. same: they lie in the very pages that L1 held
    of its prompt when it arrived."""

    start: int
    stop: int
    source: Source
    same: bool = False


class Use(NamedTuple):
    """What one chunk of prefill, and what was taken before it, came to; tokens, each once.

    device, host, storage: tokens reused, by final source.
    prompt, outputs: positions computed, of the prompt and of what was sampled before a retraction.
    again_prompt, again_outputs: those of them that the request had had before.
    retained, regained, restored_host, restored_storage, recomputed: the parts of the arrival's hit.
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
        """The part of the arrival's hit that L1 did not keep."""
        return self.regained + self.restored_host + self.restored_storage + self.recomputed


def used(taken: Iterable[Taken], start: int, stop: int, reached: int, prompt: int, hit: int) -> Use:
    """What a chunk that computes positions [start, stop) came to, with what was taken before it.

    taken: what the request took from the cache since its last chunk.
    reached: how many leading positions the request has had before.
    prompt: the prompt's length.
    hit: the length of the arrival's hit.
    """
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
