"""Grammars with vocabularies whose tokenizer puts a blank before a prompt: a forced text is no prompt, so it
gets no blank."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator

import numpy as np
import pytest
import tokenizers
import torch
from sentencepiece_models import FORMS, sentencepiece
from text_models import default_tokenizer, metadata, toy

from hotprefix.engine.params import SamplingParams, StructuredOutput
from hotprefix.engine.sampling.checker import GrammarChecker
from hotprefix.engine.sampling.sampler import Sampler
from hotprefix.engine.sampling.structured import Compiler, Vocabulary
from hotprefix.engine.text.continuation import Continuation
from hotprefix.engine.text.source import from_metadata
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.engine.text.tool_choice import forced_calls
from hotprefix.engine.text.tools import ToolFormat, ToolParser
from hotprefix.errors import InputError

TOOLS = [
    {"type": "function", "function": {"name": "hello", "parameters": {
        "type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"], "additionalProperties": False}}},
]  # fmt: skip
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["hello world", " no", "é"]}},
        "required": ["name"],
        "additionalProperties": False,
    }
)
REGEX = "Answer: [0-9]{2} (yes|no)é"


@pytest.fixture(scope="module", params=FORMS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sentencepiece(request.param, tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def checker(tokenizer: Tokenizer) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(Vocabulary.of(tokenizer, tokenizer.size))
    yield checker
    checker.close()


def says(tokenizer: Tokenizer, structured: StructuredOutput, seed: int) -> str:
    """The output from random logits under the grammar; the grammar has to end it."""
    compiler = Compiler(Vocabulary.of(tokenizer, tokenizer.size))
    sampler = Sampler(tokenizer.size, eos_ids=tokenizer.eos_ids, compiler=compiler)
    sampler.start("a", [1], SamplingParams(structured=structured, seed=seed))
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    for _ in range(500):
        row = rng.normal(0, 2, (1, tokenizer.size)).astype(np.float32)
        row[0, [i for i, b in enumerate(tokenizer.token_bytes) if b in (b"}", b'"')]] += 8.0
        sampled = sampler.sample(["a"], torch.from_numpy(row))[0]
        ids.append(sampled.token)
        if sampled.ended:
            kept = [i for i in ids if i not in tokenizer.eos_ids]
            return b"".join(tokenizer.token_bytes[i] for i in kept).decode()
    raise AssertionError("the grammar did not end the output")


def test_a_prompt_gets_a_blank_and_what_goes_on_gets_none(tokenizer: Tokenizer) -> None:
    def texts(ids: list[int]) -> list[bytes]:
        return [tokenizer.token_bytes[i] for i in ids]

    assert texts(tokenizer.encode("hello world")) == [b" hello", b" world"]
    assert texts(tokenizer.continuation("hello world")) == [b"hello", b" world"]
    assert texts(tokenizer.continuation(" hello")) == [b" hello"]
    assert texts(tokenizer.continuation("</s>")) == [b"<", b"/", b"s", b">"]


@pytest.mark.parametrize("seed", range(3))
def test_every_kind_of_grammar_is_followed(tokenizer: Tokenizer, seed: int) -> None:
    value = json.loads(says(tokenizer, StructuredOutput("json_schema", SCHEMA), seed))
    assert value["name"] in ("hello world", " no", "é")
    assert isinstance(json.loads(says(tokenizer, StructuredOutput("json_object", ""), seed)), dict)
    choice = StructuredOutput("choice", '["yes", "no thanks", "hello"]')
    assert says(tokenizer, choice, seed) in ("yes", "no thanks", "hello")
    assert says(tokenizer, StructuredOutput("choice", '["hello world"]'), seed) == "hello world"
    assert re.fullmatch(REGEX, says(tokenizer, StructuredOutput("regex", REGEX), seed))
    for form in (ToolFormat.HERMES, ToolFormat.MISTRAL):
        forced = forced_calls(form, TOOLS, "required", tokenizer)
        assert forced is not None
        parser = ToolParser(form, ["hello"])
        outputs = [parser.push(says(tokenizer, forced, seed)), parser.flush()]
        calls = [piece for output in outputs for piece in output.calls]
        assert "".join(output.content for output in outputs) == ""
        assert {call.name for call in calls if call.name is not None} == {"hello"}


def test_the_checkers_process_and_the_engine_agree(tokenizer: Tokenizer, checker: GrammarChecker) -> None:
    compiler = Compiler(Vocabulary.of(tokenizer, tokenizer.size + 64))
    forced = forced_calls(ToolFormat.MISTRAL, TOOLS, "name:hello", tokenizer)
    assert forced is not None
    good = [
        StructuredOutput("json_object", ""),
        StructuredOutput("json_schema", SCHEMA),
        StructuredOutput("choice", '["yes", "</s>", "e\\u0301"]'),
        StructuredOutput("choice", '["hello world"]'),
        StructuredOutput("regex", REGEX),
        forced,
    ]
    for structured in good:
        compiler.check(structured)
        checker.check(structured)
    for structured in (StructuredOutput("regex", "(a"), StructuredOutput("choice", "[]")):
        verdicts = []
        for judge in (compiler.check, checker.check):
            with pytest.raises(InputError) as refused:
                judge(structured)
            verdicts.append(refused.value.message)
        assert verdicts[0] == verdicts[1]


# -- what the tokenizer would change ----------------------------------------------------------------


def test_a_text_that_the_tokenizer_would_change_is_said_as_it_is() -> None:
    """Qwen2's normalizer composes characters: an e with an accent after it becomes one character."""
    tokenizer = toy(("<s>", "<|im_end|>"), pre="qwen2")
    decomposed = "e\u0301!"
    assert tokenizer.decode(tokenizer.encode(decomposed)) == "é!"
    assert tokenizer.decode(tokenizer.continuation(decomposed)) == decomposed
    structured = StructuredOutput("choice", json.dumps([decomposed]))
    assert says(tokenizer, structured, 1) == decomposed


def test_a_pre_tokenizer_that_adds_a_blank_adds_none() -> None:
    source = from_metadata(metadata(("<s>", "<|im_end|>")))
    blank = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    for part in (blank, tokenizers.pre_tokenizers.Sequence([tokenizers.pre_tokenizers.Digits(), blank])):
        source.inner.pre_tokenizer = part
        tokenizer = Tokenizer(source)
        assert tokenizer.decode(tokenizer.continuation("yes 1")) == "yes 1"
        assert says(tokenizer, StructuredOutput("choice", '["yes 1"]'), 1) == "yes 1"


def test_an_added_token_that_is_no_control_token_is_one_token() -> None:
    tokenizer = toy(("<s>", "<|im_end|>"), ("<tool_call>", "  "))
    assert tokenizer.continuation("<tool_call>\n") == [tokenizer.token_id("<tool_call>"), ord("\n")]
    assert tokenizer.continuation("a  b") == [ord("a"), tokenizer.token_id("  "), ord("b")]
    assert tokenizer.continuation("<s>") == [*b"<s>"]


def test_a_byte_that_no_token_has_is_refused() -> None:
    tokenizer = default_tokenizer()
    lacking = next(c for c in map(chr, range(32)) if c.encode() not in set(tokenizer.token_bytes))
    compiler = Compiler(Vocabulary.of(tokenizer, 49152))
    for text in (lacking, "yes" + lacking):
        with pytest.raises(InputError, match="choice"):
            compiler.check(StructuredOutput("choice", json.dumps([text])))


def test_it_can_be_sent_to_another_process(tokenizer: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(tokenizer.continuation))
    assert isinstance(copy, Continuation)
    for text in ("hello world", "", " no é", "\x00"):
        assert copy(text) == tokenizer.continuation(text)
