"""All layers in one call give the bits of the operations one by one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from hotprefix.engine.model.ops import HeadShape, LayerHandles
from hotprefix.engine.native import compile_c
from hotprefix.engine.native.native_ops import NativeOps
from tests.unit.test_native_ops import DTYPES, ragged

SHAPE = HeadShape(6, 2, 20)
HIDDEN, INNER, EPS, SCALE = 48, 76, 1e-5, 0.2


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return NativeOps(compile_c.build())


def random_layers(ops: NativeOps, dtype: torch.dtype, biased: bool, normed: bool) -> list[LayerHandles]:
    """Two layers; the first has a window, the second does not rotate."""
    random = torch.Generator().manual_seed(3)

    def linear(rows: int, columns: int) -> object:
        weight = torch.randn(rows, columns, generator=random).to(dtype) / columns**0.5
        return ops.prepare_linear(weight, torch.randn(rows, generator=random).to(dtype) if biased else None)

    def norm(size: int) -> Tensor:
        return torch.rand(size, generator=random) + 0.5

    return [
        LayerHandles(
            qkv=linear(SHAPE.qkv_width, HIDDEN), output=linear(HIDDEN, SHAPE.heads * SHAPE.head_dim),
            gate_up=linear(2 * INNER, HIDDEN), down=linear(HIDDEN, INNER),
            input_norm=norm(HIDDEN), middle_norm=norm(HIDDEN),
            q_norm=norm(SHAPE.head_dim) if normed else None, k_norm=norm(SHAPE.head_dim) if normed else None,
            window=40 if i == 0 else None, rotates=i == 0,
        )
        for i in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("biased", "normed"), [(False, False), (True, True)])
def test_equals_the_operations_one_by_one(
    ops: NativeOps, dtype: torch.dtype, biased: bool, normed: bool
) -> None:
    random = torch.Generator().manual_seed(4)
    layers = random_layers(ops, dtype, biased, normed)
    final = torch.rand(HIDDEN, generator=random) + 0.5
    batch, rows = ragged(random, [(1, 90), (50, 60), (3, 200)], 16)
    angle = torch.rand(batch.tokens, SHAPE.head_dim // 2, generator=random) * 6
    cos, sin = angle.cos(), angle.sin()
    pools = torch.randn(2, 2, rows, SHAPE.kv_heads, SHAPE.head_dim, generator=random).to(dtype)
    expected_pools = pools.clone()
    embedded = torch.randn(batch.tokens, HIDDEN, generator=random).to(dtype)

    residual = embedded.clone()
    x = ops.norm(residual, layers[0].input_norm, EPS)
    for i, layer in enumerate(layers):
        turn = (cos, sin) if layer.rotates else (torch.ones_like(cos), torch.zeros_like(sin))
        q = ops.rope_write(
            ops.linear(x, layer.qkv), SHAPE, *turn, layer.q_norm, layer.k_norm, EPS, *expected_pools[:, i],
            batch.slots,
        )  # fmt: skip
        attended = ops.attention(q, *expected_pools[:, i], batch, SCALE, layer.window)
        x = ops.linear(attended.view(batch.tokens, -1), layer.output)
        x = ops.add_norm(x, residual, layer.middle_norm, EPS)
        x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
        x = ops.add_norm(x, residual, layers[1].input_norm if i == 0 else final, EPS)

    stack = ops.prepare_layers(layers, final, SHAPE, EPS, SCALE)
    fresh = embedded.clone(), pools.clone()
    got = stack.run(embedded, cos, sin, batch, list(pools[0]), list(pools[1]))
    assert torch.equal(got, x)
    keep = torch.tensor([0, 7, 50, batch.tokens - 1])
    some = stack.run(fresh[0], cos, sin, batch, list(fresh[1][0]), list(fresh[1][1]), keep)
    assert torch.equal(some, x[keep])
    assert torch.equal(fresh[1], expected_pools)
    assert torch.equal(pools, expected_pools)
    assert torch.equal(embedded, residual)


def test_wrong_layers_and_pools_are_refused(ops: NativeOps) -> None:
    layers = random_layers(ops, torch.float32, False, False)
    final = torch.ones(HIDDEN)
    swapped = [dataclasses.replace(layers[0], output=layers[0].down)]
    with pytest.raises(ValueError, match="output"):
        ops.prepare_layers(swapped, final, SHAPE, EPS, SCALE)
    stack = ops.prepare_layers(layers, final, SHAPE, EPS, SCALE)
    batch, rows = ragged(torch.Generator().manual_seed(4), [(1, 20)], 16)
    table = torch.zeros(1, 10)
    pools = [torch.zeros(rows, SHAPE.kv_heads, SHAPE.head_dim) for _ in range(2)]
    embedded = torch.zeros(1, HIDDEN)
    with pytest.raises(ValueError, match="pool"):
        stack.run(embedded, table, table, batch, pools, [*pools[:1], pools[1].bfloat16()])
    with pytest.raises(ValueError, match="1 value pools"):
        stack.run(embedded, table, table, batch, pools, pools[:1])
    with pytest.raises(ValueError, match="slot"):
        stack.run(
            embedded, table, table, dataclasses.replace(batch, slots=torch.tensor([rows])), pools, pools
        )
    for keep in ([], [1], [-1], [0, 0]):
        with pytest.raises(ValueError, match="keep"):
            stack.run(embedded, table, table, batch, pools, pools, torch.tensor(keep, dtype=torch.int64))
