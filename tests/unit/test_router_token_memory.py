"""A tokenizer that remembers gives the ids of one that does not, whatever it saw and wherever it cuts."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece_models import metadata as sentencepiece_metadata
from text_models import ALPHABET, CHATML, default_tokenizer, metadata
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from hotprefix.engine.text import source
from hotprefix.engine.text.source import AddedToken, TokenizerSource, from_metadata
from hotprefix.engine.text.tokenizer import Special, Tokenizer
from hotprefix.router import token_memory
from hotprefix.router.remembered import Remembered
from hotprefix.router.token_memory import RememberingTokenizer, TooMuchIsNew, _pieces, cut_of

WORDS = (
    "the", " the",
    " of", "a", "I", "don't", "they'll've", "naïve", "e\u0301", "\u0301", "世界", "你好，世界。", "，",
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", ".", ".\n", "!!", "?)\n", "12345", " 7", "x1",
    "_", "-", "camelCase", "ALLCAPS", "\u00a0", "\u2003", "🙂", "\u0600", "कि", "<|im_end|>", "<|im_start|>",
    "<s>", "<tool_call>", "the man\nand the", "foo(bar)\n    return", "▁", "▁the", "'s", "s'", " '", "\nA",
    "A\n", "界\n世",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS), max_size=24).map("".join)
RUNS: st.SearchStrategy[Special] = st.sampled_from(["none", "markup", "template"])


@functools.cache
def trained(pre: str) -> TokenizerSource:
    """A vocabulary with merges over this pre-tokenizer, learnt from words that stand together."""
    library = Library(models.BPE())
    levels = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in source._SPLITS)
    if pre in source._SPLITS:
        split = pre_tokenizers.Split(Regex(source._SPLITS[pre]), "isolated")
        library.pre_tokenizer = pre_tokenizers.Sequence([split, levels])
    else:
        library.pre_tokenizer = levels
    corpus = ["".join(WORDS[(7 * i + 3 * j) % len(WORDS)] for j in range(60)) for i in range(200)]
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=ALPHABET, show_progress=False)
    library.train_from_iterator([*corpus, *("the man of the world " * 5, "\n\n\n\n", "    ")], trainer)
    learnt = json.loads(library.to_str())["model"]["merges"]
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in learnt]
    tokens = [*ALPHABET, *dict.fromkeys("".join(pair) for pair in pairs)]
    control, markup = list(CHATML), ["<tool_call>"]
    kinds = [1] * len(tokens) + [3] * len(control) + [4] * len(markup)
    return from_metadata(
        metadata(control, markup, pre=pre)
        | {
            "tokenizer.ggml.tokens": [*tokens, *control, *markup],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
            "tokenizer.ggml.bos_token_id": len(tokens),
            "tokenizer.ggml.eos_token_id": len(tokens) + 2,
        }
    )


def sources() -> dict[str, TokenizerSource]:
    found = {pre: trained(pre) for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken")}
    return {
        **found,
        "default": default_tokenizer()._source,
        "sentencepiece": from_metadata(sentencepiece_metadata()),
    }


NAMES = ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "default", "sentencepiece")


@functools.cache
def pair(name: str) -> tuple[Tokenizer, RememberingTokenizer]:
    """The plain one, and one that has seen everything that the test has."""
    return Tokenizer(sources()[name]), RememberingTokenizer(sources()[name], limit=100_000)


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_memory, "PIECE", 4)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=400, deadline=None)
@given(parts=st.lists(st.tuples(TEXTS, RUNS), max_size=4), bos=st.booleans())
def test_the_ids_are_those_of_the_plain_tokenizer(name: str, parts: list[tuple[str, Any]], bos: bool) -> None:
    plain, remembering = pair(name)
    text = "".join(part for part, _ in parts)
    runs: Sequence[tuple[str, Any]] = [(len(part), special) for part, special in parts]  # type: ignore[misc]
    expected = plain.encode_runs(text, runs)  # type: ignore[arg-type]
    for _ in range(2):
        assert remembering.encode_runs(text, runs) == expected  # type: ignore[arg-type]
    assert remembering.encode(text, special="template", bos=bos) == plain.encode(
        text, special="template", bos=bos
    )


@pytest.mark.parametrize("name", NAMES)
def test_long_texts_are_cut(name: str) -> None:
    """Otherwise the test above would show nothing."""
    _, remembering = pair(name)
    assert remembering._cut is not None
    text = "the man of the world and " * 40
    assert len(list(_pieces(text, remembering._cut))) > 100


def test_a_message_does_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between control tokens only what is new is tokenized."""
    monkeypatch.setattr(token_memory, "PIECE", 512)
    tokenizer = RememberingTokenizer(sources()["default"])
    asked: list[str] = []
    bpe = tokenizer._words

    def words(text: str, begins: bool) -> list[int]:
        asked.append(text)
        return bpe(text, begins)

    tokenizer._words = words  # type: ignore[method-assign]
    history = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n"
    runs: list[tuple[int, Special]] = [(len(history), "template")]
    tokenizer.encode_runs(history, runs)
    assert asked
    asked.clear()
    more = history + "<|im_start|>user\nNew<|im_end|>"
    tokenizer.encode_runs(more, [(len(more), "template")])
    assert "".join(asked) == "user\nNew"


def test_a_shared_beginning_of_a_long_text_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_memory, "PIECE", 64)
    tokenizer = RememberingTokenizer(sources()["default"])
    document = "the man of the world and " * 40
    tokenizer.encode(document + "first question?")
    with tokenizer.in_short(200):
        ids = tokenizer.encode(document + "another question, and a longer one?")
    assert ids == default_tokenizer().encode(document + "another question, and a longer one?")


def test_too_much_that_is_new_is_refused_in_short_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_memory, "PIECE", 512)
    tokenizer = RememberingTokenizer(sources()["default"])
    text = "the man of the world and " * 4
    with tokenizer.in_short(50), pytest.raises(TooMuchIsNew):
        tokenizer.encode(text)
    ids = tokenizer.encode(text)
    with tokenizer.in_short(0):
        assert tokenizer.encode(text) == ids
    assert tokenizer.encode(text * 2)


def test_what_is_new_is_summed_over_the_pieces() -> None:
    tokenizer = RememberingTokenizer(sources()["default"])
    with tokenizer.in_short(20), pytest.raises(TooMuchIsNew):
        tokenizer.encode("man of world and time people way day")
    with tokenizer.in_short(40):
        assert tokenizer.encode("man of world and time people way day")


@pytest.mark.parametrize(
    ("change", "cuts"),
    [
        ({}, True),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}}, False),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}}, False),
        ({"pre_tokenizer": {"type": "Whitespace"}}, False),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": ".*"}, "behavior": "Isolated"}}, False),
        ({"pre_tokenizer": None}, True),
        ({"normalizer": {"type": "Lowercase"}}, False),
        ({"normalizer": {"type": "NFC"}}, True),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, False),
    ],
    ids=str,
)
def test_only_tokenizers_that_are_known_are_cut(change: dict[str, Any], cuts: bool) -> None:
    given = trained("gpt-2")
    spec = json.loads(given.inner.to_str())
    for name, part in change.items():
        if part is not None and part["type"] == "ByteLevel":
            part = {"trim_offsets": True, **part}
        if part is not None and part["type"] == "Split":
            part = {"invert": False, **part}
        spec[name] = part
    changed = dataclasses.replace(given, inner=Library.from_str(json.dumps(spec)))
    assert (cut_of(changed, Tokenizer(given).control) is not None) is cuts


def test_an_added_token_that_goes_across_a_border_forbids_cutting() -> None:
    given = trained("gpt-2")
    control = Tokenizer(given).control
    for content, strips in (("good bye", False), ("word", True)):
        token = AddedToken(5000, content, False, lstrip=strips)
        assert cut_of(dataclasses.replace(given, added=(*given.added, token)), control) is None
    plain = AddedToken(5000, "word", False)
    assert cut_of(dataclasses.replace(given, added=(*given.added, plain)), control) is not None


def test_memory_is_bounded_and_keeps_what_is_asked_for_often() -> None:
    memory: Remembered[int, str] = Remembered(1000, lambda key, value: 10)
    memory.put(-1, "often")
    for key in range(10_000):
        memory.put(key, "once")
        assert memory.get(-1) == "often"
        assert len(memory) <= 1000 // 10 + 2
    assert memory.get(0) is None
    assert memory.get(9_999) == "once"
