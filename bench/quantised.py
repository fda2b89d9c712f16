"""Decode with quantised weights against dense ones: text quality, then speed, measured in one run.

    .venv/bin/python bench/quantised.py --threads 1 --clock cpu --repeats 31

Quality: perplexity of this repository's own prose and code, token by token through the decode path, some
windows side by side; and how many logits differ between the dense and the quantised run. Speed: whole
decode steps of the default model with 600 tokens of context, quantised and dense in turn: medians, and
the median and quartiles of the ratio quantised / dense.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hotprefix.engine.batch import Batch
from hotprefix.engine.kvpool import KVPool
from hotprefix.engine.model.files import resolve_model
from hotprefix.engine.model.forward import Decoder
from hotprefix.engine.model.loader import load_model
from hotprefix.engine.native import compile_c
from hotprefix.engine.native.native_ops import NativeOps
from hotprefix.engine.text.tokenizer import Tokenizer
from native_ops import PAGE, make_batch, measure

WINDOWS, WINDOW = 4, 768
PROSE = ("CONTRIBUTING.md", "docs/ARCHITECTURE.md", "docs/api.md", "docs/stores.md")
CODE = ("engine/batch.py", "engine/model/forward.py", "engine/native/linear.c", "engine/native/compile_c.py")


def load(dtype: str, weights: str, ops: NativeOps) -> Decoder:
    return load_model(resolve_model(), dtype, "cpu", ops, decode_weights=weights).decoder


def windows() -> Tensor:
    """Token ids [WINDOWS, WINDOW + 1], the first half of them prose, the second code."""
    root = Path(__file__).parent.parent
    tokenizer = Tokenizer.load(resolve_model().path)
    rows = []
    for names, folder in ((PROSE, root), (CODE, root / "src/hotprefix")):
        ids = tokenizer.encode("\n\n".join((folder / name).read_text("utf-8") for name in names))
        size = WINDOW + 1
        rows += [ids[i * size : (i + 1) * size] for i in range(WINDOWS // 2)]
    return torch.tensor(rows)


def token_by_token(decoder: Decoder, ids: Tensor) -> Iterator[Tensor]:
    """Logits [WINDOWS, V] after each token, every window a request of its own."""
    count, pages = len(ids), -(-WINDOW // PAGE)
    pool = KVPool.allocate(decoder.config, count * pages, PAGE, decoder.dtype, decoder.device)
    table = torch.arange(count * pages).view(count, pages).int()
    for at in range(WINDOW):
        where = torch.full((count,), at).int()
        yield decoder.forward(
            Batch(
                token_ids=ids[:, at].int(), positions=where, page_size=PAGE, page_table=table,
                slots=table[:, at // PAGE].long() * PAGE + at % PAGE, context_lens=where + 1,
                query_starts=torch.arange(count + 1).int(), logit_rows=torch.arange(count),
                max_query_len=1, max_context_len=at + 1,
            ),
            pool,
        )  # fmt: skip


def quality(ids: Tensor, dtype: str, decoders: dict[str, Decoder]) -> None:
    sums, differing = dict.fromkeys(decoders, 0.0), 0
    runs = zip(*(token_by_token(decoder, ids) for decoder in decoders.values()), strict=True)
    for at, logits in enumerate(runs):
        for name, values in zip(decoders, logits, strict=True):
            loss = torch.nn.functional.cross_entropy(values, ids[:, at + 1], reduction="sum")
            sums[name] += float(loss)
        differing += int((logits[0] != logits[1]).sum())
    tokens = ids.shape[0] * WINDOW
    for name, total in sums.items():
        print(f"{dtype:9} {name:9} perplexity {math.exp(total / tokens):.6f} over {tokens} tokens")
    print(f"{dtype:9} {differing} of {tokens * logits[0].shape[1]} logits differ", flush=True)


def speed(dtype: str, decoders: dict[str, Decoder], given: argparse.Namespace) -> None:
    clock = time.perf_counter if given.clock == "wall" else time.process_time
    print(f"{dtype}, {given.threads} threads, {given.clock} clock; quantised, dense, quantised / dense")
    for requests in given.batches:
        batch = make_batch([(1, 600)] * requests, 0)
        dense, quantised = decoders["dense"], decoders["quantised"]
        pages = int(batch.page_table.max()) + 1
        pool = KVPool.allocate(dense.config, pages, PAGE, dense.dtype, dense.device)
        runs = [lambda d=d, b=batch, p=pool: d.forward(b, p) for d in (quantised, dense)]
        measure((f"decode step B={requests}, 600 each", runs[0], runs[1]), given.repeats, clock)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=31, help="at least 2")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--no-quality", action="store_true", help="speed only")
    parser.add_argument("--flags", default="", help="for the compiler, to measure another instruction set")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    ops = NativeOps(compile_c.build(given.flags.split()))
    ids = windows()
    with torch.inference_mode():
        for dtype in given.dtypes:
            decoders = {weights: load(dtype, weights, ops) for weights in ("dense", "quantised")}
            if not given.no_quality:
                quality(ids, dtype, decoders)
            speed(dtype, decoders, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
