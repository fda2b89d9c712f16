"""Linears with a quantised copy give the bits of the dense ones, and blocks that mean something else are
refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from hotprefix.engine.batch import Batch
from hotprefix.engine.kvpool import KVPool
from hotprefix.engine.model.files import resolve_model
from hotprefix.engine.model.forward import Decoder
from hotprefix.engine.model.loader import load_model
from hotprefix.engine.model.torch_ops import TorchOps
from hotprefix.engine.model.weights import Blocks
from hotprefix.engine.native import compile_c
from hotprefix.engine.native.native_ops import NativeOps
from hotprefix.errors import ConfigError
from tests.unit.test_native_ops import BUILDS, DTYPES
from tests.unit.tiny_models import reference_model, save

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
FORMS = list(BLOCK_BYTES)
SIZES = [(1, 32), (7, 64), (64, 96), (131, 320)]


@pytest.fixture(scope="module", params=BUILDS)
def ops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeOps:
    directory = tmp_path_factory.mktemp("kernels") if request.param != "native" else None
    return NativeOps(compile_c.build(BUILDS[request.param], directory))


def random_blocks(form: str, rows: int, columns: int) -> tuple[Blocks, Tensor]:
    """Random quants, scales of either sign from subnormal to large; and their meaning by gguf's own
    definition, float32[rows, columns]."""
    random = np.random.default_rng(rows * columns)
    data = random.integers(0, 256, (rows, columns // 32, BLOCK_BYTES[form]), dtype=np.uint8)
    halves = 2 if form == "Q4_1" else 1
    numbers = random.standard_normal((rows, columns // 32, halves)) * 10.0 ** random.integers(
        -7, 2, (rows, columns // 32, 1)
    )
    data[:, :, : 2 * halves] = numbers.astype(np.float16).view(np.uint8)
    flat = data.reshape(rows, -1)
    meaning = gguf.dequantize(flat, gguf.GGMLQuantizationType[form]).astype(np.float32)
    return Blocks(form, torch.from_numpy(flat)), torch.from_numpy(meaning).reshape(rows, columns)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_same_bits_as_dense(ops: NativeOps, dtype: torch.dtype, form: str, rows: int, columns: int) -> None:
    if not ops.reads_blocks(form, dtype):
        pytest.skip("no bfloat16 dot product in this build")
    random = torch.Generator().manual_seed(rows)
    blocks, meaning = random_blocks(form, rows, columns)
    weight, bias = meaning.to(dtype), torch.randn(rows, generator=random).to(dtype)
    quantised, dense = ops.prepare_quantised(weight, bias, blocks), ops.prepare_linear(weight, bias)
    for tokens in range(1, 12):
        x = torch.randn(tokens, columns, generator=random).to(dtype)
        got = ops.linear(x, quantised, torch.float32)
        assert torch.equal(got, ops.linear(x, dense, torch.float32)), tokens
        wide = x.double() @ weight.double().T + bias.double()
        bound = x.double().abs() @ weight.double().abs().T + bias.double().abs()
        assert bool(((got - wide).abs() <= 1e-6 * columns**0.5 * bound).all())
        assert torch.equal(ops.linear(x[:1], quantised, torch.float32), got[:1])


def test_small_steps_read_the_copy(ops: NativeOps) -> None:
    """Otherwise the test above would compare the dense weight with itself."""
    blocks, weight = random_blocks("Q4_1", 40, 64)
    handle = ops.prepare_quantised(weight, None, blocks)
    assert handle.blocks is not None
    x = torch.ones(9, 64)
    before = ops.linear(x[:8], handle)
    handle.blocks.zero_()
    assert not ops.linear(x[:8], handle).any()
    assert torch.equal(ops.linear(x, handle)[:8], before)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("row", [0, 69])
def test_refuses_blocks_that_mean_something_else(ops: NativeOps, form: str, row: int) -> None:
    blocks, weight = random_blocks(form, 70, 64)
    blocks.data[row, -1] ^= 0x11
    with pytest.raises(ValueError, match="not the dense weight"):
        ops.prepare_quantised(weight, None, blocks)


@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_refuses_scales_that_are_not_finite(ops: NativeOps, scale: float) -> None:
    blocks, _ = random_blocks("Q8_0", 2, 32)
    blocks.data[1, :2] = torch.tensor([scale]).half().view(torch.uint8)
    meaning = torch.from_numpy(gguf.dequantize(blocks.data.numpy(), gguf.GGMLQuantizationType.Q8_0))
    with pytest.raises(ValueError, match="not the dense weight"):
        ops.prepare_quantised(meaning.float(), None, blocks)


def test_refuses_wrong_shapes_and_forms(ops: NativeOps) -> None:
    blocks, weight = random_blocks("Q4_1", 4, 64)
    with pytest.raises(ValueError, match="blocks"):
        ops.prepare_quantised(weight[:3].contiguous(), None, blocks)
    with pytest.raises(ValueError, match="Q6_K"):
        ops.prepare_quantised(weight, None, Blocks("Q6_K", blocks.data))
    with pytest.raises(ValueError, match="33 columns"):
        ops.prepare_quantised(torch.zeros(4, 33), None, blocks)


def test_joins_only_blocks_of_one_form() -> None:
    (a, _), (b, _), (c, _) = (random_blocks(form, 2, 32) for form in ("Q4_1", "Q4_1", "Q8_0"))
    joined = Blocks.join([a, b])
    assert joined is not None
    assert torch.equal(joined.data, torch.cat([a.data, b.data]))
    assert Blocks.join([a, c]) is None
    assert Blocks.join([a, None]) is None


def decode_batch(requests: int, context: int) -> Batch:
    """One token of each request; page r belongs to request r."""
    ones = torch.ones(requests, dtype=torch.int32)
    return Batch(
        token_ids=torch.arange(1000, 1000 + requests).int(), positions=ones * (context - 1),
        slots=torch.arange(requests) * 16 + context - 1, query_starts=torch.arange(requests + 1).int(),
        context_lens=ones * context, page_table=torch.arange(requests)[:, None].int(),
        logit_rows=torch.arange(requests), page_size=16, max_query_len=1, max_context_len=context,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_default_model_decodes_to_the_same_logits(dtype: str) -> None:
    """All of its linears have blocks; queries and keys too, whose rows the file keeps in another order."""
    ops = NativeOps(compile_c.build())
    if not ops.reads_blocks("Q4_1", getattr(torch, dtype)):
        pytest.skip("no bfloat16 dot product here")

    def load(weights: str) -> Decoder:
        return load_model(resolve_model(), dtype, "cpu", ops, decode_weights=weights).decoder

    dense, quantised = load("dense"), load("quantised")
    assert dense.quantised_linears == 0
    assert quantised.quantised_linears == 4 * quantised.config.layers + 1
    for requests in (1, 3, 8):
        logits = []
        for decoder in (dense, quantised):
            pool = KVPool.allocate(decoder.config, requests, 16, decoder.dtype, decoder.device)
            logits += [decoder.forward(decode_batch(requests, n), pool) for n in (1, 2)]
        assert torch.equal(logits[0], logits[2])
        assert torch.equal(logits[1], logits[3])


def test_settings_that_cannot_be_met() -> None:
    files = resolve_model()
    with pytest.raises(ConfigError, match="'int2'"):
        load_model(files, "float32", "cpu", decode_weights="int2")
    with pytest.raises(ConfigError, match="native kernels"):
        load_model(files, "float32", "cpu", TorchOps(), decode_weights="quantised")
    assert load_model(files, "float32", "cpu", TorchOps()).decoder.quantised_linears == 0


def test_a_model_without_blocks_is_refused(tmp_path: Path) -> None:
    files = save(reference_model("Llama"), tmp_path)
    with pytest.raises(ConfigError, match="no weight of"):
        load_model(files, "float32", "cpu", NativeOps(compile_c.build()), decode_weights="quantised")
    assert load_model(files, "float32", "cpu").decoder.quantised_linears == 0
