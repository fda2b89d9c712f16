"""Counts since the kernel was built. Owns: what each counter means (docs/terms.md).

Rules:
1. Each counter grows at exactly one place in the kernel.
2. Lookups and hits count once per request, at its first use of the cache, never per scheduling attempt
   (rules 56, 57).
"""

from __future__ import annotations

from dataclasses import dataclass

from hotprefix.kernel.sources import Use


@dataclass(slots=True)
class Counters:
    """Tokens, pages or requests, as named.

    lookups: requests that looked the cache up and whose first prefill step ran. A request does not look it up
    if the cache is off, or if the request asked for the logits of all positions.
    queried_tokens: the prompt tokens of these requests.
    hits: how many of these requests reused something.
    prompt_tokens: the prompt tokens of all requests whose first prefill step ran.
    cached_tokens: tokens reused.
    cached_host_tokens, cached_storage_tokens: the parts of `cached_tokens` whose final source is L2, and L3.
    computed_prompt_tokens, computed_output_tokens: positions of prompts, and of outputs, that were computed;
    what was computed again is included.
    recomputed_tokens: of both, the positions that their request had had before a retraction.
    recomputed_prompt_tokens: the part of `recomputed_tokens` that lies in prompts.
    indexed_pages: pages that came into L1's tree.
    evicted_pages, flushed_pages: pages that left it by eviction, and by a flush.
    duplicate_pages: pages computed although the tree kept another request's copy.
    submitted, rejected: requests taken, and refused, at submission.
    finished, aborted, failed: requests that ended well, by an abort, and with an error.
    retractions: how often a request was retracted.
    steps, failed_steps: forward passes, and those of them that failed.
    stalls: plans in which nothing could run although requests waited.
    refresh_passes: planning passes that refreshed waiting prefixes.
    refresh_touches: prefixes that these touched.

    The next ones split the tokens that L1 held of a prompt when its request arrived, at the moment at which
    the request used them or computed them instead (sources.py):
    retained_tokens: L1 still held their very pages.
    lost_waiting_tokens: it did not. The four below add up to these.
    lost_regained_tokens: they were in L1 again, computed or restored for another request.
    lost_host_tokens, lost_storage_tokens: they came back from L2, and from L3.
    lost_recomputed_tokens: the request computed them.
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
        """Add what one chunk of prefill that ran came to."""
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
