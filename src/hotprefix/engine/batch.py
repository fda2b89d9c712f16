"""One forward pass as arrays. Owns: `Batch`, the flattened form of a step plan.

Rules: frozen; built once per step, read by every layer. Requests are packed one after another, each
contributing the new positions of its chunk; nothing here knows why a token is computed (prefill and
decode look alike). Every slot in `slots` is distinct: no KV position is written twice in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """T new tokens of R requests, L rows whose logits are wanted. All tensors are contiguous and on
    the model's device.

    token_ids int32[T]. positions int32[T]: place in the request's text. slots int64[T]: where each
    token's KV is written, page * page_size + offset. query_starts int32[R + 1]: request r owns rows
    [query_starts[r], query_starts[r + 1]). context_lens int32[R]: positions visible to the request's
    last new token, that token included. page_table int32[R, max_pages]: page of each page index;
    entries past a request's context are undefined and never read. logit_rows int64[L], rows of [0, T).
    page_size, max_query_len, max_context_len: host-side copies that kernels need for their loops.
    windows: the same step as each layer group sees it: `slots` and `page_table` name its frames, and what
    lies before a request's window names a page of zeros, which may be loaded though it never counts.
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
        """The step as a layer sees it (`KVPool.group_of`)."""
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
        """int64[R, max_context_len]: pool slot of every context position of every request. Past a
        request's own context its last position is repeated: padding never reads another's KV."""
        offsets = torch.arange(self.max_context_len, device=self.page_table.device)
        positions = torch.minimum(offsets, self.context_lens[:, None].long() - 1)
        pages = self.page_table.long().gather(1, positions // self.page_size)
        return pages * self.page_size + positions % self.page_size
