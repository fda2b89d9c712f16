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
    """The sizes of one model's attention: heads is H, kv_heads is K, head_dim is D."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def qkv_width(self) -> int:
        """Columns of the fused projection: H*D queries, then K*D keys, then K*D values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class LayerHandles:
    """One decoder layer.

    qkv, output, gate_up, down: handles of `Ops.prepare_linear`.
    input_norm, middle_norm: float32 norm weights.
    q_norm, k_norm: float32 norm weights [D]; None: q and k are not normed.
    window: attention window in tokens; None: full attention.
    rotates: whether q and k are rotated.
    """

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
        """x [T, in] -> x @ weight.T + bias, [T, out], in x's dtype, or in float32 if that is given (for
        logits: not rounded to bfloat16 if the implementation can avoid it, because rounding makes ties)."""
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
        """Split qkv, norm and rotate q and k, and write k and v into the pool. Returns q [T, H, D].

        qkv: [T, (H + 2K) * D]; it may be overwritten.
        cos, sin: float32[T, D/2]. A head x = (a, b) of two halves becomes (a*cos - b*sin, b*cos + a*sin).
        q_norm, k_norm: float32[D], the weights of an RMS norm over each head before the rotation; None: no
        norm.
        k_pool, v_pool: [pages*P, K, D]; token t is written to row slots[t].
        slots: int64[T].
        """
        ...

    def attention(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: Batch, scale: float, window: int | None
    ) -> Tensor:
        """Causal grouped-query attention over paged KV: q [T, H, D], pools [pages*P, K, D] -> [T, H, D]. A
        token at position p sees the positions j with j <= p and, if there is a window, j > p - window. The
        reference is `hotprefix.engine.model.attention`."""
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
        """Run all layers. Returns the last layer's output after the final norm, [K, hidden]: the same numbers
        as the operations of `Ops` give one by one.

        residual: [T, hidden], the embedded tokens; overwritten.
        cos, sin: as in `Ops.rope_write`.
        keys, values: keys[i] and values[i] are layer i's pool, written at the slots of
        `batch.of_layer(group_of, i)`.
        keep: int64[K], ascending: the rows whose result is wanted; None: all.
        """
        ...


@runtime_checkable
class StackOps(Protocol):
    """Operations that can also run all layers in one call."""

    def prepare_layers(
        self, layers: Sequence[LayerHandles], final_norm: Tensor, shape: HeadShape, eps: float, scale: float
    ) -> Stack:
        """Raises ValueError if the layers' shapes do not fit together."""
        ...


@runtime_checkable
class BlockOps(Protocol):
    """Operations that can read a weight's quantised blocks in small steps."""

    def reads_blocks(self, form: str, dtype: torch.dtype) -> bool:
        """Whether `prepare_quantised` takes blocks of this form (GGUF's name for it) with weights of this
        dtype."""
        ...

    def gains_from_blocks(self, dtype: torch.dtype) -> bool:
        """Whether reading blocks makes small steps faster on this machine."""
        ...

    def prepare_quantised(self, weight: Tensor, bias: Tensor | None, blocks: Blocks) -> Any:
        """As `Ops.prepare_linear`, with a quantised copy of the weight beside it. Results have the same bits,
        whichever of the two a step reads. Raises ValueError if the blocks do not mean exactly `weight`."""
        ...
