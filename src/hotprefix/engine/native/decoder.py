"""All layers in one call. Owns: `NativeStack`, a model's layers as C wants them, and the call itself.

Rules: C reads nothing that was not checked before: the weights when a stack is made, a step's tensors in
`run`. The handles and norms are kept here as long as C may read them. The result has the same bits as that of
the operations called one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int, c_size_t, c_void_p
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hotprefix.engine.batch import Batch
from hotprefix.engine.model.ops import HeadShape, LayerHandles
from hotprefix.engine.native.checks import BatchStruct, LinearHandle, LinearStruct, check, describe, raise_for


class _Layer(Structure):
    _fields_ = (
        ("qkv", LinearStruct), ("output", LinearStruct), ("gate_up", LinearStruct), ("down", LinearStruct),
        ("input_norm", c_void_p), ("middle_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("window", c_size_t), ("rotates", c_int),
    )  # fmt: skip


class _Decoder(Structure):
    _fields_ = (
        ("layers", POINTER(_Layer)), ("count", c_size_t), ("heads", c_size_t), ("kv_heads", c_size_t),
        ("head_dim", c_size_t), ("hidden", c_size_t), ("inner", c_size_t), ("final_norm", c_void_p),
        ("eps", c_float), ("scale", c_float), ("bf16", c_int),
    )  # fmt: skip


class _View(Structure):
    _fields_ = (("batch", POINTER(BatchStruct)), ("slots", c_void_p), ("pool_rows", c_size_t))


class _Step(Structure):
    _fields_ = (
        ("seen", POINTER(POINTER(_View))), ("rows", c_size_t), ("kept", c_void_p), ("kept_rows", c_size_t),
        ("cos", c_void_p), ("sin", c_void_p), ("keys", c_void_p), ("values", c_void_p), ("threads", c_int),
    )  # fmt: skip


class NativeStack:
    """A decoder's layers, ready to run."""

    def __init__(
        self, library: ctypes.CDLL, layers: Sequence[LayerHandles], final_norm: Tensor, shape: HeadShape,
        eps: float, scale: float,
    ) -> None:  # fmt: skip
        """Raises ValueError if the layers' shapes do not fit together."""
        self._run = library.hp_decoder_run
        self._run.argtypes = [POINTER(_Decoder), POINTER(_Step), c_void_p, c_void_p]
        self._shape, self._kept = shape, (list(layers), final_norm)
        self._hidden = final_norm.shape[0]
        self._dtype: torch.dtype = layers[0].qkv.dtype
        self._inner = layers[0].down.columns
        self._layers = (_Layer * len(layers))(*[self._layer(layer) for layer in layers])
        self._model = _Decoder(
            self._layers, len(layers), shape.heads, shape.kv_heads, shape.head_dim, self._hidden, self._inner,
            check(final_norm, "final_norm", (self._hidden,), torch.float32), eps, scale,
            self._dtype == torch.bfloat16,
        )  # fmt: skip

    def _layer(self, layer: LayerHandles) -> _Layer:
        hidden, inner, queries = self._hidden, self._inner, self._shape.heads * self._shape.head_dim

        def linear(handle: Any, name: str, rows: int, columns: int) -> LinearStruct:
            given = (handle.rows, handle.columns, handle.dtype)
            if not isinstance(handle, LinearHandle) or given != (rows, columns, self._dtype):
                raise ValueError(f"{name}: {given} given, {(rows, columns, self._dtype)} wanted")
            return handle.struct

        def norm(weight: Tensor | None, name: str, size: int) -> int | None:
            return None if weight is None else check(weight, name, (size,), torch.float32)

        return _Layer(
            linear(layer.qkv, "qkv", self._shape.qkv_width, hidden),
            linear(layer.output, "output", hidden, queries),
            linear(layer.gate_up, "gate_up", 2 * inner, hidden),
            linear(layer.down, "down", hidden, inner),
            norm(layer.input_norm, "input_norm", hidden), norm(layer.middle_norm, "middle_norm", hidden),
            norm(layer.q_norm, "q_norm", self._shape.head_dim),
            norm(layer.k_norm, "k_norm", self._shape.head_dim),
            layer.window or 0, layer.rotates,
        )  # fmt: skip

    def run(
        self, residual: Tensor, cos: Tensor, sin: Tensor, batch: Batch, keys: Sequence[Tensor],
        values: Sequence[Tensor], keep: Tensor | None = None, group_of: Sequence[int] = (),
    ) -> Tensor:  # fmt: skip
        """See `Stack.run`. Raises ValueError if a tensor has another shape, dtype or place than C expects."""
        tokens, count = residual.shape[0], len(self._layers)
        table = (tokens, self._shape.head_dim // 2)
        if len(keys) != count or len(values) != count:
            raise ValueError(f"{len(keys)} key and {len(values)} value pools for {count} layers")
        pools = [(c_void_p * count)(*[self._pool(p) for p in ps]) for ps in (keys, values)]
        if any(k.shape != v.shape for k, v in zip(keys, values, strict=True)):
            raise ValueError("key and value pools of a layer differ in size")
        seen = self._views(batch, tokens, [k.shape[0] for k in keys], group_of)
        kept, kept_rows = self._kept_rows(keep, tokens)
        step = _Step(
            seen, tokens, kept, kept_rows,
            check(cos, "cos", table, torch.float32), check(sin, "sin", table, torch.float32),
            ctypes.addressof(pools[0]), ctypes.addressof(pools[1]), torch.get_num_threads(),
        )  # fmt: skip
        at = check(residual, "residual", (tokens, self._hidden), self._dtype)
        states = residual.new_empty((tokens if keep is None else keep.shape[0], self._hidden))
        raise_for(self._run(byref(self._model), byref(step), at, states.data_ptr()))
        return states

    def _pool(self, pool: Tensor) -> int:
        shape = (pool.shape[0], self._shape.kv_heads, self._shape.head_dim)
        return check(pool, "pool", shape, self._dtype)

    @staticmethod
    def _views(batch: Batch, tokens: int, rows: Sequence[int], group_of: Sequence[int]) -> Any:
        """For each layer, the step as that layer sees it. Layers that see the same, and have equally many
        pool rows, share one view."""
        views: dict[tuple[int, int], Any] = {}
        for i, size in enumerate(rows):
            seen = batch.of_layer(group_of, i)
            if (id(seen), size) not in views:
                slots = check(seen.slots, "slots", (tokens,), torch.int64)
                lists = ctypes.pointer(describe(seen, tokens, size))
                views[id(seen), size] = ctypes.pointer(_View(lists, slots, size))
        keys = ((id(batch.of_layer(group_of, i)), size) for i, size in enumerate(rows))
        return (POINTER(_View) * len(rows))(*[views[key] for key in keys])

    @staticmethod
    def _kept_rows(keep: Tensor | None, tokens: int) -> tuple[int | None, int]:
        """The address and number of the rows to keep. Raises ValueError unless they ascend: C moves them in
        place."""
        if keep is None:
            return None, 0
        at = check(keep, "keep", (keep.shape[0],), torch.int64)
        rows = keep.tolist()
        if not rows or rows[0] < 0 or rows[-1] >= tokens or any(a >= b for a, b in pairwise(rows)):
            raise ValueError(f"keep: give ascending rows from 0 to {tokens - 1}")
        return at, len(rows)
