"""The checks that Python makes before C runs. Owns: tensor and batch checks, and the structures both sides
share.

Rules: a tensor's address leaves Python only through `check`; a status C returns becomes an exception
through `raise_for`. Structures mirror the headers of the same name, field by field.
"""

from __future__ import annotations

from ctypes import Structure, c_int, c_size_t, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from hotprefix.engine.batch import Batch

_ERRORS = {
    1: "native kernel: out of memory",
    2: "native attention: the batch contradicts itself or names a page outside the pool",
    3: "native rope_write: a slot lies outside the pool",
    4: "native linear: the quantised blocks are not the dense weight",
}


class LinearStruct(Structure):
    """struct hp_linear."""

    _fields_ = (
        ("weight", c_void_p), ("bias", c_void_p), ("in", c_size_t), ("out", c_size_t), ("bf16", c_int),
        ("blocks", c_void_p), ("form", c_int),
    )  # fmt: skip


class BatchStruct(Structure):
    """struct hp_batch."""

    _fields_ = (
        ("query_starts", c_void_p), ("context_lens", c_void_p), ("page_table", c_void_p),
        ("requests", c_size_t), ("table_width", c_size_t), ("page_size", c_size_t), ("pages", c_size_t),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LinearHandle:
    """A packed weight with its bias and, if there is one, its quantised copy. The tensors keep alive the
    memory that `struct` points to.

    rows, columns: outputs and inputs.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    weight: Tensor
    bias: Tensor | None
    struct: LinearStruct
    blocks: Tensor | None = None


def check(tensor: Tensor, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> int:
    """The tensor's address. Raises ValueError unless it is a contiguous CPU tensor of this shape and one of
    these dtypes."""
    if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous() or tensor.is_cuda:
        raise ValueError(
            f"{name}: got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            f"{'' if tensor.is_contiguous() else ', not contiguous'}; native kernels want contiguous CPU "
            f"{' or '.join(map(str, dtypes))} {shape}"
        )
    return tensor.data_ptr()


def describe(batch: Batch, tokens: int, pool_rows: int) -> BatchStruct:
    """The batch as C sees it. Raises ValueError if its arrays do not fit each other, or do not fit
    `tokens`."""
    requests = batch.context_lens.shape[0]
    width = batch.page_table.shape[1]
    if batch.page_size < 1 or (requests and batch.query_bounds[-1] != tokens):
        raise ValueError(f"batch: page_size={batch.page_size}, query_starts do not end at {tokens} tokens")
    return BatchStruct(
        check(batch.query_starts, "query_starts", (requests + 1,), torch.int32),
        check(batch.context_lens, "context_lens", (requests,), torch.int32),
        check(batch.page_table, "page_table", (requests, width), torch.int32),
        requests, width, batch.page_size, pool_rows // max(batch.page_size, 1),
    )  # fmt: skip


def raise_for(status: int) -> None:
    """Raise the error that a status other than 0 stands for: MemoryError or ValueError."""
    if status == 1:
        raise MemoryError(_ERRORS[1])
    if status:
        raise ValueError(_ERRORS[status])
