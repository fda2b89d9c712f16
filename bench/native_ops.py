"""Native kernels against torch, operation by operation, as ratios measured in one run.

    .venv/bin/python bench/native_ops.py --dtype bfloat16 --repeats 9

Each line: an operation, native time and torch time (median), and the median and quartiles of the ratio
native / torch over the repeats. Both sides run in turn, so a busy moment hits both. On a machine
that others use too, `--clock cpu --threads 1` counts only the time this process really ran.
Shapes are SmolLM2-135M's; the last lines are whole steps of the default model.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch

from hotprefix.engine.batch import Batch
from hotprefix.engine.kvpool import KVPool
from hotprefix.engine.model.files import resolve_model
from hotprefix.engine.model.loader import load_model
from hotprefix.engine.model.ops import HeadShape, Ops
from hotprefix.engine.model.torch_ops import TorchOps
from hotprefix.engine.native import compile_c
from hotprefix.engine.native.native_ops import NativeOps

SHAPE = HeadShape(9, 3, 64)
HIDDEN, INNER, VOCABULARY, PAGE = 576, 1536, 49152, 16
PROJECTIONS = {
    "qkv": (HIDDEN, SHAPE.qkv_width),
    "output": (HIDDEN, HIDDEN),
    "gate_up": (HIDDEN, 2 * INNER),
    "down": (INNER, HIDDEN),
    "head": (HIDDEN, VOCABULARY),
}
BATCHES = {
    "decode B=1, 600 each": ([(1, 600)], 0),
    "decode B=8, 600 each": ([(1, 600)] * 8, 0),
    "decode B=16, 600 each": ([(1, 600)] * 16, 0),
    "decode B=16, 512 of 600 shared": ([(1, 600)] * 16, 512),
    "prefill 532": ([(532, 532)], 0),
    "prefill 2048": ([(2048, 2048)], 0),
    "15 decodes and a chunk of 256": ([(1, 600)] * 15 + [(256, 600)], 0),
}
Case = tuple[str, Callable[[], object], Callable[[], object]]


def make_batch(chunks: list[tuple[int, int]], shared: int) -> Batch:
    """(new tokens, context) requests in scattered pages, the first `shared` tokens in the same ones."""
    counts = [-(-context // PAGE) for _, context in chunks]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    table = torch.zeros(len(chunks), max(counts), dtype=torch.int32)
    for r, end in enumerate(itertools.accumulate(counts)):
        table[r, : counts[r]] = order[end - counts[r] : end]
        table[r, : shared // PAGE] = table[0, : shared // PAGE]
    positions = torch.cat([torch.arange(context - new, context) for new, context in chunks]).int()
    news = torch.tensor([new for new, _ in chunks])
    owner = torch.repeat_interleave(torch.arange(len(chunks)), news)
    ends = news.cumsum(0)
    return Batch(
        token_ids=torch.randint(0, VOCABULARY, (len(positions),)).int(),
        positions=positions,
        slots=table[owner, positions // PAGE].long() * PAGE + positions % PAGE,
        query_starts=torch.cat([torch.zeros(1), ends]).int(),
        context_lens=torch.tensor([context for _, context in chunks]).int(),
        page_table=table,
        logit_rows=ends - 1,
        page_size=PAGE,
        max_query_len=int(news.max()),
        max_context_len=max(context for _, context in chunks),
    )


def linear_cases(native: NativeOps, plain: TorchOps, dtype: torch.dtype) -> Iterator[Case]:
    """As many copies of each weight as exceed the caches, so that decodes read memory as in a step."""
    for name, (columns, rows) in PROJECTIONS.items():
        copies = max(1, 64_000_000 // (columns * rows * dtype.itemsize))
        weights = [torch.randn(rows, columns).to(dtype) for _ in range(copies)]
        handles = [[ops.prepare_linear(w, None) for w in weights] for ops in (native, plain)]
        for tokens in (1, 8, 16, 532, 2048):
            if tokens > 16 and name == "head":
                continue
            x = torch.randn(tokens, columns).to(dtype)
            used = slice(None) if tokens <= 16 else slice(2)
            yield (
                f"linear {name} [{tokens}, {columns}] -> {rows}, x{len(weights[used])}",
                lambda x=x, hs=handles[0][used]: [native.linear(x, h) for h in hs],  # type: ignore[misc]
                lambda x=x, hs=handles[1][used]: [plain.linear(x, h) for h in hs],  # type: ignore[misc]
            )


def layer_cases(native: NativeOps, plain: TorchOps, dtype: torch.dtype) -> Iterator[Case]:
    """Attention and the row operations of one layer."""
    for name, (chunks, shared) in BATCHES.items():
        batch = make_batch(chunks, shared)
        rows = (int(batch.page_table.max()) + 1) * PAGE
        k, v = (torch.randn(rows, SHAPE.kv_heads, SHAPE.head_dim).to(dtype) for _ in range(2))
        q = torch.randn(batch.tokens, SHAPE.heads, SHAPE.head_dim).to(dtype)

        def attend(ops: Ops, q=q, k=k, v=v, batch=batch) -> object:  # type: ignore[no-untyped-def]
            return ops.attention(q, k, v, batch, 0.125, None)

        yield f"attention {name}", lambda f=attend: f(native), lambda f=attend: f(plain)  # type: ignore[misc]
    for tokens in (1, 16, 532):
        x, residual = (torch.randn(tokens, HIDDEN).to(dtype) for _ in range(2))
        gate_up, weight = torch.randn(tokens, 2 * INNER).to(dtype), torch.ones(HIDDEN)
        qkv, table = torch.randn(tokens, SHAPE.qkv_width).to(dtype), torch.rand(tokens, SHAPE.head_dim // 2)
        pools = torch.zeros(2, 4096, SHAPE.kv_heads, SHAPE.head_dim, dtype=dtype)
        slots = torch.randperm(4096)[:tokens]

        def norm(ops: Ops, x=x, residual=residual, weight=weight) -> object:  # type: ignore[no-untyped-def]
            return ops.add_norm(x, residual.zero_(), weight, 1e-5)

        def activate(ops: Ops, gate_up=gate_up) -> object:  # type: ignore[no-untyped-def]
            return ops.silu_mul(gate_up)

        def rope(ops: Ops, qkv=qkv, table=table, pools=pools, slots=slots) -> object:  # type: ignore[no-untyped-def]
            return ops.rope_write(qkv, SHAPE, table, table, None, None, 1e-5, pools[0], pools[1], slots)

        for name, run in {"add_norm": norm, "silu_mul": activate, "rope_write": rope}.items():
            yield f"{name} T={tokens}", lambda f=run: f(native), lambda f=run: f(plain)  # type: ignore[misc]


def step_cases(native: NativeOps, plain: TorchOps, dtype: torch.dtype) -> Iterator[Case]:
    """Whole forward passes with logits."""
    name = str(dtype).removeprefix("torch.")
    decoders = [load_model(resolve_model(), name, "cpu", ops).decoder for ops in (native, plain)]
    config = decoders[0].config
    for title, (chunks, shared) in BATCHES.items():
        batch = make_batch(chunks, shared)
        pages = int(batch.page_table.max()) + 1
        pool = KVPool.allocate(config, pages, PAGE, dtype, torch.device("cpu"))
        runs = [lambda d=d, b=batch, p=pool: d.forward(b, p) for d in decoders]
        yield f"step {title}", runs[0], runs[1]


def measure(case: Case, repeats: int, clock: Callable[[], float]) -> None:
    name, *runs = case
    times: list[list[float]] = [[], []]
    for turn in range(repeats + 1):
        for side, run in enumerate(runs):
            start = clock()
            run()
            if turn:
                times[side].append(clock() - start)
    ratios = sorted(ours / theirs for ours, theirs in zip(*times, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    ours, theirs = (statistics.median(side) * 1e3 for side in times)
    print(f"{name:48} {ours:9.3f} ms {theirs:9.3f} ms  {middle:5.2f} [{low:.2f}, {high:.2f}]", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9, help="at least 2")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--only", default="", help="only operations whose line starts with this")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    library = compile_c.load()
    if library is None:
        return 1
    native, plain, dtype = NativeOps(library), TorchOps(), getattr(torch, given.dtype)
    clock = time.perf_counter if given.clock == "wall" else time.process_time
    print(f"{given.dtype}, {given.threads} threads, {given.clock} clock; native, torch, native / torch")
    with torch.inference_mode():
        for cases in (linear_cases, layer_cases, step_cases):
            for case in cases(native, plain, dtype):
                if case[0].startswith(given.only):
                    measure(case, given.repeats, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
