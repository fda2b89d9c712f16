"""Small random models and hand-made plans for the model and executor tests. Not a test itself."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hotprefix.engine.executor import Sampled, StepResult
from hotprefix.engine.kvpool import KVPool
from hotprefix.engine.model.files import ModelFiles
from hotprefix.engine.model.loader import LoadedModel, load_model
from hotprefix.engine.model.ops import Ops
from hotprefix.engine.model.torch_ops import TorchOps
from hotprefix.engine.native import compile_c
from hotprefix.engine.native.native_ops import NativeOps
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.torch_executor import TorchExecutor
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.plan import Chunk, StepPlan

_SMALL = {
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
    "attn_implementation": "eager",
}


def reference_model(family: str, **overrides: Any) -> Any:
    """A transformers model of the family with random float32 weights, in eval mode."""
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**{**_SMALL, **overrides})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.float().eval()


def save(model: Any, folder: Path, **options: Any) -> ModelFiles:
    model.save_pretrained(folder, **options)
    return ModelFiles(folder.name, "hf", folder)


def load_like(model: Any, folder: Path, ops: Ops | None = None, dtype: str = "float32") -> LoadedModel:
    return load_model(save(model, folder), dtype, "cpu", ops, cache_dir=folder / "cache")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from two threads, and on a busy machine those crawl."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_ops(kind: str) -> Ops:
    """kind "torch" or "native"; skips the test where native kernels do not build."""
    if kind == "torch":
        return TorchOps()
    library = compile_c.load()
    if library is None:
        pytest.skip("native kernels do not build here")
    return NativeOps(library)


class GreedySampler:
    """The likeliest token of each row; remembers the logits it saw."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []
        self.known: set[str] = set()

    def start(self, request: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self.known.add(request)

    def sample(self, rows: list[str], logits: torch.Tensor) -> list[Sampled]:
        assert logits.dtype == torch.float32
        assert len(rows) == len(logits)
        assert set(rows) <= self.known
        self.logits.append(logits.clone())
        return [Sampled(int(token)) for token in logits.argmax(-1)]

    def finish(self, request: str) -> None:
        self.known.discard(request)


class Sequencer:
    """One request fed by hand: knows its row, its pages (any order) and how far it is."""

    def __init__(self, name: str, row: int, prompt: Sequence[int], pages: Iterable[int], page: int) -> None:
        self.name, self.row, self.page = name, row, page
        self.tokens, self.prompt_len, self.computed = list(prompt), len(prompt), 0
        self._pages, self._taken = list(pages), 0

    def chunk(self, size: int) -> Chunk:
        """The next `size` tokens at most, with only the pages not told before."""
        stop = min(self.computed + size, len(self.tokens))
        need = -(-stop // self.page)
        part = Chunk(
            request=self.name,
            row=self.row,
            start=self.computed,
            tokens=tk.encode(self.tokens[self.computed : stop]),
            table_from=self._taken,
            table=tuple(self._pages[self._taken : need]),
            samples=stop == len(self.tokens),
            prefill=self.computed < self.prompt_len,
        )
        self._taken, self.computed = max(need, self._taken), stop
        return part

    def reuse(self, tokens: int) -> None:
        """Take the first tokens' KV as already there (its pages are told with the next chunk)."""
        self.computed = tokens

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


_steps = itertools.count()


def step(executor: TorchExecutor, parts: Sequence[tuple[Sequencer, int]]) -> StepResult:
    """Run one plan of (request, chunk size) and append the sampled tokens."""
    result = executor.execute(StepPlan(next(_steps), tuple(request.chunk(size) for request, size in parts)))
    for request, _ in parts:
        if request.name in result.sampled:
            request.tokens.append(result.sampled[request.name].token)
    return result


def executor_for(loaded: LoadedModel, pages: int, page: int) -> tuple[TorchExecutor, GreedySampler]:
    decoder, sampler = loaded.decoder, GreedySampler()
    pool = KVPool.allocate(decoder.config, pages, page, decoder.dtype, decoder.device)
    return TorchExecutor(decoder, pool, sampler), sampler


def run(
    executor: TorchExecutor,
    request: Sequencer,
    outputs: int,
    chunk: int,
    params: SamplingParams | None = None,
) -> list[int]:
    """Prefill in chunks and decode alone."""
    executor.start(request.name, request.tokens, params or SamplingParams())
    while len(request.output) < outputs:
        step(executor, [(request, chunk)])
    return request.output
