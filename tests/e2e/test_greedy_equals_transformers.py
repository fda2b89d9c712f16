"""The default model in float32: greedy tokens equal transformers' `generate()`, however they are batched.

transformers reads the GGUF file by itself, so our loading, row order and arithmetic are all checked.
float32 sums in another order move a logit by some 1e-4; a test first asserts that the reference's best
and second token are further apart than MARGIN at every step, so equality cannot hang on a tie.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from hotprefix.engine.executor import Sampled
from hotprefix.engine.kvpool import KVPool
from hotprefix.engine.model.files import DEFAULT_MODEL, resolve_model
from hotprefix.engine.model.loader import load_model
from hotprefix.engine.native import compile_c
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.torch_executor import TorchExecutor
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.plan import Chunk, StepPlan

OUTPUTS, PAGE, PAGES, MARGIN = 64, 16, 64, 2e-3
PROMPTS = {
    "The lighthouse keeper climbed the stairs every evening. One night":
        [504, 33059, 40061, 30324, 260, 24224, 897, 9053, 30, 1963, 3163],
    "A short list of the planets, ordered by their distance from the sun:":
        [49, 1890, 1398, 282, 260, 9244, 28, 8885, 411, 480, 4052, 429, 260, 2388, 42],
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n":
        [1604, 3987, 46477, 24, 94, 727, 472, 1620, 14362, 260, 304, 29, 373, 24681, 46477, 1230, 7996, 198],
}  # fmt: skip
LLAMA = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Reference:
    prompt: list[int]
    output: list[int]


class Greedy:
    def start(self, request: str, prompt: Sequence[int], params: SamplingParams) -> None: ...

    def sample(self, rows: list[str], logits: torch.Tensor) -> list[Sampled]:
        return [Sampled(int(token)) for token in logits.argmax(-1)]

    def finish(self, request: str) -> None: ...


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads that wait for each other crawl on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()
    path = str(resolve_model(DEFAULT_MODEL).path)
    model.load_state_dict(load_gguf_checkpoint(path, True, model, torch.float32)["tensors"], strict=False)
    model.tie_weights()
    found = []
    for text, prompt in PROMPTS.items():
        run = model.generate(
            torch.tensor([prompt]), max_new_tokens=OUTPUTS, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        best = torch.cat(run.logits).topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > MARGIN, f"a near tie: change the prompt {text!r}"
        found.append(Reference(prompt, run.sequences[0, len(prompt) :].tolist()))
    return found


def make_executor(dtype: str) -> TorchExecutor:
    decoder = load_model(resolve_model(DEFAULT_MODEL), dtype, "cpu").decoder
    pool = KVPool.allocate(decoder.config, PAGES, PAGE, decoder.dtype, decoder.device)
    return TorchExecutor(decoder, pool, Greedy())


@pytest.fixture(scope="module")
def executor() -> TorchExecutor:
    return make_executor("float32")


def generate(
    executor: TorchExecutor, prompts: Sequence[list[int]], chunk: int, stagger: int = 0
) -> list[list[int]]:
    """Run all prompts in common steps; request i joins at step i * stagger; pages are scattered."""
    order = random.Random(chunk).sample(range(PAGES), PAGES)
    known = [list(prompt) for prompt in prompts]
    done, told, now = [0] * len(known), [0] * len(known), 0
    while any(len(text) < len(prompt) + OUTPUTS for text, prompt in zip(known, prompts, strict=True)):
        chunks = []
        for i, text in enumerate(known):
            if now < i * stagger or len(text) == len(prompts[i]) + OUTPUTS:
                continue
            stop = min(done[i] + chunk, len(text))
            pages = order[i :: len(known)][told[i] : -(-stop // PAGE)]
            chunks.append(
                Chunk(f"r{i}", i, done[i], tk.encode(text[done[i] : stop]), told[i], tuple(pages),
                      stop == len(text), done[i] < len(prompts[i]))
            )  # fmt: skip
            done[i], told[i] = stop, told[i] + len(pages)
        result = executor.execute(StepPlan(now, tuple(chunks)))
        for name, sampled in result.sampled.items():
            known[int(name[1:])].append(sampled.token)
        now += 1
    return [text[len(prompt) :] for text, prompt in zip(known, prompts, strict=True)]


def test_alone(executor: TorchExecutor, references: list[Reference]) -> None:
    for reference in references:
        assert generate(executor, [reference.prompt], chunk=10_000) == [reference.output]


@pytest.mark.parametrize(("chunk", "stagger"), [(1000, 0), (3, 0), (7, 5)])
def test_mixed_batches_with_odd_chunks(
    executor: TorchExecutor, references: list[Reference], chunk: int, stagger: int
) -> None:
    expected = [reference.output for reference in references]
    assert generate(executor, [reference.prompt for reference in references], chunk, stagger) == expected


def test_bfloat16_tokens_do_not_depend_on_batching() -> None:
    """No tolerance: native kernels sum a row in one order whatever is computed beside it."""
    if compile_c.load() is None:
        pytest.skip("native kernels do not build here; torch's sums depend on the batch's shape")
    executor, prompts = make_executor("bfloat16"), list(PROMPTS.values())
    expected = [generate(executor, [prompt], chunk=1000)[0] for prompt in prompts]
    assert generate(executor, prompts, chunk=5, stagger=3) == expected
