"""Counts since the kernel was built. Owns: what each counter means (docs/terms.md).

Rules: each grows at exactly one place in the kernel. Lookups and hits count once per request, at its
first use of the cache, never per scheduling attempt (rules 56, 57).
"""

from __future__ import annotations

from dataclasses import dataclass

from hotprefix.kernel.sources import Use


@dataclass(slots=True)
class Counters:
    """Tokens, pages or requests, as named.

    prompt_tokens: of requests whose first prefill step ran; lookups/queried_tokens: those of these requests
    that looked the cache up (not where it is off, or where a request asked for all positions' logits), and
    their prompt tokens; hits: those of them that reused something. cached_tokens: reused, of which
    cached_host_tokens and cached_storage_tokens have L2 and L3 as final source. computed_prompt_tokens/
    computed_output_tokens: positions of prompts and of outputs computed, re-computation included.
    recomputed_tokens: of both, those that their request had had before a retraction;
    recomputed_prompt_tokens: the part of these that lies in prompts. indexed_pages/evicted_pages: into and
    out of the tree. duplicate_pages: computed though another request's copy was kept. refresh_touches:
    prefixes touched by refresh passes.

    retained_tokens/lost_waiting_tokens: tokens that L1 held of a prompt when its request arrived, and whose
    very pages it still held, or held no longer, when the request used them or computed them instead.
    lost_regained_tokens, lost_host_tokens, lost_storage_tokens, lost_recomputed_tokens: how the lost ones
    were had again; they add up to them (sources.py).
    """

    lookups: int = 0
    queried_tokens: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_host_tokens: int = 0
    cached_storage_tokens: int = 0
    computed_prompt_tokens: int = 0
    computed_output_tokens: int = 0
    recomputed_tokens: int = 0
    recomputed_prompt_tokens: int = 0
    indexed_pages: int = 0
    evicted_pages: int = 0
    flushed_pages: int = 0
    duplicate_pages: int = 0
    submitted: int = 0
    rejected: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    retractions: int = 0
    steps: int = 0
    failed_steps: int = 0
    stalls: int = 0
    refresh_passes: int = 0
    refresh_touches: int = 0
    retained_tokens: int = 0
    lost_waiting_tokens: int = 0
    lost_regained_tokens: int = 0
    lost_host_tokens: int = 0
    lost_storage_tokens: int = 0
    lost_recomputed_tokens: int = 0

    def add(self, use: Use) -> None:
        """What a chunk of prefill that ran came to."""
        self.cached_tokens += use.reused
        self.cached_host_tokens += use.host
        self.cached_storage_tokens += use.storage
        self.computed_prompt_tokens += use.prompt
        self.computed_output_tokens += use.outputs
        self.recomputed_tokens += use.again
        self.recomputed_prompt_tokens += use.again_prompt
        self.retained_tokens += use.retained
        self.lost_waiting_tokens += use.lost
        self.lost_regained_tokens += use.regained
        self.lost_host_tokens += use.restored_host
        self.lost_storage_tokens += use.restored_storage
        self.lost_recomputed_tokens += use.recomputed
