"""Tokenizers for the text tests: the default model's, and toys over single bytes. Not a test itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from hotprefix.engine.model.files import resolve_model
from hotprefix.engine.text.source import from_metadata
from hotprefix.engine.text.tokenizer import Tokenizer, _byte_alphabet

ALPHABET = [character for _, character in sorted(_byte_alphabet())]


@functools.cache
def default_tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model().path)


def metadata(
    control: Sequence[str], markup: Sequence[str] = (), *, pre: str = "gpt-2", **extra: Any
) -> dict[str, Any]:
    """GGUF metadata of a vocabulary whose ids 0 to 255 are the bytes; then come `control` (the first is
    BOS, the last EOS) and `markup`."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*ALPHABET, *control, *markup],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(control) + [4] * len(markup),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 255 + len(control),
        "tokenizer.ggml.add_bos_token": False,
    } | {f"tokenizer.{k.replace('__', '.')}": v for k, v in extra.items()}


def toy(control: Sequence[str], markup: Sequence[str] = (), **extra: Any) -> Tokenizer:
    return Tokenizer(from_metadata(metadata(control, markup, **extra)))


CHATML = ("<s>", "<|im_start|>", "<|im_end|>")
