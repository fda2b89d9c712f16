"""End tokens: what the files name, and the known ends of a turn that the chat template writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_cases import write_metadata
from text_models import metadata

from hotprefix.engine.text.source import from_metadata
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.engine.text.turn_ends import with_turn_ends

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
BASE_END, TURN_END = 258, 257


def chat(template: str | None = TEMPLATE, **extra: Any) -> dict[str, Any]:
    """Metadata of a chat model whose EOS is the base model's, the last of its control tokens."""
    more = {} if template is None else {"chat_template": template}
    return metadata(("<|im_start|>", "<|im_end|>", "<|endoftext|>"), **more, **extra)


def test_the_template_s_end_of_turn_ends_an_output() -> None:
    source = with_turn_ends(from_metadata(chat()))
    assert source.eos_ids == {BASE_END, TURN_END}
    assert source.eos_id == BASE_END


@pytest.mark.parametrize("template", [None, "{{ messages }}<|im_start|>"])
def test_a_token_that_the_template_does_not_write_ends_nothing(template: str | None) -> None:
    assert with_turn_ends(from_metadata(chat(template))).eos_ids == {BASE_END}


def test_other_control_tokens_of_a_template_end_nothing() -> None:
    source = with_turn_ends(from_metadata(chat(TEMPLATE + "<|endoftext|>")))
    assert 256 not in source.eos_ids


def test_an_end_of_turn_is_never_shown_as_text() -> None:
    """A converter that calls it user-defined would have it printed at the end of each answer."""
    keys = chat()
    keys["tokenizer.ggml.token_type"][TURN_END] = 4
    tokenizer = Tokenizer(with_turn_ends(from_metadata(keys)))
    assert tokenizer.decode([ord("a"), TURN_END]) == "a"


def test_loading_a_gguf_file_adds_them(tmp_path: Path) -> None:
    keys = chat()
    keys["tokenizer.ggml.tokens"].append("ab")
    keys["tokenizer.ggml.token_type"].append(1)
    files = write_metadata(tmp_path, {**keys, "tokenizer.ggml.merges": ["a b"]})
    assert Tokenizer.load(files.path).eos_ids == {BASE_END, TURN_END}


@pytest.mark.parametrize(
    ("generation", "expected"),
    [({"eos_token_id": [2, 0]}, {0, 1, 2}), ({"eos_token_id": 0}, {0, 1}), ({}, {1}), (None, {1})],
)
def test_directories_name_them_in_three_files(
    generation: dict[str, Any] | None, expected: set[int], tmp_path: Path
) -> None:
    """The configuration of generation says a number or a list; the chat template adds <|im_end|>."""
    texts = ["<|endoftext|>", "<|im_end|>", "<|stop|>"]
    added = [{"id": i, "content": text, "special": True} for i, text in enumerate(texts)]
    model = {"type": "BPE", "vocab": {"a": 3}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (tmp_path / "config.json").write_text("{}")
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert Tokenizer.load(tmp_path).eos_ids == expected
