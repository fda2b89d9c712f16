"""SentencePiece vocabularies in the three forms that models come in. Not a test itself.

Each puts a blank before the first word of a text: GGUF by its metadata, `legacy` by a `Prepend`
normalizer, `metaspace` by the pre-tokenizer of that name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hotprefix.engine.text.source import from_metadata
from hotprefix.engine.text.tokenizer import Tokenizer

FORMS = ("gguf", "legacy", "metaspace")
CONTROL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]")
WORDS = (
    "▁hello", "hello", "▁world", "▁yes", "yes", "▁no", "no", '{"', '▁"', '":', '"}', "name", "▁name",
    "arguments", "▁arguments", "<tool", "_call", "Answer", "▁Answer", "▁▁",
)  # fmt: skip


def pieces() -> list[str]:
    """Control tokens, the 256 bytes, the characters, and every step of the merges to `WORDS`."""
    found = dict.fromkeys([*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))])
    texts = "".join(WORDS) + "".join(map(chr, range(33, 127)))
    found |= dict.fromkeys(sorted(set(texts)))
    found |= dict.fromkeys(word[:n] for word in WORDS for n in range(2, len(word) + 1))
    return list(found)


def metadata() -> dict[str, Any]:
    tokens = pieces()
    kinds = [2, *[3] * (len(CONTROL) - 1), *[6] * 256]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": kinds + [1] * (len(tokens) - len(kinds)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentencepiece(form: str, folder: Path) -> Tokenizer:
    """The vocabulary in one of `FORMS`; folder: where the directories of the last two are written."""
    source = from_metadata(metadata())
    if form == "gguf":
        return Tokenizer(source)
    spec = json.loads(source.bpe.to_str())
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if form == "legacy":
        spec["normalizer"] = {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, blanks],
        }
    else:
        spec["normalizer"] = None
        spec["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "first",
            "split": False,
        }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spec["added_tokens"] = [{"id": i, "content": text, **flags} for i, text in enumerate(CONTROL)]
    path = folder / form
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(spec), "utf-8")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps(names), "utf-8")
    return Tokenizer.load(path)
