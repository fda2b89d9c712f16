"""Counts since the kernel was built. Owns: what each counter means (terms.md).

Rules: each grows at exactly one place in the kernel. Lookups and hits count once per request, at its
first use of the cache, never per scheduling attempt (handed cases 156, 157).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Tokens, pages or requests, as named.

    lookups/hits: requests whose first prefill step ran, and those of them that reused something.
    prompt_tokens/cached_tokens: of those requests, cached_host_tokens and cached_storage_tokens the parts
    whose final source was L2 and L3; computed_prompt_tokens: positions below the prefill
    target computed, re-computation included; recomputed_tokens: of all positions, those computed a
    second time after a retraction. indexed_pages/evicted_pages: into and out of the tree.
    duplicate_pages: computed though another request's copy was kept. refresh_touches: prefixes touched by
    refresh passes. lost_waiting_tokens: reusable from L1 at enqueue and no longer at admission, summed over
    requests (exact, never netted against what was gained meanwhile).
    """

    lookups: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_host_tokens: int = 0
    cached_storage_tokens: int = 0
    computed_prompt_tokens: int = 0
    computed_output_tokens: int = 0
    recomputed_tokens: int = 0
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
    lost_waiting_tokens: int = 0
