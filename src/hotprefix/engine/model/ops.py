"""The numeric operations under the decoder. Owns: the `Ops` protocol, which torch and native code share.

Rules: the forward pass calls only these; activations and KV pools have the model's dtype (float32 or
bfloat16), sums inside an operation run in float32, norm weights and rope tables are float32. Inputs
are contiguous unless said otherwise and are never modified unless said so; outputs are new tensors.
Shapes: T tokens, H query heads, K key/value heads (H a multiple of K), D head size, F half of gate-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hotprefix.engine.batch import Batch
from hotprefix.engine.model.weights import Blocks


@dataclass(frozen=True, slots=True)
class HeadShape:
    """heads H, kv_heads K, head_dim D of one model's attention."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def qkv_width(self) -> int:
        """Columns of the fused projection: H*D queries, then K*D keys, then K*D values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class LayerHandles:
    """One decoder layer: handles of `Ops.prepare_linear`, float32 norm weights, attention window in tokens
    (None = full), and whether q and k are rotated."""

    qkv: Any
    output: Any
    gate_up: Any
    down: Any
    input_norm: Tensor
    middle_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None
    rotates: bool


class Ops(Protocol):
    """One implementation of the decoder's arithmetic."""

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        """Take a weight [out, in] and bias [out] (both of the model's dtype) and return the handle
        `linear` wants; the implementation may repack, and the caller drops its own reference."""
        ...

    def linear(self, x: Tensor, handle: Any, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, in] -> x @ weight.T + bias, [T, out], in x's dtype; with out_dtype float32, in that
        (logits: unrounded where the implementation can, since rounding to bfloat16 makes ties)."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension: x [T, n], weight float32[n] -> [T, n]."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place (both [T, n]), then the RMS norm of the sum, [T, n]."""
        ...

    def rope_write(
        self,
        qkv: Tensor,
        shape: HeadShape,
        cos: Tensor,
        sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        k_pool: Tensor,
        v_pool: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Split qkv [T, (H + 2K) * D]; RMS-norm each head of q and k where q_norm / k_norm
        (float32[D]) are given; rotate q and k: with x = (a, b) the two halves of a head,
        (a*cos - b*sin, b*cos + a*sin), cos and sin float32[T, D/2]; write k and v to rows `slots`
        (int64[T]) of k_pool and v_pool [pages*P, K, D]. Returns q [T, H, D]. qkv may be overwritten."""
        ...

    def attention(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: Batch, scale: float, window: int | None
    ) -> Tensor:
        """Causal grouped-query attention over paged KV, `hotprefix.engine.model.attention` being the
        reference: q [T, H, D], pools [pages*P, K, D] -> [T, H, D]. A token at position p sees the
        positions j with j <= p and, where window is given, j > p - window."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2F] -> silu(gate_up[:, :F]) * gate_up[:, F:], [T, F]."""
        ...


class Stack(Protocol):
    """All of a decoder's layers behind one call."""

    def run(
        self,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: Batch,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        keep: Tensor | None = None,
        group_of: Sequence[int] = (),
    ) -> Tensor:
        """residual [T, hidden]: the embedded tokens, overwritten; keys[i] and values[i]: layer i's pool,
        written at the slots of `batch.of_layer(group_of, i)`; keep: rows whose result is wanted, int64[K]
        ascending, None = all.
        Returns the last layer's output after the final norm, [K, hidden]: the same numbers as the
        operations of `Ops` one by one."""
        ...


@runtime_checkable
class StackOps(Protocol):
    """Operations that can also run all layers in one call."""

    def prepare_layers(
        self, layers: Sequence[LayerHandles], final_norm: Tensor, shape: HeadShape, eps: float, scale: float
    ) -> Stack:
        """Raises ValueError where the layers' shapes do not fit together."""
        ...


@runtime_checkable
class BlockOps(Protocol):
    """Operations that can read a weight's quantised blocks in small steps."""

    def reads_blocks(self, form: str, dtype: torch.dtype) -> bool:
        """Whether `prepare_quantised` takes blocks of this form (GGUF's name) beside weights of this type."""
        ...

    def gains_from_blocks(self, dtype: torch.dtype) -> bool:
        """Whether that makes small steps faster here."""
        ...

    def prepare_quantised(self, weight: Tensor, bias: Tensor | None, blocks: Blocks) -> Any:
        """As `Ops.prepare_linear`, with the weight's quantised copy beside it: results are the same bits,
        whichever a step reads. Raises ValueError where the blocks do not mean exactly `weight`."""
        ...
