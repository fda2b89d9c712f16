"""The decoder's arithmetic in torch. Owns: `TorchOps`, used on CUDA and if the native kernels cannot be
built.

Rules: as in `ops.Ops`; nothing here depends on the model. On a CPU in bfloat16, linear weights are repacked
once into oneDNN's blocked layout, which saves a reordering at every call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hotprefix.engine.batch import Batch
from hotprefix.engine.model.attention import paged_attention
from hotprefix.engine.model.ops import HeadShape


@dataclass(frozen=True, slots=True)
class LinearHandle:
    """One linear layer.

    weight: [out, in].
    bias: [out], or None.
    packed: whether the weight is in oneDNN's layout.
    """

    weight: Tensor
    bias: Tensor | None
    packed: bool


class TorchOps:
    """`Ops` on torch; stateless."""

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> LinearHandle:
        pack = (
            weight.device.type == "cpu"
            and weight.dtype == torch.bfloat16
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        if pack:
            return LinearHandle(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias, True)
        return LinearHandle(weight.contiguous(), bias, False)

    def linear(self, x: Tensor, handle: LinearHandle, out_dtype: torch.dtype | None = None) -> Tensor:
        out: Tensor
        if handle.packed:
            out = torch.ops.mkldnn._linear_pointwise(x, handle.weight, handle.bias, "none", [], "")
        else:
            out = F.linear(x, handle.weight, handle.bias)
        return out if out_dtype is None else out.to(out_dtype)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (scaled * weight).to(x.dtype)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.norm(residual, weight, eps)

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
        heads = qkv.view(qkv.shape[0], shape.heads + 2 * shape.kv_heads, shape.head_dim)
        split = shape.heads + shape.kv_heads
        q, k, v = heads[:, : shape.heads], heads[:, shape.heads : split], heads[:, split:]
        if q_norm is not None:
            q = self.norm(q, q_norm, eps)
        if k_norm is not None:
            k = self.norm(k, k_norm, eps)
        k_pool.index_copy_(0, slots, _rotate(k, cos, sin))
        v_pool.index_copy_(0, slots, v)
        return _rotate(q, cos, sin)

    def attention(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: Batch, scale: float, window: int | None
    ) -> Tensor:
        return paged_attention(q, k_pool, v_pool, batch, scale, window)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        half = gate_up.shape[-1] // 2
        return F.silu(gate_up[:, :half]) * gate_up[:, half:]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, n, D] rotated in float32 by cos, sin [T, D/2], back in x's dtype."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
