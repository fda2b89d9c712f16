"""The reference attention against a naive one, token by token, on scattered pages and mixed batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hotprefix.engine.batch import Batch
from hotprefix.engine.model.attention import paged_attention

HEADS, KV_HEADS, DIM = 6, 2, 8


def make_batch(requests: list[tuple[int, int]], page: int, pages: int) -> Batch:
    """requests: (context length, new tokens). Every request gets pages of its own in random order."""
    free = torch.randperm(pages, generator=torch.Generator().manual_seed(3)).tolist()
    longest = max(context for context, _ in requests)
    table = np.full((len(requests), -(-longest // page)), -1, dtype=np.int32)
    positions, slots, bounds = [], [], [0]
    for r, (context, new) in enumerate(requests):
        own = [free.pop() for _ in range(-(-context // page))]
        table[r, : len(own)] = own
        positions += list(range(context - new, context))
        slots += [own[p // page] * page + p % page for p in range(context - new, context)]
        bounds.append(len(positions))
    return Batch(
        token_ids=torch.zeros(len(positions), dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        slots=torch.tensor(slots),
        query_starts=torch.tensor(bounds, dtype=torch.int32),
        context_lens=torch.tensor([context for context, _ in requests], dtype=torch.int32),
        page_table=torch.from_numpy(table),
        logit_rows=torch.tensor(bounds[1:]) - 1,
        page_size=page,
        max_query_len=max(new for _, new in requests),
        max_context_len=longest,
    )


def naive(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    batch: Batch,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    out = torch.empty_like(q)
    for r in range(batch.requests):
        for row in range(batch.query_bounds[r], batch.query_bounds[r + 1]):
            p = int(batch.positions[row])
            seen = range(0 if window is None else max(0, p - window + 1), p + 1)
            at = [int(batch.page_table[r, j // batch.page_size]) * batch.page_size + j % batch.page_size
                  for j in seen]  # fmt: skip
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                weights = (k_pool[at, kv] @ q[row, head] * scale).softmax(0)
                out[row, head] = weights @ v_pool[at, kv]
    return out


CASES = {
    "one token": [(1, 1)],
    "decodes of odd lengths": [(1, 1), (17, 1), (16, 1), (33, 1)],
    "fresh prefill": [(19, 19)],
    "chunk on a context": [(40, 7)],
    "mixed": [(9, 1), (30, 30), (50, 1), (21, 5), (32, 16)],
}


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("name", CASES)
def test_equals_naive(name: str, page: int, window: int | None) -> None:
    torch.manual_seed(0)
    pages = 200 if page == 1 else 64
    batch = make_batch(CASES[name], page, pages)
    q = torch.randn(batch.tokens, HEADS, DIM)
    k_pool, v_pool = torch.randn(2, pages * page, KV_HEADS, DIM).unbind(0)
    got = paged_attention(q, k_pool, v_pool, batch, 0.3, window)
    torch.testing.assert_close(got, naive(q, k_pool, v_pool, batch, 0.3, window), atol=2e-6, rtol=1e-5)


def test_nothing_is_read_outside_a_requests_own_context() -> None:
    """All other pages of the pool are NaN: memory that was never written is never read (rule 8)."""
    torch.manual_seed(0)
    batch = make_batch(CASES["mixed"], 4, 64)
    pools = torch.full((2, 64 * 4, KV_HEADS, DIM), torch.nan)
    for r in range(batch.requests):
        own = batch.context_slots[r, : batch.contexts[r]]
        pools[:, own] = torch.randn(2, len(own), KV_HEADS, DIM)
    out = paged_attention(torch.randn(batch.tokens, HEADS, DIM), pools[0], pools[1], batch, 0.3, None)
    assert bool(out.isfinite().all())
