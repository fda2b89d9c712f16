"""One forward pass as arrays. Owns: `Batch`, the flattened form of a step plan.

Rules: a batch is frozen; it is built once per step and read by every layer. Requests are packed one after
another, each with the new positions of its chunk. Nothing here knows why a token is computed: prefill and
decode look alike. The entries of `slots` are distinct, so no KV position is written twice in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """T new tokens of R requests, and the L rows whose logits are wanted. All tensors are contiguous and on
    the model's device.

    token_ids: int32[T].
    positions: int32[T], the token's place in its request's text.
    slots: int64[T], where the token's KV is written: page * page_size + offset.
    query_starts: int32[R + 1]; request r owns rows [query_starts[r], query_starts[r + 1]).
    context_lens: int32[R], how many positions the request's last new token sees, itself included.
    page_table: int32[R, max_pages], the page of each page index. Entries past a request's context are
    undefined and never read.
    logit_rows: int64[L], rows of [0, T).
    page_size, max_query_len, max_context_len: on the host, because kernels need them for their loops.
    windows: the same step as each layer group sees it. There `slots` and `page_table` name the group's
    frames; whatever lies before a request's window names a page of zeros, which may be loaded but has no
    effect.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    context_lens: Tensor
    page_table: Tensor
    logit_rows: Tensor
    page_size: int
    max_query_len: int
    max_context_len: int
    windows: tuple[Batch, ...] = ()

    @property
    def tokens(self) -> int:
        """T."""
        return self.token_ids.shape[0]

    @property
    def requests(self) -> int:
        """R."""
        return self.context_lens.shape[0]

    def of_layer(self, group_of: Sequence[int], layer: int) -> Batch:
        """The step as a layer sees it. group_of: see `KVPool`."""
        place = group_of[layer] if group_of else 0
        return self.windows[place - 1] if place else self

    @cached_property
    def query_bounds(self) -> list[int]:
        """`query_starts` as Python ints, length R + 1."""
        return self.query_starts.tolist()

    @cached_property
    def contexts(self) -> list[int]:
        """`context_lens` as Python ints, length R."""
        return self.context_lens.tolist()

    @cached_property
    def context_slots(self) -> Tensor:
        """int64[R, max_context_len]: the pool slot of every context position of every request. Behind the end
        of a request's own context its last position is repeated, so padding never reads another request's
        KV."""
        offsets = torch.arange(self.max_context_len, device=self.page_table.device)
        positions = torch.minimum(offsets, self.context_lens[:, None].long() - 1)
        pages = self.page_table.long().gather(1, positions // self.page_size)
        return pages * self.page_size + positions % self.page_size
