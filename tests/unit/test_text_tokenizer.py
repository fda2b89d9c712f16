"""Tokenizers from GGUF and from Hugging Face directories, against the libraries that define them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from text_models import ALPHABET, CHATML, default_tokenizer, metadata, toy

from hotprefix.engine.model.files import resolve_model
from hotprefix.engine.text.gguf_meta import read_metadata
from hotprefix.engine.text.source import from_metadata
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.errors import InputError, ModelLoadError

SAMPLES = [
    "Hello world",
    " leading and trailing ",
    "  two  blanks 12 345 6",
    "def f(x):\n\treturn x ** 2  # squared, 1e-9\n\n\n",
    "café naïve Ångström e\u0301 \u00a0 \u200b|",
    "日本語のテキスト、한국어 и кириллица",
    "😀 👩‍👩‍👧‍👦 🇩🇪 ½ ² ③ १२३",
    "\r\n \t \n",
    "I'LL don't we've 's'S",
    "a" * 500,
    '{"k": [1, 2.50, null], \'x\': "\\u0041"}',
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi 2024<|im_end|>\n",
    "<|im_start|><|im_start|> <|im_end|",
    "<file_sep><filename>x.py\n",
]


@pytest.fixture(scope="module")
def reference() -> tokenizers.Tokenizer:
    """transformers' own conversion of the same GGUF file. It knows no pre-tokenizer but GPT-2's, so the
    single digits of this vocabulary (`tokenizer.ggml.pre` smollm) are put before it here."""
    from transformers import AutoTokenizer

    path = resolve_model().path
    loaded = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    backend = loaded.backend_tokenizer
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return backend


@pytest.mark.parametrize("text", SAMPLES)
def test_default_model_ids_equal_transformers(reference: tokenizers.Tokenizer, text: str) -> None:
    ours = default_tokenizer()
    ids = ours.encode(text, special="template")
    assert ids == reference.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.decode(ids) == reference.decode(ids)


@settings(max_examples=200)
@given(st.text() | st.text("ab 1'\n\t<|>\u00e9日"))
def test_any_text_equals_transformers_and_comes_back(reference: tokenizers.Tokenizer, text: str) -> None:
    ours = default_tokenizer()
    ids = ours.encode(text)
    assert ids == reference.encode(text, add_special_tokens=False).ids
    known = {table[0] for table in ours.token_bytes if len(table) == 1}
    if known.issuperset(text.encode()):  # the vocabulary lacks 21 of the bytes; no text has them but noise
        assert ours.decode(ids) == text


def test_default_model_facts() -> None:
    ours = default_tokenizer()
    assert (ours.size, ours.bos_id, ours.eos_ids, ours.add_bos) == (49152, 1, {2}, False)
    assert ours.special_ids == frozenset(range(17))
    assert ours.text_of(2) == "<|im_end|>"
    assert "default" in ours.templates


# -- control tokens -------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.lists(st.sampled_from([*CHATML, "<tool_call>", "<|", "im_end", "|>", " ", "\n", "x"])).map("".join))
def test_plain_text_never_becomes_a_control_token(text: str) -> None:
    for pre in ("gpt-2", "llama-bpe"):
        ours = toy(CHATML, ["<tool_call>", "\t\t"], pre=pre)
        ids = ours.encode(text)
        assert all(i < 256 for i in ids)
        assert ours.decode(ids) == text


def test_a_control_token_that_is_a_plain_word_is_not_looked_up(tmp_path: Path) -> None:
    """Llama-3's BPE takes whole words from the vocabulary before it merges."""
    ours = toy(("<s>", "EOT", "</s>"), pre="llama-bpe")
    assert ours.encode("EOT") == [ALPHABET.index(c) for c in "EOT"]
    spec = json.loads((directory(tmp_path) / "tokenizer.json").read_text())
    spec["model"] |= {"ignore_merges": True, "vocab": spec["model"]["vocab"] | {"EOT": 260}}
    spec["added_tokens"].append(spec["added_tokens"][0] | {"id": 260, "content": "EOT"})
    loaded = Tokenizer.load(directory(tmp_path, tokenizer=spec))
    assert loaded.encode("EOT") == ours.encode("EOT")
    assert loaded.encode("EOT", special="template") == [260]


def test_template_text_does_and_the_longest_wins() -> None:
    ours = toy(["<s>", "<a>", "<a><b>", "</s>"], ["<tool>", "  "])
    assert ours.encode("<a><b>x<a><tool>", special="template") == [258, 120, 257, 260]
    assert ours.encode("<a>  x") == [60, 97, 62, 261, 120]
    assert ours.decode([257, 120, 260]) == "x<tool>"
    assert ours.decode([257, 120], skip_special_tokens=False) == "<a>x"


def test_tokens_that_strip_blanks_do_so_as_in_the_library(tmp_path: Path) -> None:
    spec = json.loads((directory(tmp_path) / "tokenizer.json").read_text())
    for token, strips in zip(spec["added_tokens"], ("lstrip", "rstrip", "none", "both"), strict=True):
        token["lstrip"], token["rstrip"] = strips in ("lstrip", "both"), strips in ("rstrip", "both")
    word = spec["added_tokens"][3] | {"id": 260, "content": "WORD", "special": False}
    spec["added_tokens"].append(word)
    ours = Tokenizer.load(directory(tmp_path, tokenizer=spec))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.no_truncation()
    for text in (
        "a  <s>  b",
        " <|im_start|> \n<|im_start|>  x",
        " <|im_end|> <think>  ",
        "<s> <s><think> <s>",
        " WORD a  WORD  <s> WORD WORD  ",
    ):
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, special="template") == expected
        for cut in range(len(text)):  # the blanks may be a caller's: they belong to the token all the same
            mark = text.find("<", cut)
            runs = [(cut, "none"), (len(text) - cut, "template")]
            if not text[:cut].strip(" \na") and mark >= 0:
                assert ours.encode_runs(text, runs) == expected  # type: ignore[arg-type]


def test_a_token_across_two_parts_is_text_and_hides_no_other() -> None:
    ours = toy(["<s>", "<a>", "<a>x", "x<a>", "</s>"], ["<t>"])
    assert ours.encode_runs("<a>x<a>", [(3, "template"), (1, "none"), (3, "template")]) == [257, 120, 257]
    assert ours.encode_runs("<a>", [(1, "template"), (2, "none")]) == [60, 97, 62]
    assert ours.encode_runs("<t><a><t>", [(6, "markup"), (3, "none")]) == [261, 60, 97, 62, 60, 116, 62]


def test_bos_comes_at_most_once() -> None:
    ours = toy(CHATML, ggml__add_bos_token=True)
    assert ours.encode("x", special="template", bos=True) == [256, 120]
    assert ours.encode("<s>x", special="template", bos=True) == [256, 120]
    assert ours.encode("", bos=True) == [256]
    assert ours.encode("x") == [120]
    assert toy(CHATML).encode("x", bos=True) == [120]


def test_ids_beyond_the_tokenizers_have_no_text_and_negative_ones_are_refused() -> None:
    """A model's vocabulary is often padded (Qwen2.5: 151,936 rows for 151,665 tokens)."""
    assert toy(CHATML).decode([65, 259, 2**63, 66]) == toy(CHATML).decode([65, 66])
    with pytest.raises(InputError, match="token id -1: ids start at 0"):
        toy(CHATML).decode([65, -1])


# -- pre-tokenizers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a 123 b", ["a", " 123", " b"]),
        ("smollm", "a 12 b", ["a", " ", "1", "2", " b"]),
        ("llama-bpe", "a 1234 b's\n\nC", ["a", " ", "123", "4", " b", "'s", "\n\n", "C"]),
        ("qwen2", "a 12 b'S \n x", ["a", " ", "1", "2", " b", "'S", " \n", " x"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
    ],
)
def test_pre_tokenizers_cut_as_their_models_do(pre: str, text: str, pieces: list[str]) -> None:
    bpe = from_metadata(metadata(CHATML, pre=pre)).bpe
    alphabet = {c: bytes([b]) for b, c in enumerate(ALPHABET)}
    cut = [
        b"".join(alphabet[c] for c in part).decode() for part, _ in bpe.pre_tokenizer.pre_tokenize_str(text)
    ]
    assert cut == pieces


def test_sentencepiece_vocabulary() -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "ello", "▁hello", "▁▁"]
    scores = [0.0] * len(pieces) + [-9.0] * 5 + [-2.0, -3.0, -4.0, -5.0, -1.0, -6.0]
    meta = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*pieces, *words],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    ours = Tokenizer(from_metadata(meta))
    at = {p: i for i, p in enumerate([*pieces, *words])}
    assert ours.encode("hello", bos=True) == [1, at["▁hello"]]
    assert ours.encode("hello  é", bos=False) == [at["▁hello"], at["▁▁"], 3 + 0xC3, 3 + 0xA9]
    assert ours.encode("<s>hello</s>hello", special="template") == [
        1,
        at["h"],
        at["ello"],
        2,
        at["h"],
        at["ello"],
    ]
    assert 1 not in ours.encode("<s>")
    assert ours.decode(ours.encode("hello  é")) == "hello  é"
    assert ours.decode(ours.encode(" hello")) == " hello"


# -- Hugging Face directories ---------------------------------------------------------------------


def directory(path: Path, **changes: Any) -> Path:
    """The toy ChatML vocabulary as a directory. changes: file name (without .json) to content."""
    model = {"type": "BPE", "vocab": {c: i for i, c in enumerate(ALPHABET)}, "merges": []}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [
        {"id": 256 + i, "content": c, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": c != "<think>"}
        for i, c in enumerate([*CHATML, "<think>"])
    ]  # fmt: skip
    files: dict[str, Any] = {
        "tokenizer": {
            "version": "1.0", "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0,
            "direction": "Right"}, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
        },
        "tokenizer_config": {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}},
        "config": {"eos_token_id": 258},
        "generation_config": {"eos_token_id": [258, 256]},
    }  # fmt: skip
    path.mkdir(exist_ok=True)
    for name, content in (files | changes).items():
        if content is not None:
            (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_directory_is_read_whole(tmp_path: Path) -> None:
    config = {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "chat_template": "{{ 'T' }}",
        "add_bos_token": True,
    }
    ours = Tokenizer.load(directory(tmp_path, tokenizer_config=config))
    assert (ours.size, ours.bos_id, ours.eos_ids, ours.add_bos) == (260, 256, {256, 258}, True)
    assert ours.special_ids == {256, 257, 258}
    assert ours.control == {*CHATML, "<think>"}
    assert ours.templates == {"default": "{{ 'T' }}"}
    assert ours.encode("<think>a long text<s>", special="template", bos=True)[:3] == [256, 259, 97]
    assert len(ours.encode("a long text")) == 11
    assert ours.decode([259, 97]) == "<think>a"


def test_directory_bos_follows_the_post_processor(tmp_path: Path) -> None:
    spec = json.loads((directory(tmp_path) / "tokenizer.json").read_text())
    spec["post_processor"] = {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
            {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<s>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
            },
        ],
    }
    ours = Tokenizer.load(directory(tmp_path, tokenizer=spec))
    assert ours.encode("x", bos=True) == [256, 120]


def test_template_file_and_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "U"}]
    config = {"eos_token": "<|im_end|>", "chat_template": named}
    assert Tokenizer.load(directory(tmp_path, tokenizer_config=config)).templates == {
        "default": "D",
        "tool_use": "U",
    }
    (tmp_path / "chat_template.jinja").write_text("F")
    assert Tokenizer.load(tmp_path).templates == {"default": "F"}


def test_additional_templates_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    """`save_pretrained` of several templates: one file for the default, a folder for the others."""
    from transformers import PreTrainedTokenizerFast

    plain = directory(tmp_path / "plain", tokenizer_config={"eos_token": "<|im_end|>"})
    saved = PreTrainedTokenizerFast.from_pretrained(plain)
    saved.chat_template = {"default": "D", "tool_use": "U", "rag": "R"}
    saved.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "additional_chat_templates").is_dir()
    assert Tokenizer.load(tmp_path / "saved").templates == {"default": "D", "tool_use": "U", "rag": "R"}


def test_a_gguf_files_named_templates_are_read(tmp_path: Path) -> None:
    """As the format's own writer puts them."""
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_chat_template([{"name": n, "template": t} for n, t in (("default", "D"), ("tool_use", "U"))])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    meta = metadata(CHATML) | read_metadata(tmp_path / "m.gguf")
    assert from_metadata(meta).templates == {"default": "D", "tool_use": "U"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": None}, "no tokenizer.json"),
        ({"tokenizer": "{"}, "cannot read"),
        ({"tokenizer": {"model": {"type": "Unigram"}}}, "only BPE"),
        ({"tokenizer": {"version": "1.0"}}, "malformed"),
        (
            {"tokenizer": {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": 3}}},
            "tokenizer.json",
        ),
        ({"tokenizer_config": {}, "config": {}, "generation_config": {}}, "no end-of-sequence"),
    ],
)
def test_bad_directories_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.load(directory(tmp_path, **changes))


# -- GGUF files -----------------------------------------------------------------------------------


def gguf_bytes(meta: dict[str, Any]) -> bytes:
    def text(s: str) -> bytes:
        return struct.pack("<Q", len(s.encode())) + s.encode()

    def value(v: Any) -> bytes:
        if isinstance(v, bool):
            return struct.pack("<I?", 7, v)
        if isinstance(v, int):
            return struct.pack("<II", 4, v)
        if isinstance(v, str):
            return struct.pack("<I", 8) + text(v)
        if v and isinstance(v[0], str):
            return struct.pack("<IIQ", 9, 8, len(v)) + b"".join(map(text, v))
        return struct.pack("<IIQ", 9, 5, len(v)) + struct.pack(f"<{len(v)}i", *v)

    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, len(meta))
    return head + b"".join(text(k) + value(v) for k, v in meta.items())


def test_gguf_metadata_is_what_was_written(tmp_path: Path) -> None:
    meta = metadata(CHATML)
    meta["tokenizer.ggml.merges"] = [f"{ALPHABET[104]} {ALPHABET[105]}"]
    meta["tokenizer.ggml.tokens"].append("hi")
    meta["tokenizer.ggml.token_type"].append(1)
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes(meta))
    assert read_metadata(file) == meta
    assert Tokenizer.load(file).encode("hi") == [259]


def test_gguf_metadata_equals_the_library_on_the_default_model() -> None:
    meta = read_metadata(resolve_model().path)
    assert meta["tokenizer.ggml.pre"] == "smollm"
    assert meta["llama.rope.freq_base"] == 100000.0
    assert [len(meta[f"tokenizer.ggml.{k}"]) for k in ("tokens", "token_type", "merges")] == [
        49152,
        49152,
        48900,
    ]


def test_damaged_gguf_files_are_refused(tmp_path: Path) -> None:
    whole = gguf_bytes(metadata(CHATML))
    file = tmp_path / "m.gguf"
    for content in (b"", b"GGUF", b"GGML" + whole[4:], whole[: len(whole) // 2], whole[:40]):
        file.write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"m\.gguf"):
            read_metadata(file)
    with pytest.raises(ModelLoadError, match="absent"):
        read_metadata(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "pre-tokenizer 'martian'"),
        ({"tokenizer.ggml.model": "bert"}, "model 'bert'"),
        ({"tokenizer.ggml.tokens": []}, "incomplete"),
    ],
)
def test_unsupported_gguf_vocabularies_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        from_metadata(metadata(CHATML) | changes)
    with pytest.raises(ModelLoadError, match="incomplete"):
        from_metadata({})
