"""Paged attention in plain torch. Owns: the reference that native kernels must agree with.

Rules: no loop over pages or tokens; KV is gathered by slot index (the row of a position in the KV pool). All
requests with one new token go through one padded call; a longer chunk gets a call of its own, so that padding
never makes a whole batch as long as its longest chunk. Padding repeats a request's own last position and is
masked.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hotprefix.engine.batch import Batch


def paged_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: Batch, scale: float, window: int | None
) -> Tensor:
    """See `Ops.attention`. q [T, H, D], pools [pages*P, K, D] -> [T, H, D]."""
    out = torch.empty_like(q)
    bounds = batch.query_bounds
    singles = [r for r in range(batch.requests) if bounds[r + 1] - bounds[r] == 1]
    if singles:
        _decode(q, k_pool, v_pool, batch, scale, window, singles, out)
    for r in range(batch.requests):
        if bounds[r + 1] - bounds[r] > 1:
            _chunk(q, k_pool, v_pool, batch, scale, window, r, out)
    return out


def _decode(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: Batch, scale: float, window: int | None,
    requests: list[int], out: Tensor,
) -> None:  # fmt: skip
    """One new token per request: q heads grouped by kv head, KV padded to the longest context."""
    rows = torch.tensor([batch.query_bounds[r] for r in requests], device=q.device)
    which = torch.tensor(requests, device=q.device)
    longest = max(batch.contexts[r] for r in requests)
    slots = batch.context_slots[which, :longest]
    lens = batch.context_lens[which].long()
    n, (kv_heads, head_dim) = len(requests), k_pool.shape[1:]
    k = k_pool.index_select(0, slots.flatten()).view(n, longest, kv_heads, head_dim).transpose(1, 2)
    v = v_pool.index_select(0, slots.flatten()).view(n, longest, kv_heads, head_dim).transpose(1, 2)
    grouped = q.index_select(0, rows).view(n, kv_heads, -1, head_dim)
    position = torch.arange(longest, device=q.device)
    mask = position < lens[:, None]
    if window is not None:
        mask &= position >= lens[:, None] - window
    attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask[:, None, None, :], scale=scale)
    out.index_copy_(0, rows, attended.reshape(n, -1, head_dim))


def _chunk(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: Batch, scale: float, window: int | None,
    request: int, out: Tensor,
) -> None:  # fmt: skip
    """Many new tokens of one request against its whole context."""
    first, last = batch.query_bounds[request], batch.query_bounds[request + 1]
    context = batch.contexts[request]
    slots = batch.context_slots[request, :context]
    k = k_pool.index_select(0, slots).transpose(0, 1)[None]
    v = v_pool.index_select(0, slots).transpose(0, 1)[None]
    queries = q[first:last].transpose(0, 1)[None]
    fresh = context == last - first and window is None
    mask = None if fresh else _causal_mask(context, last - first, window, q.device)
    attended = F.scaled_dot_product_attention(
        queries, k, v, attn_mask=mask, is_causal=fresh, scale=scale, enable_gqa=k.shape[1] != queries.shape[1]
    )
    out[first:last] = attended[0].transpose(0, 1)


def _causal_mask(context: int, new: int, window: int | None, device: torch.device) -> Tensor:
    """bool[new, context]: what each of the last `new` positions sees."""
    keys = torch.arange(context, device=device)
    queries = torch.arange(context - new, context, device=device)[:, None]
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)
