"""The C kernels against torch, for every instruction set this machine's compiler can be told to use."""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hotprefix.engine.batch import Batch
from hotprefix.engine.model.attention import paged_attention
from hotprefix.engine.model.ops import HeadShape
from hotprefix.engine.model.torch_ops import TorchOps
from hotprefix.engine.native import compile_c
from hotprefix.engine.native.native_ops import NativeOps

BUILDS: dict[str, tuple[str, ...]] = {"native": ()}
if platform.machine() in ("x86_64", "AMD64"):
    BUILDS |= {
        "no-bf16-dot": ("-mno-avx512bf16",),
        "avx2": ("-mno-avx512f", "-mno-avx512bf16"),
        "sse": ("-march=x86-64",),
    }
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module", params=BUILDS)
def ops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeOps:
    directory = tmp_path_factory.mktemp("kernels") if request.param != "native" else None
    return NativeOps(compile_c.build(BUILDS[request.param], directory))


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    scale = max(1.0, want.float().abs().max().item())
    torch.testing.assert_close(
        got.float(), want.float(), rtol=TOLERANCE[got.dtype], atol=TOLERANCE[got.dtype] * scale / 4
    )


def ragged(
    random: torch.Generator, chunks: list[tuple[int, int]], page_size: int, shared_pages: int = 0
) -> tuple[Batch, int]:
    """A batch of (new tokens, context) requests over scattered pages, the first `shared_pages` of each
    request being the same ones; and the pool's number of rows."""
    pages = [-(-context // page_size) for _, context in chunks]
    order = torch.randperm(sum(pages) + 3, generator=random).int()
    table = torch.full((len(chunks), max(pages) + 1), -7, dtype=torch.int32)
    used = 0
    for r, count in enumerate(pages):
        table[r, :count] = order[used : used + count]
        used += count
        table[r, : min(shared_pages, count)] = table[0, : min(shared_pages, count)]
    starts = torch.tensor([0, *[new for new, _ in chunks]]).cumsum(0).int()
    positions = torch.cat([torch.arange(c - n, c) for n, c in chunks]).int()
    owner = torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor([n for n, _ in chunks]))
    slots = table[owner, positions // page_size].long() * page_size + positions % page_size
    batch = Batch(
        token_ids=torch.zeros(len(positions), dtype=torch.int32), positions=positions, slots=slots.long(),
        query_starts=starts, context_lens=torch.tensor([c for _, c in chunks]).int(), page_table=table,
        logit_rows=torch.arange(len(chunks)), page_size=page_size,
        max_query_len=max(n for n, _ in chunks), max_context_len=max(c for _, c in chunks),
    )  # fmt: skip
    return batch, len(order) * page_size


def random_inputs(
    random: torch.Generator, batch: Batch, rows: int, shape: HeadShape, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q and pools; pool rows that no request owns are NaN."""
    q = torch.randn(batch.tokens, shape.heads, shape.head_dim, generator=random).to(dtype)
    pools = torch.full((2, rows, shape.kv_heads, shape.head_dim), float("nan"), dtype=dtype)
    for r, context in enumerate(batch.contexts):
        slots = batch.context_slots[r, :context]
        pools[:, slots] = torch.randn(2, context, *pools.shape[2:], generator=random).to(dtype)
    return q, pools[0], pools[1]


def reference(q: Tensor, k: Tensor, v: Tensor, batch: Batch, window: int | None) -> Tensor:
    scale = q.shape[-1] ** -0.5
    return paged_attention(q.float(), k.float(), v.float(), batch, scale, window).to(q.dtype)


CHUNKS = {
    "decodes": [(1, 1), (1, 37), (1, 128), (1, 129), (1, 300)],
    "mixed": [(1, 200), (40, 40), (3, 131), (1, 5), (70, 333), (9, 260)],
    "one-long": [(150, 400)],
}


class TestAttention:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "dim", "page_size", "window"),
        [
            (9, 3, 64, 16, None),
            (4, 4, 80, 1, 200),
            (8, 2, 96, 64, 50),
            (8, 1, 128, 16, 130),
            (2, 1, 20, 48, 1),
        ],
    )
    def test_equals_torch(
        self, ops: NativeOps, random: torch.Generator, dtype: torch.dtype, chunks: list[tuple[int, int]],
        heads: int, kv_heads: int, dim: int, page_size: int, window: int | None,
    ) -> None:  # fmt: skip
        batch, rows = ragged(random, chunks, page_size)
        q, k, v = random_inputs(random, batch, rows, HeadShape(heads, kv_heads, dim), dtype)
        got = ops.attention(q, k, v, batch, dim**-0.5, window)
        assert_close(got, reference(q, k, v, batch, window))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("page_size", [16, 48])
    def test_shared_pages(
        self, ops: NativeOps, random: torch.Generator, dtype: torch.dtype, page_size: int
    ) -> None:
        """Requests whose first pages are the same ones, enough of them to fill more than one unit."""
        chunks = [(1, 300 + i) for i in range(40)] + [(4, 290), (1, 100), (20, 310)]
        batch, rows = ragged(random, chunks, page_size, shared_pages=256 // page_size)
        q, k, v = random_inputs(random, batch, rows, HeadShape(6, 2, 64), dtype)
        assert_close(ops.attention(q, k, v, batch, 0.125, None), reference(q, k, v, batch, None))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("window", [None, 70])
    def test_bits_do_not_depend_on_batch_or_chunks(
        self, ops: NativeOps, random: torch.Generator, dtype: torch.dtype, window: int | None
    ) -> None:
        batch, rows = ragged(random, [(1, 90), (300, 300), (1, 300)], 16, shared_pages=3)
        q, k, v = random_inputs(random, batch, rows, HeadShape(6, 2, 64), dtype)
        whole = ops.attention(q, k, v, batch, 0.125, window)[1:301]
        done = []
        for start, stop in [(0, 1), (1, 8), (8, 60), (60, 61), (61, 299), (299, 300)]:
            part = Batch(
                token_ids=batch.token_ids, positions=batch.positions, slots=batch.slots,
                query_starts=torch.tensor([0, stop - start]).int(), context_lens=torch.tensor([stop]).int(),
                page_table=batch.page_table[1:2].contiguous(), logit_rows=batch.logit_rows,
                page_size=16, max_query_len=stop - start, max_context_len=stop,
            )  # fmt: skip
            done.append(ops.attention(q[1 + start : 1 + stop].contiguous(), k, v, part, 0.125, window))
        assert torch.equal(torch.cat(done), whole)

    def test_nan_is_not_hidden(self, ops: NativeOps, random: torch.Generator) -> None:
        batch, rows = ragged(random, [(1, 20)], 16)
        q, k, v = random_inputs(random, batch, rows, HeadShape(2, 2, 64), torch.float32)
        q[0, 1, 3] = float("nan")
        got = ops.attention(q, k, v, batch, 0.125, None)
        assert got[0, 0].isfinite().all()
        assert got[0, 1].isnan().all()


class TestLinear:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("tokens", [1, 5, 16, 200])
    @pytest.mark.parametrize(("columns", "rows"), [(64, 130), (576, 960), (18, 7)])
    def test_equals_torch(
        self,
        ops: NativeOps,
        random: torch.Generator,
        dtype: torch.dtype,
        tokens: int,
        columns: int,
        rows: int,
    ) -> None:
        weight = torch.randn(rows, columns, generator=random).to(dtype)
        bias = torch.randn(rows, generator=random).to(dtype)
        x = torch.randn(tokens, columns, generator=random).to(dtype)
        for given in (None, bias):
            handle = ops.prepare_linear(weight, given)
            want = torch.nn.functional.linear(
                x.double(), weight.double(), None if given is None else given.double()
            )
            assert_close(ops.linear(x, handle), want.to(dtype))
            torch.testing.assert_close(
                ops.linear(x, handle, torch.float32).double(), want, rtol=1e-4, atol=1e-4
            )

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_row_bits_do_not_depend_on_the_others(
        self, ops: NativeOps, random: torch.Generator, dtype: torch.dtype
    ) -> None:
        handle = ops.prepare_linear(torch.randn(200, 96, generator=random).to(dtype), None)
        x = torch.randn(230, 96, generator=random).to(dtype)
        whole = ops.linear(x, handle)
        for first, last in [(0, 1), (1, 3), (3, 20), (20, 229), (229, 230)]:
            assert torch.equal(ops.linear(x[first:last].contiguous(), handle), whole[first:last])


class TestRows:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("width", [576, 64, 37])
    def test_norms(self, ops: NativeOps, random: torch.Generator, dtype: torch.dtype, width: int) -> None:
        x, residual = (torch.randn(50, width, generator=random).to(dtype) for _ in range(2))
        weight = torch.randn(width, generator=random)
        torch_ops = TorchOps()
        assert_close(ops.norm(x, weight, 1e-5), torch_ops.norm(x, weight, 1e-5))
        ours, theirs = residual.clone(), residual.clone()
        assert_close(ops.add_norm(x, ours, weight, 1e-5), torch_ops.add_norm(x, theirs, weight, 1e-5))
        assert torch.equal(ours, theirs)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("width", [1536, 37])
    def test_silu_mul(self, ops: NativeOps, random: torch.Generator, dtype: torch.dtype, width: int) -> None:
        gate_up = 8 * torch.randn(40, 2 * width, generator=random)
        gate_up[0, :4] = torch.tensor([-1000.0, 1000.0, -88.0, 0.0])
        assert_close(ops.silu_mul(gate_up.to(dtype)), TorchOps().silu_mul(gate_up.to(dtype)))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("dim", [64, 80, 20])
    @pytest.mark.parametrize("normed", [False, True])
    def test_rope_write(
        self, ops: NativeOps, random: torch.Generator, dtype: torch.dtype, dim: int, normed: bool
    ) -> None:
        shape, tokens, rows = HeadShape(6, 2, dim), 37, 90
        qkv = torch.randn(tokens, shape.qkv_width, generator=random).to(dtype)
        angle = torch.rand(tokens, dim // 2, generator=random) * 6
        norms = [torch.rand(dim, generator=random) + 0.5 if normed else None for _ in range(2)]
        slots = torch.randperm(rows, generator=random)[:tokens]
        pools = [torch.zeros(2, rows, 2, dim, dtype=dtype) for _ in range(2)]
        got, want = (
            each.rope_write(
                qkv.clone(), shape, angle.cos(), angle.sin(), *norms, 1e-6, pool[0], pool[1], slots
            )
            for each, pool in zip((ops, TorchOps()), pools, strict=True)
        )
        assert_close(got, want)
        assert_close(pools[0], pools[1])
        assert torch.equal(pools[0][1], pools[1][1])


class TestChecks:
    def test_wrong_tensors_are_refused(self, ops: NativeOps, random: torch.Generator) -> None:
        batch, rows = ragged(random, [(1, 20)], 16)
        q, k, v = random_inputs(random, batch, rows, HeadShape(4, 2, 64), torch.float32)
        for bad in (q.double(), q.expand(2, 4, 64), q.transpose(1, 2), q[:, :3].contiguous()):
            with pytest.raises(ValueError, match=r"native|batch|attention"):
                ops.attention(bad, k, v, batch, 0.125, None)
        with pytest.raises(ValueError, match="v_pool"):
            ops.attention(q, k, v.bfloat16(), batch, 0.125, None)
        handle = ops.prepare_linear(torch.zeros(8, 8), None)
        with pytest.raises(ValueError, match="x: got"):
            ops.linear(torch.zeros(1, 9), handle)
        with pytest.raises(ValueError, match="even"):
            ops.prepare_linear(torch.zeros(8, 7, dtype=torch.bfloat16), None)

    @pytest.mark.parametrize("page", [-1, 1000])
    def test_page_outside_the_pool(self, ops: NativeOps, random: torch.Generator, page: int) -> None:
        batch, rows = ragged(random, [(1, 20)], 16)
        q, k, v = random_inputs(random, batch, rows, HeadShape(4, 2, 64), torch.float32)
        batch.page_table[0, 1] = page
        with pytest.raises(ValueError, match="page outside"):
            ops.attention(q, k, v, batch, 0.125, None)

    def test_slot_outside_the_pool(self, ops: NativeOps) -> None:
        pool, table = torch.zeros(4, 1, 8), torch.zeros(1, 4)
        with pytest.raises(ValueError, match="slot"):
            ops.rope_write(
                torch.zeros(1, 24), HeadShape(1, 1, 8), table, table, None, None, 1e-6, pool, pool,
                torch.tensor([4]),
            )  # fmt: skip


class TestBuild:
    def test_no_compiler_is_said_once_and_not_fatal(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
        compile_c.load.cache_clear()
        try:
            assert compile_c.load() is None
            assert compile_c.load() is None
        finally:
            compile_c.load.cache_clear()
        assert len(caplog.records) == 1
        assert "no C compiler" in caplog.text

    def test_builds_at_the_same_time_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        with ThreadPoolExecutor() as pool:
            both = list(pool.map(lambda _: compile_c.build(("-O0",), tmp_path), range(2)))
        assert all(isinstance(NativeOps(library), NativeOps) for library in both)
        assert [path.suffix for path in tmp_path.iterdir()] == [".so"]

    def test_failing_compiler_shows_its_message_and_leaves_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(compile_c.NativeUnavailable, match="no-such-flag"):
            compile_c.build(("--no-such-flag",), tmp_path)
        assert list(tmp_path.iterdir()) == []
