"""The decoder's arithmetic in C. Owns: `NativeOps`, the checked way into the kernels.

Rules: every tensor is checked (dtype, shape, contiguity, device) before its address is passed on. A wrong
tensor raises ValueError and never reaches C. Calls release the interpreter lock, and use
`torch.get_num_threads()` threads. The result of a row (in attention: of a request) has the same bits whatever
else is in the batch, and however a prompt was cut into chunks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int, c_size_t, c_void_p
from dataclasses import replace

import torch
from torch import Tensor

from hotprefix.engine.batch import Batch
from hotprefix.engine.model.ops import HeadShape, LayerHandles
from hotprefix.engine.model.weights import Blocks
from hotprefix.engine.native.checks import BatchStruct, LinearHandle, LinearStruct, check, describe, raise_for
from hotprefix.engine.native.decoder import NativeStack

_DTYPES = (torch.float32, torch.bfloat16)
_MAX_GROUP = 96  # MAX_ROWS in attention_block.h
_GROUP = 32
_FORMS = {"Q4_0": (1, 1, 18), "Q4_1": (2, 1, 20), "Q8_0": (3, 2, 34)}  # source, packed form, block's bytes


class _Rope(Structure):
    _fields_ = (
        ("heads", c_size_t), ("kv_heads", c_size_t), ("head_dim", c_size_t),
        ("cos", c_void_p), ("sin", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p), ("eps", c_float),
    )  # fmt: skip


class _Attention(Structure):
    _fields_ = (
        ("heads", c_size_t), ("kv_heads", c_size_t), ("head_dim", c_size_t), ("scale", c_float),
        ("window", c_size_t), ("bf16", c_int),
    )  # fmt: skip


class NativeOps:
    """`hotprefix.engine.model.ops.Ops` on the C kernels, for float32 and bfloat16 on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """library: from `build.load()` or `build.build()`."""
        self._library = library
        size, pointer, flag = c_size_t, c_void_p, c_int
        self._bytes = library.hp_linear_bytes
        self._bytes.argtypes, self._bytes.restype = [size, size, flag], size
        self._pack = library.hp_linear_pack
        self._pack.argtypes, self._pack.restype = [pointer, pointer, size, size, flag, flag], None
        self._blocks_bytes = library.hp_blocks_bytes
        self._blocks_bytes.argtypes, self._blocks_bytes.restype = [flag, size, size], size
        self._blocks_pack = library.hp_blocks_pack
        self._blocks_pack.argtypes = [flag, pointer, pointer, pointer, size, size, flag, flag]
        self._linear = library.hp_linear_run
        self._linear.argtypes = [POINTER(LinearStruct), pointer, size, pointer, flag, flag]
        self._norm = library.hp_norm
        self._norm.argtypes = [pointer, pointer, pointer, c_float, pointer, size, size, flag, flag]
        self._norm.restype = None
        self._silu_mul = library.hp_silu_mul
        self._silu_mul.argtypes, self._silu_mul.restype = [pointer, pointer, size, size, flag, flag], None
        self._rope_write = library.hp_rope_write
        self._rope_write.argtypes = [POINTER(_Rope), *[pointer] * 5, size, size, flag, flag]
        self._attention = library.hp_attention_run
        self._attention.argtypes = [POINTER(_Attention), POINTER(BatchStruct), *[pointer] * 4, flag]

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> LinearHandle:
        """Repack a weight [out, in] (float32, or bfloat16 with an even `in`) with its bias [out]."""
        rows, columns = weight.shape
        check(weight, "weight", (rows, columns), *_DTYPES)
        bf16 = weight.dtype == torch.bfloat16
        if bf16 and columns % 2:
            raise ValueError(f"weight: {columns} bfloat16 columns; native kernels want an even number")
        if bias is not None:
            check(bias, "bias", (rows,), weight.dtype)
            bias = bias.float()
        packed = _aligned(self._bytes(rows, columns, bf16))
        self._pack(weight.data_ptr(), packed.data_ptr(), rows, columns, bf16, torch.get_num_threads())
        bias_at = None if bias is None else bias.data_ptr()
        struct = LinearStruct(packed.data_ptr(), bias_at, columns, rows, bf16)
        return LinearHandle(rows, columns, weight.dtype, packed, bias, struct)

    def reads_blocks(self, form: str, dtype: torch.dtype) -> bool:
        """See `BlockOps.reads_blocks`."""
        return form in _FORMS and self._library.hp_blocks_use(dtype == torch.bfloat16) > 0

    def gains_from_blocks(self, dtype: torch.dtype) -> bool:
        """See `BlockOps.gains_from_blocks`."""
        return bool(self._library.hp_blocks_use(dtype == torch.bfloat16) > 1)

    def prepare_quantised(self, weight: Tensor, bias: Tensor | None, blocks: Blocks) -> LinearHandle:
        """See `BlockOps.prepare_quantised`."""
        if not self.reads_blocks(blocks.form, weight.dtype):
            raise ValueError(f"blocks: {blocks.form} beside {weight.dtype} is not supported here")
        handle = self.prepare_linear(weight, bias)
        rows, columns = weight.shape
        if columns % _GROUP:
            raise ValueError(f"blocks: {columns} columns are not whole blocks of {_GROUP}")
        source, form, size = _FORMS[blocks.form]
        at = check(blocks.data, "blocks", (rows, columns // _GROUP * size), torch.uint8)
        packed = _aligned(self._blocks_bytes(source, rows, columns))
        threads = torch.get_num_threads()
        raise_for(
            self._blocks_pack(
                source, at, weight.data_ptr(), packed.data_ptr(), rows, columns, handle.struct.bf16, threads
            )
        )
        handle.struct.blocks, handle.struct.form = packed.data_ptr(), form
        return replace(handle, blocks=packed)

    def prepare_layers(
        self, layers: Sequence[LayerHandles], final_norm: Tensor, shape: HeadShape, eps: float, scale: float
    ) -> NativeStack:
        """All layers as one call; see `StackOps`."""
        return NativeStack(self._library, layers, final_norm, shape, eps, scale)

    def linear(self, x: Tensor, handle: LinearHandle, out_dtype: torch.dtype | None = None) -> Tensor:
        """See `Ops.linear`. With out_dtype float32 the result is not rounded to x's dtype."""
        tokens = x.shape[0]
        at = check(x, "x", (tokens, handle.columns), handle.dtype)
        if out_dtype not in (None, x.dtype, torch.float32):
            raise ValueError(f"linear: out_dtype={out_dtype} is neither {x.dtype} nor torch.float32")
        out = torch.empty((tokens, handle.rows), dtype=out_dtype or x.dtype)
        bf16 = out.dtype == torch.bfloat16
        raise_for(self._linear(handle.struct, at, tokens, out.data_ptr(), bf16, torch.get_num_threads()))
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension: x [T, n], weight float32[n] -> [T, n]."""
        return self._normed(x, None, weight, eps)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place (both [T, n]), then the RMS norm of the sum, [T, n]."""
        return self._normed(x, residual, weight, eps)

    def _normed(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        tokens, width = x.shape
        at = check(x, "x", (tokens, width), *_DTYPES)
        weight_at = check(weight, "weight", (width,), torch.float32)
        residual_at = None if residual is None else check(residual, "residual", (tokens, width), x.dtype)
        out = torch.empty_like(x)
        bf16 = x.dtype == torch.bfloat16
        self._norm(
            at, residual_at, weight_at, eps, out.data_ptr(), tokens, width, bf16, torch.get_num_threads()
        )
        return out

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
        """See `Ops.rope_write`; qkv is left as it is."""
        tokens, dim = qkv.shape[0], shape.head_dim
        at = check(qkv, "qkv", (tokens, shape.qkv_width), *_DTYPES)
        pool = (k_pool.shape[0], shape.kv_heads, dim)
        table = (tokens, dim // 2)
        rope = _Rope(
            shape.heads, shape.kv_heads, dim,
            check(cos, "cos", table, torch.float32), check(sin, "sin", table, torch.float32),
            None if q_norm is None else check(q_norm, "q_norm", (dim,), torch.float32),
            None if k_norm is None else check(k_norm, "k_norm", (dim,), torch.float32), eps,
        )  # fmt: skip
        q = torch.empty((tokens, shape.heads, dim), dtype=qkv.dtype)
        failed = self._rope_write(
            byref(rope), at, check(slots, "slots", (tokens,), torch.int64), q.data_ptr(),
            check(k_pool, "k_pool", pool, qkv.dtype), check(v_pool, "v_pool", pool, qkv.dtype),
            pool[0], tokens, qkv.dtype == torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
        raise_for(failed)
        return q

    def attention(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: Batch, scale: float, window: int | None
    ) -> Tensor:
        """See `Ops.attention`. Raises ValueError if a page lies outside the pool."""
        tokens, heads, dim = q.shape
        at = check(q, "q", (tokens, heads, dim), *_DTYPES)
        pool = (k_pool.shape[0], k_pool.shape[1], dim)
        if heads % pool[1] or heads // pool[1] > _MAX_GROUP or dim % 2:
            raise ValueError(f"attention: {heads} heads over {pool[1]} of size {dim} is not supported")
        if window is not None and window < 1:
            raise ValueError(f"attention: window={window} is not positive")
        lists = describe(batch, tokens, pool[0])
        shape = _Attention(heads, pool[1], dim, scale, window or 0, q.dtype == torch.bfloat16)
        out = torch.empty_like(q)
        failed = self._attention(
            byref(shape), byref(lists), at, check(k_pool, "k_pool", pool, q.dtype),
            check(v_pool, "v_pool", pool, q.dtype), out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        raise_for(failed)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2F] -> silu(gate_up[:, :F]) * gate_up[:, F:], [T, F]."""
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        at = check(gate_up, "gate_up", (tokens, 2 * width), *_DTYPES)
        out = torch.empty((tokens, width), dtype=gate_up.dtype)
        bf16 = gate_up.dtype == torch.bfloat16
        self._silu_mul(at, out.data_ptr(), tokens, width, bf16, torch.get_num_threads())
        return out


def _aligned(size: int) -> Tensor:
    """uint8[size] whose address is a multiple of 64."""
    block = torch.empty(size + 64, dtype=torch.uint8)
    return block[-block.data_ptr() % 64 :][:size]
